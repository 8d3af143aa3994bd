"""The routing step against the paper's procedure as loops: values and every gradient, fp64."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import LargestTensor

import oracle
from capsroute import create_model
from capsroute.ops.inverted import routing_step, tiled

# the kernels have tests of their own, in Triton's interpreter and on a GPU
IMPLEMENTATIONS = ("reference", "tiled")
TOLERANCE = {"rtol": 0, "atol": 1e-10}


@st.composite
def layer_shapes(draw):
    """Shapes of children, weight and parents, and the stride, of a tiny layer."""
    linear = draw(st.booleans())
    matrix = draw(st.booleans())
    batch, n_in, n_out = (draw(st.integers(1, 3)) for _ in range(3))
    if matrix:
        a = b = draw(st.integers(1, 3))
        d_in = d_out = a * a
    else:
        a, b = d_in, d_out = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    if linear:
        return (batch, n_in, d_in), (n_in, n_out, a, b), (batch, n_out, d_out), 1
    k, stride = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    height, width = draw(st.integers(k, 4)), draw(st.integers(k, 4))
    size = ((height - k) // stride + 1, (width - k) // stride + 1)
    weight = (k, k, n_in, n_out, a, b)
    return (batch, height, width, n_in, d_in), weight, (batch, *size, n_out, d_out), stride


def random_layer(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    *tensors, stride = shapes
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in tensors]
    return [tensor.requires_grad_() for tensor in made], stride


def oracle_step(children, weight, parents, stride):
    if children.ndim == 3:
        return oracle.linear_step(children, weight, parents)
    return oracle.conv_step(children, weight, parents, stride)


def gradients(output, inputs):
    # a cotangent with no symmetry, the same for both sides
    cotangent = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return torch.autograd.grad(output, inputs, cotangent.to(output.device), allow_unused=True)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("tile_bytes", [1, 1 << 20])
@settings(deadline=None, max_examples=25)
@given(shapes=layer_shapes(), seed=st.integers(0, 99))
def test_step_with_parents_equals_the_paper(impl, tile_bytes, shapes, seed):
    (children, weight, parents), stride = random_layer(shapes, seed)
    expected = oracle_step(children, weight, parents, stride)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiled.TILE_BYTES, "cpu", tile_bytes)
        actual = routing_step(children, weight, parents, stride=stride, impl=impl)
        actual_grads = gradients(actual, (children, weight, parents))
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    for got, want in zip(
        actual_grads, gradients(expected, (children, weight, parents)), strict=True
    ):
        # one child or one parent: the softmax does not depend on the parents at all
        want = torch.zeros_like(parents) if want is None else want
        torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@settings(deadline=None, max_examples=25)
@given(shapes=layer_shapes(), seed=st.integers(0, 99))
def test_first_step_equals_poses_of_zero(impl, shapes, seed):
    (children, weight, parents), stride = random_layer(shapes, seed)
    expected = oracle_step(children, weight, torch.zeros_like(parents), stride)
    actual = routing_step(children, weight, stride=stride, impl=impl)
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    pairs = zip(
        gradients(actual, (children, weight)), gradients(expected, (children, weight)), strict=True
    )
    for got, want in pairs:
        torch.testing.assert_close(got, want, **TOLERANCE)


CASES = {
    "conv matrix": ((2, 4, 5, 2, 4), (2, 2, 2, 3, 2, 2), (2, 2, 2, 3, 4), 2),
    "conv vector": ((1, 3, 3, 2, 3), (2, 2, 2, 2, 3, 2), (1, 2, 2, 2, 2), 1),
    "linear matrix": ((2, 5, 4), (5, 3, 2, 2), (2, 3, 4), 1),
    "linear vector": ((2, 5, 3), (5, 3, 3, 4), (2, 3, 4), 1),
}


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_gradcheck(impl, case):
    (children, weight, parents), stride = random_layer(CASES[case])
    options = {"stride": stride, "impl": impl}
    assert torch.autograd.gradcheck(
        lambda c, w, p: routing_step(c, w, p, **options), (children, weight, parents)
    )
    assert torch.autograd.gradcheck(lambda c, w: routing_step(c, w, **options), (children, weight))


@pytest.mark.parametrize("with_parents", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_coefficients_agree_and_are_shares(case, with_parents):
    (children, weight, parents), stride = random_layer(CASES[case])
    given = parents if with_parents else None
    results = {
        impl: routing_step(
            children, weight, given, stride=stride, impl=impl, return_coefficients=True
        )
        for impl in IMPLEMENTATIONS
    }
    poses, coefficients = results["reference"]
    for other_poses, other in results.values():
        torch.testing.assert_close(other_poses, poses, **TOLERANCE)
        torch.testing.assert_close(other, coefficients, **TOLERANCE)
    n_in, n_out = weight.shape[-4:-2]
    window = weight.shape[:2] if children.ndim == 5 else ()
    assert coefficients.shape == (*poses.shape[:-2], *window, n_in, n_out)
    ones = torch.ones_like(coefficients[..., 0])
    torch.testing.assert_close(coefficients.sum(-1), ones, **TOLERANCE)


@pytest.mark.parametrize("with_parents", [True, False])
def test_tiled_coefficients_are_stored_as_the_children_are_and_carry_no_gradient(with_parents):
    (children, weight, parents), _ = random_layer(CASES["linear matrix"])
    low = [x.bfloat16() for x in (children, weight, parents)]
    given = low if with_parents else low[:2]
    poses, coefficients = routing_step(*given, impl="tiled", return_coefficients=True)
    assert poses.dtype == coefficients.dtype == torch.bfloat16
    assert poses.requires_grad and not coefficients.requires_grad


def test_scale_is_the_square_root_of_the_parents_pose_unless_given():
    (children, weight, parents), _ = random_layer(CASES["linear vector"])
    default = routing_step(children, weight, parents)
    torch.testing.assert_close(routing_step(children, weight, parents, scale=0.5), default)
    assert not torch.allclose(routing_step(children, weight, parents, scale=1.0), default)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("with_parents", [True, False])
def test_autocast_stores_low_precision_and_stays_close(impl, with_parents):
    generator = torch.Generator().manual_seed(0)
    children = torch.randn(2, 6, 6, 4, 16, generator=generator)
    weight = torch.randn(3, 3, 4, 5, 4, 4, generator=generator) / 6
    parents = torch.randn(2, 4, 4, 5, 16, generator=generator) if with_parents else None
    exact = routing_step(children, weight, parents, impl="reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = routing_step(children, weight, parents, impl=impl)
    assert low.dtype == torch.bfloat16
    error = (low.float() - exact).norm() / exact.norm()
    assert error < 0.02  # bf16 carries 8 bits: inputs and votes each lose up to 2⁻⁹
    # autocast rounds what comes in, and reaches no further
    stored = [None if x is None else x.bfloat16() for x in (children, weight, parents)]
    assert torch.equal(low, routing_step(*stored, impl=impl))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_autocast_leaves_float64_alone(impl):
    (children, weight, parents), _ = random_layer(CASES["linear matrix"])
    want = routing_step(children, weight, parents, impl=impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(routing_step(children, weight, parents, impl=impl), want)


def test_backward_within_autocast_is_backward():
    (children, weight, parents), _ = random_layer(CASES["linear matrix"])
    inputs = [x.detach().float().requires_grad_() for x in (children, weight, parents)]
    want = gradients(routing_step(*inputs, impl="tiled"), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            poses = routing_step(*inputs, impl="tiled")
        got = gradients(poses, inputs)
    assert all(map(torch.equal, got, want))


def test_a_large_batch_is_routed_a_few_images_at_a_time(monkeypatch):
    """So that what a child votes for stays near the caches, however large the batch."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((7, 4, 4, 2, 4), (3, 3, 2, 3, 2, 2), (7, 2, 2, 3, 4))
    inputs = [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]
    results = []
    for images in (7, 3):
        monkeypatch.setitem(tiled.TILE_BYTES, "cpu", images * inputs[2][0].numel() * 4)
        runs = [len(range(7)[run]) for run in tiled._runs(*inputs)]
        assert runs == {7: [7], 3: [3, 3, 1]}[images]
        poses, coefficients = routing_step(*inputs, impl="tiled", return_coefficients=True)
        results.append((poses, coefficients, *torch.autograd.grad(poses.sin().sum(), inputs)))
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(parts, whole)


# what Dynamo does itself with a Function
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_compiles_once_for_batches_of_any_size():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 3, 2, 3, 2, 2, generator=generator, requires_grad=True)
    step = partial(routing_step, impl="tiled")
    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for batch in (2, 5, 9, 17):
        children = torch.randn(batch, 4, 4, 2, 4, generator=generator, requires_grad=True)
        parents = torch.randn(batch, 2, 2, 3, 4, generator=generator, requires_grad=True)
        inputs = children, weight, parents
        results = [
            (poses, *torch.autograd.grad(poses.sin().sum(), inputs))
            for poses in (compiled(*inputs), step(*inputs))
        ]
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_low_precision_is_summed_up_in_fp32(monkeypatch):
    """The result is rounded once, by 2⁻⁸ at most; a sum in bf16 loses that with every tile."""
    monkeypatch.setitem(tiled.TILE_BYTES, "cpu", 1)
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 6, 6, 8, 4), (3, 3, 8, 3, 2, 2), (2, 4, 4, 3, 4))
    low = [torch.rand(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in low]
    results = []
    for inputs, impl in ((low, "tiled"), (exact, "reference")):
        poses = routing_step(*inputs, impl=impl)
        results.append((poses, *torch.autograd.grad(poses.sum(), inputs)))
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() < 0.0025 * want.norm()


def test_a_first_step_holds_in_fp16_what_the_sum_over_its_children_does_not():
    children, weight = torch.ones(1, 800, 16), torch.full((800, 10, 4, 4), 25.0)
    with torch.autocast("cpu", dtype=torch.float16):
        assert (routing_step(children, weight) == 8000).all()
        assert (routing_step(children[:, None, None], weight[None, None]) == 8000).all()
        many = torch.full((800, 100, 4, 4), 1e-4)  # a hundredth of which fp16 holds to two digits
        assert (routing_step(children, many) / (800 * 4e-4 / 100) - 1).abs().max() < 5e-3


@pytest.mark.parametrize("case", ["conv vector", "linear matrix"])
def test_second_derivatives_are_right_or_refused(case):
    (children, weight, parents), stride = random_layer(CASES[case])

    def penalised(impl):
        poses = routing_step(children, weight, parents, stride=stride, impl=impl)
        slope = torch.autograd.grad(poses.sum(), children, create_graph=True)[0]
        return poses.square().mean() + slope.square().sum()  # none of it needs a cotangent's slope

    assert torch.autograd.gradgradcheck(
        lambda *x: routing_step(*x, stride=stride, impl="reference"), (children, weight, parents)
    )
    penalised("reference").backward()
    with pytest.raises(RuntimeError, match="differentiated twice with impl='reference' only"):
        penalised("tiled").backward()


def test_transforms_of_pytorch_are_right_or_refused():
    (children, weight, parents), stride = random_layer(CASES["conv vector"])

    def summed(children, impl):
        return routing_step(children, weight, parents, stride=stride, impl=impl).sum()

    (expected,) = torch.autograd.grad(summed(children, "tiled"), children)
    torch.testing.assert_close(torch.func.grad(summed)(children, "reference"), expected)
    with pytest.raises(ValueError, match=r"`impl` must be 'reference' inside torch\.func .*tiled'"):
        torch.func.grad(summed)(children, "auto")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("with_parents", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_an_empty_batch(impl, with_parents, case):
    *shapes, stride = CASES[case]
    empty = ((0, *shapes[0][1:]), shapes[1], (0, *shapes[2][1:]), stride)
    (children, weight, parents), stride = random_layer(empty)
    given = parents if with_parents else None
    options = {"stride": stride, "impl": impl, "return_coefficients": True}
    poses, coefficients = routing_step(children, weight, given, **options)
    assert poses.shape == parents.shape and len(coefficients) == 0
    assert not gradients(poses, weight)[0].any()


def test_the_tiled_step_never_holds_more_than_a_tile_of_votes():
    """Autograd keeps what `save_for_backward` sees; the votes are 32 times the unfolded poses."""
    saved = []

    def record(tensor):
        saved.append(tensor.numel())
        return tensor

    generator = torch.Generator().manual_seed(0)
    children = torch.randn(2, 6, 6, 8, 16, generator=generator, requires_grad=True)
    weight = torch.randn(3, 3, 8, 8, 4, 4, generator=generator, requires_grad=True)
    parents = torch.randn(2, 4, 4, 8, 16, generator=generator, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        poses = routing_step(children, weight, parents, impl="tiled")
    assert sum(saved) <= children.numel() + weight.numel() + parents.numel()
    with pytest.MonkeyPatch.context() as patch, LargestTensor() as seen:
        patch.setitem(tiled.TILE_BYTES, "cpu", 2 * poses.numel() * 4)  # the votes of two children
        routing_step(children, weight, parents, impl="tiled").sum().backward()
    assert seen.elements == max(2 * poses.numel(), children.numel(), weight.numel())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels can run here")
def test_kernels_that_cannot_run_say_why():
    (children, weight, parents), stride = random_layer(CASES["conv matrix"])
    with pytest.raises(ValueError, match=r"got 'triton': .*(CUDA|float64|installed)"):
        routing_step(children, weight, parents, stride=stride, impl="triton")
    with pytest.raises(ValueError, match=r"got 'triton': .*(CUDA|installed)"):
        routing_step(
            children.float(), weight.float(), parents.float(), stride=stride, impl="triton"
        )
    # without parents no kernel would be needed, but what was asked for is not what would run
    with pytest.raises(ValueError, match=r"got 'triton': .*(CUDA|installed)"):
        routing_step(children.float(), weight.float(), stride=stride, impl="triton")
    model = create_model("inverted_simple_cifar10", iterations=1, impl="triton")
    with pytest.raises(ValueError, match=r"got 'triton': .*(CUDA|installed)"):
        model(torch.rand(1, 3, 32, 32))


def bad_calls():
    children, weight = torch.zeros(2, 5, 5, 3, 4), torch.zeros(3, 3, 3, 2, 2, 2)
    return {
        "children` must be a floating": (children.long(), weight, {}),
        "children` must have shape": (children[0], weight, {}),
        "weight` must have shape": (children, weight[0], {}),
        "weight` must not be empty": (children[..., :0, :], weight[:, :, :0], {}),
        "children` must have 3 capsules": (children[..., :2, :], weight, {}),
        "for vector poses": (children, weight[..., :1], {}),
        "stride` must be at least 1": (children, weight, {"stride": 0}),
        "stride` must be 1 for a linear": (children[:, 0, 0], weight[0, 0], {"stride": 2}),
        "square kernel within the 2×2": (children[:, :2, :2], weight, {}),
        "parents` must have shape": (children, weight, {"parents": torch.zeros(2, 3, 3, 3, 4)}),
        "parents` must be a floating": (
            children,
            weight,
            {"parents": torch.zeros(2, 3, 3, 2, 4).long()},
        ),
        "weight` must be torch.float32 as the children are, got torch.float64": (
            children,
            weight.double(),
            {},
        ),
        "weight` must be on cpu as the children are, got meta": (children, weight.to("meta"), {}),
        "parents` must be on cpu as the children are, got meta": (
            children,
            weight,
            {"parents": torch.zeros(2, 3, 3, 2, 4, device="meta")},
        ),
        "scale` must be a number, got a Tensor": (children, weight, {"scale": torch.ones(())}),
        "impl` must be one of": (children, weight, {"impl": "fastest"}),
    }


@pytest.mark.parametrize("message", bad_calls())
def test_bad_arguments_are_named_in_one_line(message):
    children, weight, options = bad_calls()[message]
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        routing_step(children, weight, **options)
    assert "\n" not in str(caught.value)
