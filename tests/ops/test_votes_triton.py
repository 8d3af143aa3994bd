"""Kernels for the moments of votes: compiled ahead of time anywhere, run with `pytest -m gpu`."""

import itertools
import os

import pytest
import torch

triton = pytest.importorskip("triton")

import triton_compiler  # noqa: E402
import vote_checks as checks  # noqa: E402

from capsroute.ops.em import em_routing  # noqa: E402
from capsroute.ops.inverted.triton import tuning  # noqa: E402
from capsroute.ops.votes import triton as kernels  # noqa: E402
from capsroute.ops.votes import votes_of  # noqa: E402
from capsroute.ops.votes.triton import launch  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# of EM routing, and of ablation C
LAYERS = {
    "EM, conv": ((128, 16, 16, 32, 16), (3, 3, 32, 32, 4, 4), 2),
    "EM, 10 classes": ((128, 1, 1, 512, 20), (1, 1, 512, 10, 5, 4), 1),
    "EM, 100 classes": ((128, 1, 1, 512, 20), (1, 1, 512, 100, 5, 4), 1),
    "C, conv 6×6": ((128, 16, 16, 32, 36), (3, 3, 32, 32, 6, 6), 2),
    "C, 100 classes": ((128, 1, 1, 800, 36), (1, 1, 800, 100, 6, 6), 1),
    "odd": ((7, 6, 5, 3, 9), (2, 2, 3, 5, 3, 3), 2),
}


def compile_layer(name, dtype, capability, competing):
    compiled = triton_compiler.compile_moments(LAYERS[name], dtype, capability, competing)
    for kernel, _, made in compiled:
        assert made.metadata.shared <= tuning.SHARED_MEMORY, kernel.__name__
    return compiled


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_each_kernel_compiles_for_each_generation(capability):
    compiled = compile_layer("odd", torch.bfloat16, capability, "by distance")
    assert {kernel.__name__ for kernel, _, _ in compiled} == {
        "shares_kernel",
        "moments_kernel",
        "slopes_kernel",
        "children_kernel",
        "weight_kernel",
        "fold_kernel",
        "add_kernel",
    }


@pytest.mark.parametrize("name", ["EM, conv", "EM, 10 classes"])
def test_no_vote_leaves_the_registers(name):
    for kernel, _, compiled in compile_layer(name, torch.bfloat16, 90, "by distance"):
        spilled = [op for op in triton_compiler.main_loop(compiled) if op[:3] in ("LDL", "STL")]
        assert not spilled, kernel.__name__


def variants():
    """Every layer, dtype and kind; by default the odd layer and EM's convolution in bf16."""
    for name, dtype, competing in itertools.product(LAYERS, DTYPES, checks.COMPETING):
        quick = name == "odd" or (name == "EM, conv" and dtype == torch.bfloat16)
        marks = () if quick else pytest.mark.slow
        yield pytest.param(name, dtype, competing, id=f"{name}, {dtype}, {competing}", marks=marks)


@pytest.mark.parametrize(("name", "dtype", "competing"), list(variants()))
def test_every_variant_compiles_for_hopper(name, dtype, competing):
    assert len(compile_layer(name, dtype, 90, competing)) >= 5


def test_what_the_kernels_cannot_take_is_said():
    children, weight = torch.zeros(2, 1, 1, 3, 81), torch.zeros(1, 1, 3, 2, 9, 9)
    assert "large" in kernels.supported(children, weight)
    small = torch.zeros(2, 1, 1, 3, 16), torch.zeros(1, 1, 3, 2, 4, 4)
    assert "CUDA" in kernels.supported(*small)
    assert "float64" in kernels.supported(*[x.double() for x in small])
    log_activations = torch.zeros(2, 1, 1, 3)
    with pytest.raises(ValueError, match=r"able to run here, got 'triton': .* CUDA"):
        votes_of(small[0], log_activations, small[1], impl="triton")
    with pytest.raises(ValueError, match=r"`impl` must be one of 'auto', .* got 'fast'"):
        votes_of(small[0], log_activations, small[1], impl="fast")


@pytest.fixture
def card():
    """Freed memory that the kernels' buffers will reuse is full of NaN."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.cuda.empty_cache()
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28):
        poison = torch.full((size // 4,), float("nan"), device="cuda")
        del poison
    return "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("competing", checks.COMPETING)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", checks.ODD)
def test_error_is_within_the_budget(name, dtype, competing, card):
    for seed in range(5):
        checks.check(checks.ODD[name], dtype, competing, seed, card, draws=3)


@pytest.mark.gpu
def test_some_children_at_a_time(card, monkeypatch):
    monkeypatch.setattr(tuning, "COEFFICIENT_BYTES", 100 << 10)
    for dtype, competing in itertools.product(DTYPES, checks.COMPETING):
        checks.check(checks.ODD["conv 4×4, 32 parents"], dtype, competing, 0, card, draws=3)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "kernel", "stride"), [((9, 8), 3, 2), ((4, 5), None, 1)])
def test_em_routing(size, kernel, stride, card):
    checks.check_em(size, kernel, stride, device=card, n_in=13, n_out=11, batch=5)


@pytest.mark.gpu
def test_the_rest_on_a_card(card):
    checks.check_activated(card)
    checks.check_sharp(card)
    checks.check_strides(card)
    checks.check_nobody_is_active(card)
    checks.check_autocast(card, torch.bfloat16)


@pytest.mark.gpu
def test_routing_is_deterministic_and_compiles_into_one_graph(card):
    inputs, cotangents = checks.em_layer((9, 8), 3, 2, device=card, n_in=13, n_out=11, batch=5)

    def route(inputs):
        return em_routing(*inputs, iterations=2, stride=2, impl="triton")

    first, second = (checks.with_gradients(route, inputs, cotangents) for _ in range(2))
    compiled = torch.compile(route, fullgraph=True)
    third = checks.with_gradients(compiled, inputs, cotangents)
    for parts in zip(first, second, third, strict=True):
        for one, other, close in zip(*parts, strict=True):
            assert torch.equal(one, other)
            assert checks.distance(close, one.double()) <= 1e-4


@pytest.mark.gpu
def test_no_more_pairs_are_held_than_have_room(card, monkeypatch):
    """Neither votes nor shares of every child and parent are ever held."""
    shapes = ((64, 7, 7, 64, 16), (3, 3, 64, 64, 4, 4), 1)
    inputs, cotangents, stride = checks.layer(shapes, torch.bfloat16, 0, card)

    def peak(room):
        monkeypatch.setattr(tuning, "COEFFICIENT_BYTES", room)
        monkeypatch.setattr(launch, "VOTE_BYTES", room)
        for _ in range(2):  # the first compiles
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            checks.with_gradients(
                lambda x: checks.moments(x, stride, "by distance", "triton"), inputs, cotangents
            )
        return torch.cuda.max_memory_allocated()

    pairs = 64 * 25 * 576 * 64
    shares_and_slopes, votes = 2 * 2 * pairs, 2 * 16 * pairs
    assert peak(room=1 << 40) - peak(room=4 << 20) >= shares_and_slopes + votes - 2 * (4 << 20)
