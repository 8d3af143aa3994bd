"""Ablation C's routing step against a loop over positions, children and parents, in float64."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from capsroute.ops.inverted.activations import activated_routing_step
from capsroute.ops.votes import tiled

NAMES = (
    "children",
    "child_log_activations",
    "weight",
    "parents",
    "parent_log_activations",
    "beta_u",
    "beta_a",
)


def oracle(
    children,
    log_a,
    weight,
    parents,
    parent_log_a,
    beta_u,
    beta_a,
    *,
    stride,
    scale,
    inverse_temperature,
):
    """Poses, log-activations and coefficients, one position of one image at a time."""
    if children.ndim == 3:
        up = [None if x is None else x[:, None, None] for x in (parents, parent_log_a)]
        poses, log_activations, r = oracle(
            children[:, None, None],
            log_a[:, None, None],
            weight[None, None],
            *up,
            beta_u,
            beta_a,
            stride=1,
            scale=scale,
            inverse_temperature=inverse_temperature,
        )
        return poses[:, 0, 0], log_activations[:, 0, 0], r[:, 0, 0, 0, 0]
    k, _, n_in, n_out, a, _ = weight.shape
    batch, height, width = children.shape[:3]
    size = (batch, (height - k) // stride + 1, (width - k) // stride + 1)
    results = []
    for b in range(batch):
        for y in range(size[1]):
            for x in range(size[2]):
                votes, activations, coefficients = [], [], []
                for dy in range(k):
                    for dx in range(k):
                        for i in range(n_in):
                            child = (b, y * stride + dy, x * stride + dx, i)
                            rows = children[child].view(-1, a)
                            v = [(rows @ weight[dy, dx, i, j]).flatten() for j in range(n_out)]
                            logits = torch.zeros(n_out, dtype=torch.float64)
                            if parents is not None:
                                logits = torch.stack(
                                    [
                                        scale * (parents[b, y, x, j] * v[j]).sum()
                                        + parent_log_a[b, y, x, j]
                                        for j in range(n_out)
                                    ]
                                )
                            votes.append(v)
                            activations.append(log_a[child].exp())
                            coefficients.append(logits.exp() / logits.exp().sum())
                poses, log_activations = [], []
                for j in range(n_out):
                    weights = [a_i * r[j] for a_i, r in zip(activations, coefficients, strict=True)]
                    mine = [v[j] for v in votes]
                    mass = sum(weights)
                    pose = sum(w * v for w, v in zip(weights, mine, strict=True))
                    mean = pose / mass
                    pairs = zip(weights, mine, strict=True)
                    variance = sum(w * (v - mean) ** 2 for w, v in pairs) / mass + 5e-4
                    fair_share = k * k * n_in / n_out
                    cost = ((beta_u[j] + variance.sqrt().log()) * mass / fair_share).sum()
                    poses.append(pose)
                    log_activations.append(
                        torch.sigmoid(inverse_temperature * (beta_a[j] - cost)).log()
                    )
                results.append(
                    (
                        torch.stack(poses),
                        torch.stack(log_activations),
                        torch.stack(coefficients).unflatten(0, (k, k, n_in)),
                    )
                )
    return [torch.stack(parts).unflatten(0, size) for parts in zip(*results, strict=True)]


def make_inputs(
    *,
    batch=1,
    size=(4, 3),
    n_in=2,
    out=3,
    matrix=True,
    linear=False,
    kernel=2,
    stride=1,
    first=False,
    seed=0,
    dtype=torch.float64,
) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    positions, window, parent_positions = size, (kernel, kernel), ()
    if linear:
        positions, window = (), ()
    else:
        parent_positions = tuple((s - kernel) // stride + 1 for s in size)
    transform, d, parent_d = ((2, 2), 4, 4) if matrix else ((3, 2), 3, 2)
    inputs: list[Tensor | None] = [
        normal(batch, *positions, n_in, d),
        F.logsigmoid(normal(batch, *positions, n_in)),
        normal(*window, n_in, out, *transform),
        None if first else normal(batch, *parent_positions, out, parent_d),
        None if first else F.logsigmoid(normal(batch, *parent_positions, out)),
        normal(out),
        normal(out),
    ]
    return [None if x is None else x.requires_grad_() for x in inputs]


def gradients(outputs, inputs) -> tuple[Tensor, ...]:
    """Of a loss that weighs every output differently."""
    loss = sum(
        (torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view_as(x) * x).sum()
        for x in outputs
        if x is not None and x.requires_grad
    )
    return torch.autograd.grad(loss, [x for x in inputs if x is not None], allow_unused=True)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * (1 + expected.abs().max())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    shapes=st.fixed_dictionaries(
        dict(
            batch=st.integers(1, 2),
            size=st.tuples(st.integers(2, 3), st.integers(2, 4)),
            n_in=st.integers(1, 3),
            out=st.integers(1, 3),
            matrix=st.booleans(),
            linear=st.booleans(),
            kernel=st.integers(1, 2),
            first=st.booleans(),
            seed=st.integers(0, 1000),
        )
    ),
    stride=st.integers(1, 2),
    scale=st.sampled_from([None, 1.0]),
    inverse_temperature=st.sampled_from([0.01, 1.0]),
    tile_bytes=st.sampled_from([1, 300, 1 << 20]),
    least_positions=st.sampled_from([1, 64]),
)
def test_matches_the_loop_forward_and_backward(
    shapes, stride, scale, inverse_temperature, tile_bytes, least_positions
):
    stride = 1 if shapes["linear"] else stride
    inputs = make_inputs(**shapes, stride=stride)
    default_scale = (4 if shapes["matrix"] else 2) ** -0.5
    expected = oracle(
        *inputs,
        stride=stride,
        scale=scale or default_scale,
        inverse_temperature=inverse_temperature,
    )
    with (
        patch.dict(tiled.TILE_BYTES, cpu=tile_bytes),
        patch.object(tiled, "LEAST_POSITIONS", least_positions),
    ):
        actual = activated_routing_step(
            *inputs,
            stride=stride,
            scale=scale,
            inverse_temperature=inverse_temperature,
            return_coefficients=True,
        )
        grads = gradients(actual, inputs)
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b)
    for a, b in zip(grads, gradients(expected, inputs), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("linear", [False, True])
def test_gradcheck(linear):
    inputs = make_inputs(size=(2, 2), n_in=1, out=2, linear=linear)

    def step(*x: Tensor) -> tuple[Tensor, Tensor]:
        return activated_routing_step(*x, inverse_temperature=0.5)[:2]

    assert torch.autograd.gradcheck(step, inputs)


def test_coefficients_only_on_request():
    assert activated_routing_step(*make_inputs(), inverse_temperature=0.1).coefficients is None


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("value", [0.0, 1.0, 1e3])
@pytest.mark.parametrize("activity", [0.0, -200.0, -math.inf])  # half and none of the children
def test_degenerate_inputs_stay_finite(linear, first, value, activity):
    inputs = make_inputs(linear=linear, first=first, dtype=torch.float32)
    with torch.no_grad():
        inputs[0].mul_(value)
        inputs[1].add_(activity)
        if not first and activity == -math.inf:
            inputs[4].fill_(activity)
    outputs = activated_routing_step(*inputs, inverse_temperature=1.0)[:2]
    for x in (*outputs, *gradients(outputs, inputs)):
        assert x.isfinite().all()


@pytest.mark.parametrize("linear", [False, True])
def test_an_empty_batch(linear):
    inputs = make_inputs(batch=0, linear=linear)
    outputs = activated_routing_step(*inputs, inverse_temperature=1.0)[:2]
    assert [x.shape for x in outputs] == [inputs[3].shape, inputs[4].shape]
    assert not any(grad.any() for grad in gradients(outputs, inputs))


@pytest.mark.parametrize("first", [False, True])
def test_autocast_rounds_what_is_multiplied_and_nothing_else(first):
    inputs = make_inputs(first=first, dtype=torch.float32)
    rounded = [x.bfloat16().float() if at in (0, 2) else x for at, x in enumerate(inputs)]
    expected = activated_routing_step(*rounded, inverse_temperature=0.1)[:2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = activated_routing_step(*inputs, inverse_temperature=0.1)[:2]
    outputs = (*actual, *gradients(actual, inputs))
    for a, b in zip(outputs, (*expected, *gradients(expected, inputs)), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)


def test_float32_is_close_to_float64():
    # votes that nearly agree, far from zero: their variance must not cancel
    double = [x.detach() for x in make_inputs()]
    double[0] += 1000
    double[2][:] = double[2].flatten(0, 2)[0]
    double[3] *= 1e-3
    expected = activated_routing_step(*double, inverse_temperature=0.1)[:2]
    actual = activated_routing_step(*[x.float() for x in double], inverse_temperature=0.1)[:2]
    for a, b in zip(actual, expected, strict=True):
        assert_close(a.double(), b, 1e-5)


def test_compiles_to_one_graph():
    inputs = make_inputs(linear=True)
    compiled = torch.compile(activated_routing_step, backend="aot_eager", fullgraph=True)
    actual = compiled(*inputs, inverse_temperature=0.1)[:2]
    expected = activated_routing_step(*inputs, inverse_temperature=0.1)[:2]
    outputs = (*actual, *gradients(actual, inputs))
    for a, b in zip(outputs, (*expected, *gradients(expected, inputs)), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(parents=None), "`parents` and `parent_log_activations` must be given together"),
        (dict(parents=torch.zeros(1, 3, 3, 3, 4)), r"`parents` must have shape \(1, 3, 2, 3, 4\)"),
        (dict(parent_log_activations=torch.zeros(1, 3)), "`parent_log_activations` must have"),
        (
            dict(children=torch.zeros(1, 4, 3, 5, 4)),
            "`children` must have 2 capsules to fit `weight`, got 5",
        ),
        (dict(children=torch.zeros(1, 4, 3, 2, 5)), "last two sizes of `weight`"),
        (dict(children=torch.zeros(1, 2, 4)), r"`weight` must have shape \(in, out, a, b\)"),
        (dict(child_log_activations=torch.zeros(1)), "`child_log_activations` must have shape"),
        (dict(weight=torch.zeros(4, 4, 2, 3, 2, 2)), "kernel within the 4×3 children, got 4×4"),
        (dict(stride=0), "`stride` must be at least 1, got 0"),
        (dict(beta_u=torch.zeros(1)), r"`beta_u` must have shape \(3,\), got \(1,\)"),
    ],
)
def test_mistakes_are_named(change, message):
    arguments = dict(zip(NAMES, make_inputs(), strict=True), inverse_temperature=0.1)
    with pytest.raises(ValueError, match=message):
        activated_routing_step(**(arguments | change))
