"""The Triton kernels compiled ahead of time: no GPU is needed, none is used."""

import os
import subprocess

import pytest
import torch

triton = pytest.importorskip("triton")

import triton_compiler  # noqa: E402

from capsroute.ops.inverted import triton as kernels  # noqa: E402
from capsroute.ops.inverted.triton.backward import gradients  # noqa: E402
from capsroute.ops.inverted.triton.forward import weighted_votes  # noqa: E402
from capsroute.ops.inverted.triton.geometry import Geometry  # noqa: E402

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
    "class 8×8": ((128, 1, 1, 2304, 64), (1, 1, 2304, 10, 8, 8), 1),
    "class vector": ((128, 1, 1, 576, 64), (1, 1, 576, 10, 64, 64), 1),
    "odd small": ((7, 6, 5, 3, 9), (2, 2, 3, 5, 3, 3), 2),
    "odd large": ((7, 6, 5, 3, 20), (2, 2, 3, 5, 20, 17), 1),
}
QUICK = ("conv 4×4", "class 4×4", "conv vector")


def compile_step(monkeypatch, shapes, dtype, capability):
    """Every kernel of a forward and a backward pass; their names."""
    children, weight, stride = shapes
    children, weight = torch.empty(children, dtype=dtype), torch.empty(weight, dtype=dtype)
    sizes = Geometry.of(children, weight, stride, rows_first=False)
    if sizes.small:
        weight = weight.transpose(3, 4).contiguous()
    parents = torch.empty(sizes.parents_shape(), dtype=dtype)
    with triton_compiler.compiling(monkeypatch, capability) as compiled:
        weighted_votes(children, weight, parents, None, sizes, 0.25, keep=False)
        gradients(parents.clone(), children, weight, parents, sizes, 0.25)
    return compiled


def spilled_bytes(kernel, tmp_path):
    """Stack of a compiled kernel, as the disassembler that comes with triton reports it."""
    tool = triton.knobs.nvidia.cuobjdump.path
    file = tmp_path / "kernel.cubin"
    file.write_bytes(kernel.asm["cubin"])
    usage = subprocess.run(
        [tool, "--dump-resource-usage", str(file)], capture_output=True, text=True, check=True
    ).stdout
    return int(usage.split("STACK:")[1].split()[0])


def test_kernels_of_cifar10_keep_their_poses_in_registers(monkeypatch, tmp_path):
    for name in ("conv 4×4", "class 4×4"):
        for kernel, _, compiled in compile_step(monkeypatch, LAYERS[name], torch.bfloat16, 90):
            assert spilled_bytes(compiled, tmp_path) == 0, kernel.__name__


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_each_kernel_compiles_for_each_generation(monkeypatch, capability):
    seen = set()
    for name in ("conv 4×4", "conv vector"):
        compiled = compile_step(monkeypatch, LAYERS[name], torch.bfloat16, capability)
        seen |= {kernel.__name__ for kernel, _, _ in compiled}
    assert seen == {
        "route_kernel",
        "coefficients_kernel",
        "aggregate_kernel",
        "small_children_kernel",
        "small_weight_kernel",
        "large_children_kernel",
        "large_weight_kernel",
        "fold_kernel",
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYERS],
)
def test_every_variant_compiles_for_hopper(monkeypatch, name, dtype):
    assert len(compile_step(monkeypatch, LAYERS[name], dtype, 90)) >= 4


def test_what_the_kernels_cannot_take_is_said():
    children, weight = torch.zeros(2, 1, 1, 3, 4), torch.zeros(1, 1, 3, 2, 2, 2)
    assert "CUDA" in kernels.supported(children, weight)
    assert "float64" in kernels.supported(children.double(), weight.double())
    assert "bfloat16" in kernels.supported(children, weight.bfloat16())
    wide = torch.zeros(1, 1, 3, 2, 4, 300)
    assert "4×300" in kernels.supported(children, wide)
    assert "2000 parents" in kernels.supported(children, torch.zeros(1, 1, 3, 2000, 2, 2))
    assert "empty" in kernels.supported(children[:0], weight)
