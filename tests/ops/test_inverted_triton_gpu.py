"""The Triton kernels on a card: `pytest -m gpu tests/ops`."""

import pytest
import torch
import triton_cases as cases

from capsroute.ops.inverted import routing_step
from capsroute.ops.inverted import triton as kernels
from capsroute.ops.inverted.triton import tuning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Freed memory that the kernels' buffers will reuse is full of NaN."""
    torch.cuda.empty_cache()
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28):
        poison = torch.full((size // 4,), float("nan"), device="cuda")
        del poison


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", cases.ODD)
def test_error_is_within_the_budget_of_plain_pytorch(name, dtype):
    for seed in range(5):
        cases.check(cases.ODD[name], dtype, seed, "cuda", draws=5)


@pytest.mark.parametrize("name", ["conv 4×4, 32 parents", "conv 6×6", "conv 8×8, 64 parents"])
def test_some_children_at_a_time_give_the_same_gradients(name, monkeypatch):
    for dtype in DTYPES:
        tensors, stride, scale = cases.layer(cases.ODD[name], dtype, 0, "cuda")
        whole = cases.run(kernels.routing_step, tensors, stride, scale)
        monkeypatch.setattr(tuning, "COEFFICIENT_BYTES", 100 << 10)
        cases.check(cases.ODD[name], dtype, 0, "cuda", draws=5)
        chunks = cases.run(kernels.routing_step, tensors, stride, scale)
        monkeypatch.undo()
        assert torch.equal(chunks[1], whole[1])  # of a child, so no sum crosses chunks


@pytest.mark.parametrize("name", ["conv 6×6", "conv 8×8, 64 parents"])
def test_some_parents_at_a_time_are_within_the_budget(name, monkeypatch):
    monkeypatch.setattr(tuning, "WINDOW_BYTES", 0)
    for dtype in DTYPES:
        cases.check(cases.ODD[name], dtype, 0, "cuda", draws=5)


@pytest.mark.parametrize(
    "name", ["conv 4×4, stride 2", "linear vector", "conv vector, several tiles"]
)
def test_the_step_is_deterministic(name):
    tensors, stride, scale = cases.layer(cases.ODD[name], torch.bfloat16, 0, "cuda")
    runs = [cases.run(kernels.routing_step, tensors, stride, scale) for _ in range(3)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def two_steps(children, weight, parents, *, stride, scale):
    """The same weight twice in one graph, as two iterations of a layer use it."""
    parents = kernels.routing_step(children, weight, parents, stride=stride, scale=scale)
    return kernels.routing_step(children, weight, parents.tanh(), stride=stride, scale=scale)


@pytest.mark.parametrize("name", ["conv 4×4, stride 2", "linear vector"])
def test_compiles_into_one_graph(name):
    tensors, stride, scale = cases.layer(cases.ODD[name], torch.bfloat16, 0, "cuda")
    eager = cases.run(two_steps, tensors, stride, scale)
    compiled = cases.run(torch.compile(two_steps, fullgraph=True), tensors, stride, scale)
    for got, want in zip(compiled, eager, strict=True):
        assert (got - want).float().norm() <= 0.01 * want.float().norm()


def test_auto_takes_the_kernels_in_a_compiled_graph():
    found = []

    def backend(graph, _):
        found.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    tensors, stride, _ = cases.layer(cases.ODD["conv 4×4, stride 2"], torch.bfloat16, 0, "cuda")
    torch.compile(routing_step, backend=backend, fullgraph=True)(*tensors[:3], stride=stride)
    assert any("inverted_forward" in target for target in found)


@pytest.mark.parametrize("name", ["conv 4×4, stride 2", "linear 4×4", "linear vector"])
def test_captures_into_a_cuda_graph(name):
    tensors, stride, scale = cases.layer(cases.ODD[name], torch.bfloat16, 0, "cuda")
    expected = cases.run(kernels.routing_step, tensors, stride, scale)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cases.run(kernels.routing_step, tensors, stride, scale)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = cases.run(kernels.routing_step, tensors, stride, scale)
        for tensor in captured:
            tensor.detach().fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def test_memory_does_not_grow_with_the_pairs(monkeypatch):
    """Neither votes nor coefficients of every child and parent are ever held."""
    monkeypatch.setattr(tuning, "COEFFICIENT_BYTES", 4 << 20)
    shapes = ((64, 7, 7, 64, 16), (3, 3, 64, 64, 4, 4), 1)
    tensors, stride, scale = cases.layer(shapes, torch.bfloat16, 0, "cuda")
    cases.run(kernels.routing_step, tensors, stride, scale)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cases.run(kernels.routing_step, tensors, stride, scale)
    positions, window, n_out = 64 * 25, 576, 64
    coefficients = 2 * 2 * positions * window * n_out
    assert torch.cuda.max_memory_allocated() - before < coefficients / 2
