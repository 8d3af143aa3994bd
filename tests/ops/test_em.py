"""EM routing against a loop over positions, children and parents, in float64."""

import math
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import LargestTensor
from torch import Tensor

from capsroute.ops.em import em_routing, em_routing_history
from capsroute.ops.votes import tiled
from capsroute.ops.votes.moments import Parents


def oracle(poses, log_activations, weight, beta_u, beta_a, *, iterations, stride=1):
    """The procedure of Hinton et al., appendix included, one position of one image at a time."""
    batch, height, width, n_in, _ = poses.shape
    is_class_layer = weight.ndim == 4
    k_y, k_x = (height, width) if is_class_layer else weight.shape[:2]
    ys, xs = range((height - k_y) // stride + 1), range((width - k_x) // stride + 1)
    results = []
    for b in range(batch):
        for y in ys:
            for x in xs:
                votes, activations = [], []
                for dy in range(k_y):
                    for dx in range(k_x):
                        for i in range(n_in):
                            child = (b, y * stride + dy, x * stride + dx, i)
                            w = weight[i] if is_class_layer else weight[dy, dx, i]
                            place = ((dy + 0.5) / height, (dx + 0.5) / width)
                            place = place if is_class_layer else None
                            votes.append([_vote(poses[child], w_j, place) for w_j in w])
                            activations.append(log_activations[child].exp())
                results.append(_route(votes, activations, beta_u, beta_a, iterations))
    history = []
    for t in range(iterations):
        mean, log_a, r = (torch.stack([result[t][part] for result in results]) for part in range(3))
        size = (batch,) if is_class_layer else (batch, len(ys), len(xs))
        window = () if is_class_layer else (k_y, k_x, n_in)
        r = r.unflatten(0, size)
        history.append(
            Parents(
                mean.unflatten(0, size),
                log_a.unflatten(0, size),
                r.unflatten(len(size), window) if window else r,
            )
        )
    return history


def _vote(pose, w, place):
    n = len(w)
    vote = pose.view(n, n) @ w
    if place is not None:
        addition = torch.zeros_like(vote)
        addition[0, n - 1], addition[1, n - 1] = place
        vote = vote + addition
    return vote.flatten()


def _route(votes, activations, beta_u, beta_a, iterations):
    children, parents = len(votes), len(beta_u)
    r = [[torch.tensor(1.0 / parents, dtype=torch.float64)] * parents for _ in votes]
    history = []
    for t in range(iterations):
        means, variances, log_as = [], [], []
        for j in range(parents):  # M-step
            big_r = [activations[i] * r[i][j] for i in range(children)]
            total = sum(big_r)
            mean = sum(big_r[i] * votes[i][j] for i in range(children)) / total
            variance = sum(big_r[i] * (votes[i][j] - mean) ** 2 for i in range(children)) / total
            variance = variance + 5e-4
            mass = 100 * total / (children / parents)
            cost = ((beta_u[j] + variance.sqrt().log()) * mass).sum()
            sharpness = 0.01 * (1 - 0.95 ** (t + 1))
            means.append(mean)
            variances.append(variance)
            log_as.append(torch.sigmoid(sharpness * (100 * beta_a[j] - cost)).log())
        history.append(
            (torch.stack(means), torch.stack(log_as), torch.stack([torch.stack(row) for row in r]))
        )
        new_r = []
        for i in range(children):  # E-step
            log_p = [
                log_as[j]
                - 0.5 * (2 * math.pi * variances[j]).log().sum()
                - ((votes[i][j] - means[j]) ** 2 / (2 * variances[j])).sum()
                for j in range(parents)
            ]
            total = torch.stack(log_p).logsumexp(0)
            new_r.append([(log_p[j] - total).exp() for j in range(parents)])
        r = new_r
    return history


def make_inputs(
    *, batch=1, size=(4, 4), n_in=2, out=3, n=2, kernel: int | None = 2, seed=0, dtype=torch.float64
) -> list[Tensor]:
    """`kernel=None` makes the class layer."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    window = () if kernel is None else (kernel, kernel)
    inputs = [
        normal(batch, *size, n_in, n * n),
        F.logsigmoid(normal(batch, *size, n_in)),
        normal(*window, n_in, out, n, n),
        normal(out),
        normal(out),
    ]
    return [x.requires_grad_() for x in inputs]


def scalar(poses: Tensor, log_activations: Tensor) -> Tensor:
    """A loss that weighs every output differently."""
    weights = torch.linspace(-1, 1, poses.numel(), dtype=poses.dtype).view_as(poses)
    others = torch.linspace(1, 2, log_activations.numel(), dtype=poses.dtype)
    return (weights * poses).sum() + (others * log_activations.flatten()).sum()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * (1 + expected.abs().max())


@contextmanager
def tiles_of(bytes_: int, least_positions: int = tiled.LEAST_POSITIONS):
    with (
        patch.dict(tiled.TILE_BYTES, cpu=bytes_),
        patch.object(tiled, "LEAST_POSITIONS", least_positions),
    ):
        yield


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 2),
    size=st.tuples(st.integers(2, 4), st.integers(2, 4)),
    n_in=st.integers(1, 2),
    out=st.integers(1, 3),
    n=st.integers(1, 2),
    kernel=st.sampled_from([None, 1, 2]),
    stride=st.integers(1, 2),
    iterations=st.integers(1, 3),
    tile_bytes=st.sampled_from([1, 300, 1 << 20]),
    least_positions=st.sampled_from([1, 2, 64]),
    seed=st.integers(0, 1000),
)
def test_matches_the_loop_forward_and_backward(
    batch, size, n_in, out, n, kernel, stride, iterations, tile_bytes, least_positions, seed
):
    if kernel is None:
        n, stride, size = 2, 1, (size[0] - 1, size[1] - 1)
    inputs = make_inputs(batch=batch, size=size, n_in=n_in, out=out, n=n, kernel=kernel, seed=seed)
    expected = oracle(*inputs, iterations=iterations, stride=stride)
    expected_grads = torch.autograd.grad(scalar(*expected[-1][:2]), inputs)
    with tiles_of(tile_bytes, least_positions):
        poses, log_activations = em_routing(*inputs, iterations=iterations, stride=stride)
        grads = torch.autograd.grad(scalar(poses, log_activations), inputs)
        history = em_routing_history(*inputs, iterations=iterations, stride=stride)
    assert_close(poses, expected[-1].poses)
    assert_close(log_activations, expected[-1].log_activations)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert_close(grad, expected_grad)
    for state, expected_state in zip(history, expected, strict=True):
        for part, expected_part in zip(state, expected_state, strict=True):
            assert_close(part, expected_part)


@pytest.mark.parametrize("kernel", [2, None])
def test_gradcheck(kernel):
    inputs = make_inputs(size=(2, 2), n_in=1, out=2, kernel=kernel)
    assert torch.autograd.gradcheck(lambda *x: em_routing(*x, iterations=2), inputs)


def test_does_not_depend_on_the_tiles():
    inputs = make_inputs(size=(5, 5), n_in=3, out=4, kernel=3)
    results = []
    for tiles in ((1, 64), (1, 1), (1000, 3), (1 << 30, 64)):
        with tiles_of(*tiles):
            poses, log_activations = em_routing(*inputs, iterations=3, stride=2)
        grads = torch.autograd.grad(scalar(poses, log_activations), inputs)
        results.append((poses, log_activations, *grads))
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert_close(actual, expected)


def test_coefficients_share_out_every_child():
    inputs = make_inputs(size=(5, 4), n_in=3, out=4, kernel=2)
    first, second = em_routing_history(*inputs, iterations=2)
    assert first.coefficients.shape == second.coefficients.shape == (1, 4, 3, 2, 2, 3, 4)
    torch.testing.assert_close(first.coefficients, torch.full_like(first.coefficients, 0.25))
    torch.testing.assert_close(second.coefficients.sum(-1), torch.ones(1, 4, 3, 2, 2, 3).double())


def test_never_holds_all_votes():
    inputs = make_inputs(size=(6, 6), n_in=4, out=8, n=2, kernel=3)
    all_votes = 4 * 4 * (3 * 3 * 4) * 8 * 4
    with tiles_of(all_votes * 8 // 6), LargestTensor() as seen:
        scalar(*em_routing(*inputs, iterations=2)).backward()
    assert all_votes // 8 <= seen.elements <= all_votes // 6


@pytest.mark.parametrize("bytes_", [1, 3000, 20_000, 1 << 30])
def test_tiles_fit_the_budget_in_positions_too(bytes_):
    poses, log_activations, weight, *_ = make_inputs(
        batch=3, size=(6, 6), n_in=4, out=8, kernel=3, dtype=torch.float32
    )
    children = tiled.gather_children(poses, log_activations, weight, 1)  # 36 of 48 positions
    with tiles_of(bytes_, least_positions=5):
        tiles = tiled.split_tiles(children)
    for run in tiles:
        for tile in run:
            n, *_, positions = tile.poses.shape
            votes = n * 8 * 4 * positions * 4
            assert votes <= bytes_ or (n == 1 and positions <= 5)
            assert tile.log_activations.shape == (n, 1, positions) and len(tile.transforms) == n
    again = torch.cat([torch.cat([tile.poses for tile in run]) for run in tiles], dim=-1)
    assert torch.equal(again, children.poses)


def test_keeps_no_votes_for_backward():
    saved = []
    inputs = make_inputs(size=(6, 6), n_in=4, out=8, n=2, kernel=3)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor.numel()), lambda _: None
    ):
        em_routing(*inputs, iterations=2)
    assert sum(saved) < 4 * 4 * (3 * 3 * 4) * 8 * 4


DEGENERATE = {
    "random": torch.randn,
    "zero": torch.zeros,
    "constant": lambda *shape: torch.full(shape, 0.7),
    "large": lambda *shape: 1e3 * torch.randn(*shape),
    "plus and minus a thousand": lambda *shape: 1e3 * torch.randn(*shape).sign(),
    "tiny": lambda *shape: 1e-20 * torch.randn(*shape),
}


@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.parametrize("kernel", [3, None])
@pytest.mark.parametrize("activity", [0.0, 50.0, -200.0])  # half, all and none of the children
def test_ten_iterations_stay_finite(kind, kernel, activity):
    torch.manual_seed(0)
    _, _, weight, beta_u, beta_a = make_inputs(
        n_in=4, out=4, n=4, kernel=kernel, dtype=torch.float32
    )
    poses = DEGENERATE[kind](2, 6, 6, 4, 16).requires_grad_()
    log_activations = F.logsigmoid(activity + torch.randn(2, 6, 6, 4)).requires_grad_()
    inputs = [poses, log_activations, weight, beta_u, beta_a]
    assert_finite(inputs, iterations=10)


@pytest.mark.parametrize("kernel", [2, None])
def test_children_that_are_not_active_at_all_stay_finite(kernel):
    inputs = make_inputs(kernel=kernel, dtype=torch.float32)
    with torch.no_grad():
        inputs[1].fill_(-math.inf)
    assert_finite(inputs, iterations=2)


def test_the_mean_does_not_depend_on_how_little_active_all_children_are():
    poses, log_activations, *others = make_inputs(kernel=None, dtype=torch.float32)
    expected, _ = em_routing(poses, log_activations, *others, iterations=1)
    actual, _ = em_routing(poses, log_activations - 30, *others, iterations=1)
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("kernel", [2, None])
def test_an_empty_batch(kernel):
    inputs = make_inputs(batch=0, kernel=kernel)
    outputs = em_routing(*inputs, iterations=2)
    size = (0,) if kernel is None else (0, 3, 3)
    assert [x.shape for x in outputs] == [(*size, 3, 4), (*size, 3)]
    grads = torch.autograd.grad(scalar(*outputs), inputs)
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("value", [0.0, 1.0, 1e3])
def test_one_child_stays_finite(value):
    inputs = make_inputs(size=(1, 1), n_in=1, out=3, kernel=1, dtype=torch.float32)
    with torch.no_grad():
        inputs[0].mul_(value)
    assert_finite(inputs, iterations=10)


def assert_finite(inputs: list[Tensor], iterations: int) -> None:
    outputs = em_routing(*inputs, iterations=iterations)
    grads = torch.autograd.grad(scalar(*outputs), inputs)
    for tensor in (*outputs, *grads):
        assert tensor.isfinite().all()


def test_full_size_layer_is_finite():
    with torch.no_grad():
        inputs = make_inputs(size=(16, 16), n_in=32, out=32, n=4, kernel=3, dtype=torch.float32)
        poses, log_activations = em_routing(*inputs, iterations=3, stride=2)
    assert poses.shape == (1, 7, 7, 32, 16)
    assert poses.isfinite().all() and log_activations.isfinite().all()


@pytest.mark.parametrize("kernel", [2, None])
def test_float32_is_close_to_float64(kernel):
    # votes that nearly agree, far from zero: their variance must not cancel
    double = [x.detach() for x in make_inputs(n_in=3, n=4, kernel=kernel)]
    double[0] += 1000
    double[2][:] = double[2].flatten(0, -4)[0]
    single = [x.float() for x in double]
    for expected, actual in zip(
        em_routing(*double, iterations=3), em_routing(*single, iterations=3), strict=True
    ):
        assert actual.dtype == torch.float32
        assert_close(actual.double(), expected, 1e-4)


@pytest.mark.parametrize("kernel", [2, None])
@pytest.mark.parametrize("impl", ["reference", "tiled"])
def test_autocast_rounds_what_is_multiplied_and_nothing_else(kernel, impl):
    inputs = make_inputs(kernel=kernel, dtype=torch.float32)
    poses, log_activations, weight, *betas = inputs
    poses, weight = (x.bfloat16().float() for x in (poses, weight))
    expected = em_routing(poses, log_activations, weight, *betas, iterations=3, impl=impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = em_routing(*inputs, iterations=3, impl=impl)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)
    gradients = [torch.autograd.grad(scalar(*out), inputs) for out in (actual, expected)]
    for a, b in zip(*gradients, strict=True):  # rounded before or after positions are added up
        assert a.dtype == torch.float32
        assert_close(a, b, 2 * torch.finfo(torch.bfloat16).eps)


def test_low_precision_inputs_are_routed_in_float32():
    inputs = make_inputs(dtype=torch.bfloat16)
    outputs = em_routing(*inputs, iterations=3)
    expected = em_routing(*[x.float() for x in inputs], iterations=3)
    for actual, wanted in zip(outputs, expected, strict=True):
        assert actual.dtype == torch.float32 and torch.equal(actual, wanted)
    scalar(*outputs).backward()
    assert all(x.grad.dtype == torch.bfloat16 and x.grad.isfinite().all() for x in inputs)


def test_compiles_to_one_graph():
    inputs = make_inputs(size=(2, 2), n_in=1, kernel=None)
    compiled = torch.compile(em_routing, backend="aot_eager", fullgraph=True)
    with tiles_of(200):  # two tiles
        actual = compiled(*inputs, iterations=2)
        grads = torch.autograd.grad(scalar(*actual), inputs)
    expected = em_routing(*inputs, iterations=2)
    expected_grads = torch.autograd.grad(scalar(*expected), inputs)
    for a, b in zip((*actual, *grads), (*expected, *expected_grads), strict=True):
        assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [3, None])
def test_captured_in_a_cuda_graph(kernel):
    inputs = make_inputs(size=(8, 8), n_in=8, out=8, n=4, kernel=kernel, dtype=torch.float32)
    expected = em_routing(*inputs, iterations=3)
    on_device = [x.detach().cuda().requires_grad_() for x in inputs]

    def step() -> tuple[Tensor, ...]:
        poses, log_activations = em_routing(*on_device, iterations=3)
        return (poses, *torch.autograd.grad(poses.sum() + log_activations.sum(), on_device))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert_close(captured[0].cpu(), expected[0], 1e-3)
    assert all(x.isfinite().all() for x in captured)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(iterations=0), "`iterations` must be at least 1, got 0"),
        (dict(stride=0), "`stride` must be at least 1, got 0"),
        (dict(poses=torch.zeros(1, 4, 4, 3, 4)), r"`poses` must have shape \(B, H, W, 2, d\)"),
        (dict(poses=torch.zeros(1, 4, 4, 2, 5)), "`poses` must have 4 elements .* got 5"),
        (dict(poses=torch.zeros(1, 1, 4, 2, 4)), "`log_activations` must have shape"),
        (dict(weight=torch.zeros(5, 5, 2, 3, 2, 2)), "square kernel within the 4×4 input, got 5×5"),
        (dict(weight=torch.zeros(2, 3, 2)), "`weight` must have shape"),
        (dict(weight=torch.zeros(2, 3, 4, 1)), "`weight` must end in square transforms"),
        (dict(weight=torch.zeros(2, 3, 1, 1)), "`weight` must be at least 2×2"),
        (dict(weight=torch.zeros(2, 3, 2, 2), stride=2), "`stride` must be 1 for the class layer"),
        (dict(beta_a=torch.zeros(2)), r"`beta_a` must have shape \(3,\), got \(2,\)"),
    ],
)
def test_mistakes_are_named(change, message):
    names = ("poses", "log_activations", "weight", "beta_u", "beta_a")
    arguments = dict(zip(names, make_inputs(), strict=True), iterations=2, stride=1)
    with pytest.raises(ValueError, match=message):
        em_routing(**(arguments | change))
