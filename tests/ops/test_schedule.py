"""Schedules against the paper's Procedure 2 as loops, and the light cone against no cone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from capsroute.layers import CapsuleStack, ConvCaps, LinearCaps
from capsroute.ops import schedule


def test_light_cone_counts():
    assert schedule.light_cone(1, 3) == [1, 1, 1]
    assert schedule.light_cone(2, 3) == [1, 1, 2]  # only the class layer routes at all
    assert schedule.light_cone(4, 3) == [2, 3, 4]
    assert schedule.light_cone(10, 2) == [9, 10]


@st.composite
def stacks(draw):
    """A few tiny capsule layers: convolutional ones first, at least one linear on top."""
    pose = draw(st.sampled_from(["matrix", "vector"]))
    pose_dim = draw(st.sampled_from([1, 4])) if pose == "matrix" else draw(st.integers(2, 4))
    torch.manual_seed(draw(st.integers(0, 99)))
    capsules, size = draw(st.integers(1, 2)), draw(st.integers(3, 4))
    primary = torch.randn(2, size, size, capsules, pose_dim, dtype=torch.float64)
    layers = []
    for _ in range(draw(st.integers(0, 2))):
        out, k = draw(st.integers(1, 3)), draw(st.integers(1, min(2, size)))
        stride = draw(st.integers(1, 2))
        layers.append(ConvCaps(capsules, out, pose_dim, kernel_size=k, stride=stride, pose=pose))
        capsules, size = out, (size - k) // stride + 1
    children = capsules * size * size
    for _ in range(draw(st.integers(1, 2))):
        out = draw(st.integers(2, 3))
        layers.append(LinearCaps(children, out, pose_dim, pose=pose))
        children = out
    for layer in layers:  # LayerNorm's default gain and bias would hide a mix-up
        torch.nn.init.normal_(layer.norm.weight)
        torch.nn.init.normal_(layer.norm.bias)
    return primary.requires_grad_(), [layer.double() for layer in layers]


def as_oracle(layers):
    return [
        oracle.Layer(layer.weight, layer.norm.weight, layer.norm.bias, getattr(layer, "stride", 1))
        for layer in layers
    ]


def all_gradients(output, primary, layers):
    inputs = [primary, *(p for layer in layers for p in layer.parameters())]
    cotangent = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    found = torch.autograd.grad(output, inputs, cotangent, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


@pytest.mark.parametrize("impl", ["reference", "tiled"])
@pytest.mark.parametrize("name", schedule.SCHEDULES)
@settings(deadline=None, max_examples=20)
@given(stack=stacks(), iterations=st.integers(1, 5))
def test_stack_equals_the_papers_inference(impl, name, stack, iterations):
    primary, layers = stack
    for layer in layers:
        layer.impl = impl
    expected = oracle.inference(primary, as_oracle(layers), iterations, name == "concurrent")[-1]
    actual = CapsuleStack(layers, iterations=iterations, schedule=name)(primary)
    oracle.assert_close(actual, expected)
    for got, want in zip(
        all_gradients(actual, primary, layers),
        all_gradients(expected, primary, layers),
        strict=True,
    ):
        oracle.assert_close(got, want)


def deep_stack(capsule_layers):
    """`capsule_layers` of the paper's counting, so one routed layer fewer."""
    torch.manual_seed(capsule_layers)
    layers = [ConvCaps(2, 3, 4, kernel_size=2)]
    layers += [ConvCaps(3, 3, 4, kernel_size=2) for _ in range(capsule_layers - 3)]
    side = 5 - len(layers) if capsule_layers > 2 else 5
    children = 3 * side * side if capsule_layers > 2 else 2 * 25
    layers = [*layers[: capsule_layers - 2], LinearCaps(children, 3, 4)]
    primary = torch.randn(2, 5, 5, 2, 4, dtype=torch.float64, requires_grad=True)
    return primary, [layer.double() for layer in layers]


@pytest.mark.parametrize("iterations", range(1, 7))
@pytest.mark.parametrize("capsule_layers", range(2, 6))
def test_the_light_cone_changes_nothing(iterations, capsule_layers):
    primary, layers = deep_stack(capsule_layers)
    assert len(layers) == capsule_layers - 1
    cone = schedule.concurrent(layers, primary, iterations)[-1]
    full = schedule.concurrent(layers, primary, iterations, every_update=True)[-1]
    torch.testing.assert_close(cone, full, rtol=0, atol=1e-12)
    for got, want in zip(
        all_gradients(cone, primary, layers), all_gradients(full, primary, layers), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_the_light_cone_saves_the_updates_it_says(iterations):
    calls = [0, 0, 0]

    def counting(index):
        def step(children, parents):
            calls[index] += 1
            return children + (0 if parents is None else parents)

        return step

    steps = [counting(index) for index in range(3)]
    schedule.concurrent(steps, 1, iterations)
    assert calls == schedule.light_cone(iterations, 3)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_iterations_are_checked(bad):
    with pytest.raises(ValueError, match="`iterations` must be an integer of at least 1, got"):
        CapsuleStack([LinearCaps(2, 2, 4)], iterations=bad)


@pytest.mark.parametrize("name", schedule.SCHEDULES)
def test_a_stack_whose_iterations_are_set_to_none(name):
    stack = CapsuleStack([LinearCaps(2, 2, 4)], iterations=1, schedule=name)
    stack.iterations = 0
    with pytest.raises(ValueError, match="`iterations` must be at least 1, got 0"):
        stack(torch.rand(1, 2, 4))


def test_schedule_is_checked():
    with pytest.raises(
        ValueError, match="`schedule` must be one of 'concurrent', 'sequential', got 'x'"
    ):
        CapsuleStack([LinearCaps(2, 2, 4)], iterations=1, schedule="x")
