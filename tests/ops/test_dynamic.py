"""Dynamic routing against Sabour et al.'s Procedure 1 as loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from capsroute.ops import dynamic
from capsroute.ops.dynamic import dynamic_routing, length, squash
from capsroute.ops.inverted import routing_step


def squash_by_hand(s):
    square = sum(x * x for x in s)
    return square / (1 + square) * s / torch.sqrt(square + 1e-8)


def sabour(children, weight, iterations):
    """Procedure 1, with logits that start at zero and grow by the agreement."""
    parents = range(weight.shape[1])
    outputs = []
    for image in children:
        u_hat = [[image[i] @ weight[i, j] for j in parents] for i in range(len(image))]
        b = [[torch.zeros((), dtype=children.dtype) for _ in parents] for _ in range(len(image))]
        for _ in range(iterations):
            c = [torch.softmax(torch.stack(row), dim=0) for row in b]
            s = [sum(c[i][j] * u_hat[i][j] for i in range(len(image))) for j in parents]
            v = [squash_by_hand(s[j]) for j in parents]
            b = [[b[i][j] + u_hat[i][j] @ v[j] for j in parents] for i in range(len(image))]
        outputs.append(torch.stack(v))
    return torch.stack(outputs)


@settings(deadline=None, max_examples=20)
@given(
    shape=st.tuples(*[st.integers(1, 3)] * 5), iterations=st.integers(1, 5), seed=st.integers(0, 99)
)
def test_linear_equals_the_procedure(shape, iterations, seed):
    batch, n_in, n_out, d_in, d_out = shape
    torch.manual_seed(seed)
    children = torch.randn(batch, n_in, d_in, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(n_in, n_out, d_in, d_out, dtype=torch.float64, requires_grad=True)
    expected = sabour(children, weight, iterations)
    actual = dynamic_routing(children, weight, iterations)
    oracle.assert_close(actual, expected)
    cotangent = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (children, weight), cotangent)
    for got, want in zip(
        torch.autograd.grad(actual, (children, weight), cotangent), wanted, strict=True
    ):
        oracle.assert_close(got, want)


@pytest.mark.parametrize("iterations", [1, 3])
def test_convolution_is_the_linear_procedure_in_every_window(iterations):
    torch.manual_seed(0)
    children = torch.randn(2, 5, 4, 2, 3, dtype=torch.float64)
    weight = torch.randn(2, 2, 2, 3, 3, 4, dtype=torch.float64)
    actual = dynamic_routing(children, weight, iterations, stride=2)
    assert actual.shape == (2, 2, 2, 3, 4)
    for h in range(2):
        for w in range(2):
            window = children[:, 2 * h : 2 * h + 2, 2 * w : 2 * w + 2].flatten(1, 3)
            expected = sabour(window, weight.flatten(0, 2), iterations)
            torch.testing.assert_close(actual[:, h, w], expected, rtol=0, atol=1e-10)


def test_observer_sees_every_iteration():
    torch.manual_seed(0)
    children, weight = torch.randn(2, 4, 3), torch.randn(4, 5, 3, 2)
    seen = []
    poses = dynamic_routing(children, weight, 3, observe=lambda *step: seen.append(step))
    assert len(seen) == 3
    torch.testing.assert_close(seen[-1][0], poses)
    torch.testing.assert_close(seen[0][1], torch.full((2, 4, 5), 0.2))
    assert not torch.allclose(seen[1][1], seen[0][1])
    torch.testing.assert_close(dynamic_routing(children, weight, 3), poses)


def test_squash_and_length_at_zero_have_finite_gradients():
    zero = torch.zeros(2, 3, requires_grad=True)
    (squash(zero).sum() + length(zero).sum()).backward()
    assert torch.isfinite(zero.grad).all()
    long = torch.full((1, 4), 50.0)
    assert 0.999 < length(squash(long)).item() < 1.0


def test_fp16_holds_what_its_square_would_not():
    long = torch.tensor([[300.0, 0.0]], dtype=torch.float16)
    torch.testing.assert_close(squash(long), long / 300)
    torch.testing.assert_close(length(long), torch.tensor([300.0]))


def test_the_sum_of_all_outputs_is_kept_in_fp32(monkeypatch):
    totals = []

    def spy(children, weight, parents, **options):
        totals.append(parents)
        return routing_step(children, weight, parents, **options)

    monkeypatch.setattr(dynamic, "routing_step", spy)
    dynamic_routing(torch.ones(1, 2, 3).bfloat16(), torch.ones(2, 2, 3, 3).bfloat16(), 3)
    assert [None if x is None else x.dtype for x in totals] == [None] + [torch.float32] * 2


@pytest.mark.parametrize("observe", [None, lambda *_: None])
def test_the_implementation_is_passed_on(observe):
    with pytest.raises(ValueError, match="`impl` must be one of"):
        dynamic_routing(torch.ones(1, 2, 3), torch.ones(2, 2, 3, 3), 1, impl="?", observe=observe)


def test_an_empty_batch():
    children, weight = torch.zeros(0, 2, 3), torch.ones(2, 4, 3, 5, requires_grad=True)
    poses = dynamic_routing(children, weight, 3)
    assert poses.shape == (0, 4, 5)
    poses.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_autocast_keeps_values_and_gradients_finite():
    torch.manual_seed(0)
    for children in (torch.randn(2, 6, 4), torch.zeros(2, 6, 4), torch.full((2, 6, 4), 1e3)):
        children.requires_grad_()
        weight = torch.randn(6, 3, 4, 5, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            poses = dynamic_routing(children, weight, 3)
        length(poses).sum().backward()
        for tensor in (poses, children.grad, weight.grad):
            assert torch.isfinite(tensor).all()


def test_iterations_are_checked():
    with pytest.raises(ValueError, match="`iterations` must be at least 1, got 0"):
        dynamic_routing(torch.zeros(1, 2, 3), torch.zeros(2, 2, 3, 3), 0)
