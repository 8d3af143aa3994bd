"""The Triton kernels compiled ahead of time: no GPU is needed, none is used."""

import contextlib
import itertools
import os
import re

import pytest
import torch

triton = pytest.importorskip("triton")

import triton_compiler  # noqa: E402

from capsroute.ops.inverted import triton as kernels  # noqa: E402
from capsroute.ops.inverted.triton import geometry, tuning  # noqa: E402
from capsroute.ops.inverted.triton.fold import least_padding  # noqa: E402
from capsroute.ops.inverted.triton.forward import vote_precision  # noqa: E402
from capsroute.ops.inverted.triton.geometry import Geometry, power_of_two  # noqa: E402
from capsroute.ops.inverted.triton.tile import Tile  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

# children, weight, stride; the layers of the models, and the odd ones
LAYERS = {
    "conv 4×4": ((128, 16, 16, 32, 16), (3, 3, 32, 32, 4, 4), 2),
    "class 4×4": ((128, 1, 1, 800, 16), (1, 1, 800, 10, 4, 4), 1),
    "conv vector": ((128, 8, 8, 16, 64), (3, 3, 16, 16, 64, 64), 1),
    "conv 6×6": ((128, 16, 16, 32, 36), (3, 3, 32, 32, 6, 6), 2),
    "linear 6×6": ((128, 1, 1, 20, 36), (1, 1, 20, 100, 6, 6), 1),
    "conv 8×8": ((128, 8, 8, 16, 64), (3, 3, 16, 16, 8, 8), 1),
    "conv 8×8, wide": ((128, 8, 8, 64, 64), (3, 3, 64, 64, 8, 8), 1),
    "class 8×8": ((128, 1, 1, 2304, 64), (1, 1, 2304, 10, 8, 8), 1),
    "class vector": ((128, 1, 1, 576, 64), (1, 1, 576, 10, 64, 64), 1),
    "linear 2×2": ((70, 1, 1, 19, 4), (1, 1, 19, 130, 2, 2), 1),
    "odd small": ((7, 6, 5, 3, 9), (2, 2, 3, 5, 3, 3), 2),
    "odd large": ((7, 6, 5, 3, 20), (2, 2, 3, 5, 20, 17), 1),
    "largest vector": ((64, 6, 6, 8, 128), (3, 3, 8, 8, 128, 128), 1),
    "vector, many parents": ((64, 1, 1, 36, 64), (1, 1, 36, 1000, 64, 64), 1),
}


def compile_step(name, dtype, capability):
    compiled = triton_compiler.compile_step(LAYERS[name], dtype, capability)
    for kernel, _, made in compiled:
        assert made.metadata.shared <= tuning.SHARED_MEMORY, kernel.__name__
    return compiled


@pytest.mark.parametrize(
    "name",
    [
        "conv 4×4",
        "class 4×4",
        pytest.param("conv 6×6", marks=pytest.mark.slow),
        pytest.param("conv 8×8", marks=pytest.mark.slow),
    ],
)
def test_no_pose_leaves_the_registers_while_children_pass(name):
    for kernel, _, compiled in compile_step(name, torch.bfloat16, 90):
        spilled = [op for op in triton_compiler.main_loop(compiled) if op[:3] in ("LDL", "STL")]
        assert not spilled, kernel.__name__
        assert triton_compiler.resources(compiled)[1] <= 16, kernel.__name__  # addresses, before it


def test_votes_stay_in_the_accumulator():
    """The order of rows and columns in tile.py is for this: no vote moves to another thread."""
    compiled = compile_step("conv 4×4", torch.bfloat16, 90)
    by_name = {kernel.__name__: made.asm["ttgir"] for kernel, _, made in reversed(compiled)}
    products = {
        "route_kernel": "warp_group_dot",
        "small_coefficients_kernel": "warp_group_dot",
        "small_children_kernel": "tt.dot",  # 8 columns: Hopper's own product has no use for them
    }
    for name, product in products.items():
        loop = by_name[name].split("scf.for")[1].split("scf.yield")[0]
        assert product in loop
        moved = [line for line in loop.splitlines() if "convert_layout" in line]
        assert not [line for line in moved if "64x128" in line or "16x2x32x8" in line], moved


def test_large_poses_go_from_memory_to_the_tensor_cores():
    """They are copied while others are multiplied, and nothing goes back to shared memory.

    Only the votes' sum waits for loads of its own: the next child's coefficients, for two parents.
    """
    seen = set()
    for kernel, arguments, compiled in compile_step("conv vector", torch.bfloat16, 90):
        if "BLOCK_A" not in arguments:
            continue
        seen.add((kernel.__name__, arguments.get("PLANES")))
        loop = compiled.asm["ttgir"].split("scf.for")[1].split("scf.yield")[0]
        loads = loop.count("tt.load")
        assert loads == (2 if kernel.__name__ == "aggregate_kernel" else 0), kernel.__name__
        assert "async_copy_global_to_local" in loop and "warp_group_dot" in loop
        opcodes = triton_compiler.main_loop(compiled)
        moved = [op for op in opcodes if op[:3] in ("STS", "LDL", "STL")]
        assert not moved, kernel.__name__
        assert triton_compiler.resources(compiled)[1] == 0, kernel.__name__
    assert len(seen) == 6


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_each_kernel_compiles_for_each_generation(capability):
    seen = set()
    for name in ("odd small", "odd large"):
        compiled = compile_step(name, torch.bfloat16, capability)
        seen |= {kernel.__name__ for kernel, _, _ in compiled}
    assert seen == {
        "route_kernel",
        "coefficients_kernel",
        "aggregate_kernel",
        "small_coefficients_kernel",
        "small_children_kernel",
        "small_weight_kernel",
        "large_children_kernel",
        "large_weight_kernel",
        "fold_kernel",
        "add_kernel",
    }


def variants():
    """Every layer and dtype; by default the layers of CIFAR-10 and the vectors in bf16."""
    for name, dtype in itertools.product(LAYERS, (torch.bfloat16, torch.float16, torch.float32)):
        quick = dtype == torch.bfloat16 and name in ("conv 4×4", "class 4×4", "conv vector")
        marks = () if quick or name == "odd small" else pytest.mark.slow
        yield pytest.param(name, dtype, id=f"{name}, {dtype}", marks=marks)


@pytest.mark.parametrize(("name", "dtype"), list(variants()))
def test_every_variant_compiles_for_hopper(name, dtype):
    assert len(compile_step(name, dtype, 90)) >= 4


@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float32, "bf16x6"), (torch.bfloat16, "ieee")]
)
def test_fp32_votes_keep_their_bits(dtype, precision):
    """On a card three tf32 products do not, and plain ones are wrong for 3×3 poses (README.md)."""
    assert vote_precision(dtype) == precision


def test_nan_is_nobodys_smallest_share():
    """A `max` that prefers numbers to NaN would hide a parent that has diverged, in fp32."""
    clamps = []
    for name in ("odd small", "odd large"):
        for _, _, compiled in compile_step(name, torch.float32, 90):
            clamps += re.findall(r"(max\S*)\s.*0fC3480000", compiled.asm["ptx"])  # −200
    assert set(clamps) == {"max.NaN.f32"}


def test_kernels_run_where_their_tensors_are(monkeypatch):
    """Triton launches on the current device, whatever the tensors' own."""
    current = []

    @contextlib.contextmanager
    def device_of(tensor):
        current.append(tensor.device)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda **arguments: launched.append((grid, *current))

    launched = []
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    geometry.launch(Kernel(), (3,), size=2, out=torch.empty(2, device="meta"))
    assert launched == [((3,), torch.device("meta"))]


@pytest.mark.parametrize(
    ("megabytes", "lengths"), [(1 << 20, [72]), (128, [36, 36]), (64, [18] * 4), (1, [1] * 72)]
)
def test_coefficients_are_held_for_some_children_at_a_time(monkeypatch, megabytes, lengths):
    monkeypatch.setattr(tuning, "COEFFICIENT_BYTES", megabytes << 20)
    sizes = Geometry(128, 16, 16, n_in=32, n_out=32, k=3, stride=2, rows=4, a=4, b=4)
    chunks = tuning.chunks(Tile.of(sizes), sizes.positions, torch.bfloat16)
    assert [len(chunk) for chunk in chunks] == lengths
    assert list(itertools.chain(*chunks)) == list(range(72))


@pytest.mark.parametrize(
    ("parts", "size", "at_once"), [(4, 1 << 20, 4), (4, 50 << 20, 2), (4, 1 << 30, 1), (1, 1, 1)]
)
def test_parts_of_the_parents_share_a_buffer_that_would_be_large(parts, size, at_once):
    assert tuning.parts_at_once(parts, size) == at_once


@pytest.mark.parametrize(("channels", "block"), [(512, 512), (1152, 128), (4096, 1024), (36, 64)])
def test_folding_leaves_few_lanes_idle(channels, block):
    assert least_padding(channels, min(1024, power_of_two(channels))) == block


def test_what_the_kernels_cannot_take_is_said():
    children, weight = torch.zeros(2, 1, 1, 3, 4), torch.zeros(1, 1, 3, 2, 2, 2)
    assert "CUDA" in kernels.supported(children, weight)
    assert "float64" in kernels.supported(children.double(), weight.double())
    assert "empty" in kernels.supported(children[:0], weight)
    assert "empty" in kernels.supported(children[..., :0, :], weight[:, :, :0])


@pytest.mark.parametrize(
    ("children", "weight", "reason"),
    [
        ((2, 1, 1, 3, 128), (1, 1, 3, 2, 128, 128), None),
        ((2, 1, 1, 3, 128), (1, 1, 3, 2, 128, 129), "128×129 is larger"),
        ((2, 1, 1, 3, 129), (1, 1, 3, 2, 129, 128), "129×128 is larger"),
        ((2, 1, 1, 3, 4), (1, 1, 3, 1024, 2, 2), None),
        ((2, 1, 1, 3, 4), (1, 1, 3, 1025, 2, 2), "1025 parents are more"),
        ((2**19, 1, 1, 2**10, 4), (1, 1, 2**10, 2, 2, 2), "2³¹ elements"),
        ((2**19 - 1, 1, 1, 2**10, 4), (1, 1, 2**10, 2, 2, 2), None),
        ((1, 1, 1, 2**17, 16), (1, 1, 2**17, 2**10, 4, 4), "2³¹ elements"),
        ((2**25, 1, 1, 1, 16), (1, 1, 1, 1, 4, 4), "2³¹ elements"),  # 1 parent is padded to 4
        ((2**25 - 1, 1, 1, 1, 16), (1, 1, 1, 1, 4, 4), None),
        ((2**26, 1, 1, 1, 4), (1, 1, 1, 4, 2, 2), "2³¹ elements"),  # 4 parents are padded to 8
        ((2**26 - 1, 1, 1, 1, 4), (1, 1, 1, 4, 2, 2), None),
        ((2**26, 1, 1, 1, 1), (1, 1, 1, 4, 1, 1), "2³¹ elements"),  # of r and slopes
        ((2**26 - 1, 1, 1, 1, 1), (1, 1, 1, 4, 1, 1), None),
        ((2, 1, 1, 2**16, 16), (1, 1, 2**16, 2, 16, 8), "65536 children"),
        ((2, 1, 1, 2**16 - 1, 16), (1, 1, 2**16 - 1, 2, 16, 8), None),
        ((2, 1, 1, 2**16, 16), (1, 1, 2**16, 2, 4, 4), None),  # stacks of them share a program
    ],
)
def test_how_large_the_tensors_may_be(children, weight, reason):
    sizes = [torch.empty(shape, device="meta") for shape in (children, weight)]
    said = kernels.supported(*sizes)
    assert "not meta" in said if reason is None else reason in said
