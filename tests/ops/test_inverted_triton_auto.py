"""What `impl="auto"` takes, and that it says so once. The kernels themselves need no GPU here."""

import logging

import pytest
import torch

from capsroute.ops import choice
from capsroute.ops.inverted import api, reference, routing_step
from capsroute.ops.inverted import triton as kernels


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 4, 3, 4), (3, 3, 3, 5, 2, 2), (2, 2, 2, 5, 4))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(choice, "_said", set())


@pytest.fixture
def kernel_calls(monkeypatch):
    """As on a card: the kernels can take everything, and the formula stands in for them."""
    calls = []

    def routing_step(children, weight, parents, *, stride, scale):
        calls.append(tuple(children.shape))
        return reference.routing_step(children, weight, parents, stride=stride, scale=scale)[0]

    monkeypatch.setattr(kernels, "avoided", lambda children, weight: None)
    monkeypatch.setattr(kernels, "supported", lambda children, weight: None)
    monkeypatch.setattr(kernels, "routing_step", routing_step)
    return calls


def test_the_kernels_are_taken_where_they_can_run(tensors, kernel_calls):
    children, weight, parents = tensors
    want = routing_step(children, weight, parents, impl="reference")
    torch.testing.assert_close(routing_step(children, weight, parents), want)
    assert kernel_calls == [tuple(children.shape)]


def test_the_first_step_is_a_convolution_anywhere(tensors, kernel_calls):
    children, weight, _ = tensors
    routing_step(children, weight)
    assert not kernel_calls


def test_a_cpu_routes_in_tiles_even_beside_the_interpreter(tensors, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    children, weight, _ = tensors
    assert kernels.avoided(children, weight) == "the kernels need a CUDA device, not cpu"


@pytest.mark.parametrize(
    ("capability", "reason"),
    [((7, 5), "the kernels need compute capability 8.0 or newer, not 7.5"), ((8, 0), None)],
)
def test_older_cards_route_in_tiles(monkeypatch, capability, reason):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert kernels._missing("cuda", 0) == reason


@pytest.mark.parametrize(
    ("capability", "trusted"), [((9, 0), True), ((10, 3), False), ((12, 0), True)]
)
def test_cards_that_triton_miscompiles_for_route_in_tiles(
    tensors, monkeypatch, capability, trusted
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(kernels, "supported", lambda children, weight: None)

    class OnCard:  # of which this is all that is asked
        is_cuda, device = True, torch.device("cuda", 0)

    reason = kernels.avoided(OnCard, tensors[1])
    assert reason is None if trusted else "miscompile" in reason and "10.3" in reason
    monkeypatch.setattr(kernels, "_missing", lambda device, index: None)
    if not trusted:
        assert not kernels.can_project(OnCard, tensors[1])


def test_rocm_routes_in_tiles(monkeypatch):
    """Its devices are called cuda too, and nobody has run the kernels there."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert kernels._missing("cuda", 0) == "the kernels need CUDA, not ROCm"


def test_the_choice_is_logged_once_for_each_reason(tensors, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, logger="capsroute")
    children, weight, parents = tensors
    for _ in range(3):
        routing_step(children, weight, parents)
    monkeypatch.setattr(kernels, "avoided", lambda children, weight: "it rains")
    for _ in range(3):
        routing_step(children, weight, parents)
    assert [record.getMessage() for record in caplog.records] == [
        "inverted routing with impl='tiled': the kernels need a CUDA device, not cpu",
        "inverted routing with impl='tiled': it rains",
    ]


def test_an_explicit_choice_is_not_logged(tensors, caplog):
    caplog.set_level(logging.DEBUG, logger="capsroute")
    routing_step(*tensors, impl="tiled")
    assert not caplog.records


def test_the_choice_is_made_and_said_inside_one_compiled_graph(tensors, kernel_calls, caplog):
    caplog.set_level(logging.DEBUG, logger="capsroute")
    compiled = torch.compile(routing_step, fullgraph=True, backend="eager")
    want = routing_step(*tensors, impl="reference")
    for _ in range(2):
        torch.testing.assert_close(compiled(*tensors), want)
    said = [record.getMessage() for record in caplog.records if record.name == "capsroute"]
    assert said == ["inverted routing with impl='triton': the kernels can take these tensors"]


def test_the_real_question_breaks_no_graph(tensors):
    children, weight, _ = tensors
    for question in (api._choose, kernels.supported):
        compiled = torch.compile(question, fullgraph=True, backend="eager")
        assert compiled(children, weight) == question(children, weight)


class Step(torch.nn.Module):
    def forward(self, children, weight, parents):
        return routing_step(children, weight, parents)


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_graph_holds_the_formula(tensors, kernel_calls, strict):
    exported = torch.export.export(Step(), tuple(tensors), strict=strict)
    assert not kernel_calls
    want = routing_step(*tensors, impl="reference")
    torch.testing.assert_close(exported.module()(*tensors), want)
