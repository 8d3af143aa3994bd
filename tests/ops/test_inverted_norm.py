"""`first_step`: a first iteration that finishes its children on the way."""

from unittest import mock

import norm_checks
import pytest
import torch

from capsroute import create_model
from capsroute.layers import CapsuleStack, ConvCaps, LinearCaps, PrimaryCaps
from capsroute.layers import primary as layers_primary
from capsroute.ops.inverted.api import first_step, routing_step
from capsroute.ops.inverted.norm import Norm, Unfinished, normalized


@pytest.mark.parametrize("impl", ["auto", "tiled", "reference"])
@pytest.mark.parametrize("linear", [False, True])
def test_is_the_same_as_finishing_before(impl, linear):
    torch.manual_seed(0)
    children = norm_checks.unfinished((2, 4, 4, 3, 4), torch.float32)
    weight = torch.randn(48, 5, 2, 2) if linear else torch.randn(3, 3, 3, 5, 2, 2)
    poses = children.finished().flatten(1, -2) if linear else children.finished()
    want = routing_step(poses, weight, impl=impl)
    assert torch.equal(first_step(children, weight, impl=impl), want)


@pytest.mark.parametrize("linear", [False, True])
def test_of_features_it_makes_the_capsules_first(linear):
    torch.manual_seed(0)
    primary, features = PrimaryCaps(5, 3, 4), torch.randn(2, 5, 4, 4)
    projection = primary.conv.weight.view(3, 4, 5)
    waiting = Unfinished(features.permute(0, 2, 3, 1), primary.norm.learned(), projection)
    torch.testing.assert_close(waiting.finished(), primary(features))
    assert waiting.shape == primary(features).shape
    weight = torch.randn(48, 5, 2, 2) if linear else torch.randn(3, 3, 3, 5, 2, 2)
    children = primary(features).flatten(1, -2) if linear else primary(features)
    torch.testing.assert_close(first_step(waiting, weight), routing_step(children, weight))
    low = waiting.to(torch.float64)
    assert low.dtype == low.finished().dtype == torch.float64 and low.device == features.device


def test_the_convolution_waits_only_where_nobody_would_notice(monkeypatch):
    monkeypatch.setattr(layers_primary, "can_project", lambda *_: True)
    primary, features = PrimaryCaps(5, 3, 4), torch.randn(2, 5, 4, 4)

    def waits(primary):
        return primary(features, finish=False).projection is not None

    assert not waits(primary)  # there may be gradients
    with torch.no_grad():
        assert waits(primary)
        got = primary(features, finish=False).finished()
        torch.testing.assert_close(got, primary(features))
        assert not waits(PrimaryCaps(5, 3, 4, bias=True))
        assert not waits(PrimaryCaps(5, 3, 4, kernel_size=3))
        assert not waits(PrimaryCaps(5, 3, 4, stride=2))
        for asked in ("is_exporting", "is_transformed"):
            with mock.patch.object(layers_primary, asked, lambda: True):
                assert not waits(primary)
        assert isinstance(
            PrimaryCaps(5, 3, 4, normalization="squash")(features, finish=False), torch.Tensor
        )


def own_convolution(primary):
    class Louder(torch.nn.Conv2d):
        pass

    primary.conv.__class__ = Louder


def own_forward(primary):  # as accelerate does
    primary.conv.forward = primary.conv.forward


@pytest.mark.parametrize(
    "change",
    [
        lambda primary: primary.conv.register_forward_hook(lambda *_: None),
        lambda primary: primary.conv.register_forward_pre_hook(lambda *_: None),
        lambda primary: setattr(primary.conv, "padding", (1, 1)),
        own_convolution,
        own_forward,
    ],
)
@torch.no_grad()
def test_the_convolution_does_not_wait_if_it_is_more_than_a_matrix(change, monkeypatch):
    monkeypatch.setattr(layers_primary, "can_project", lambda *_: True)
    primary, features = PrimaryCaps(5, 3, 4), torch.randn(2, 5, 4, 4)
    assert primary(features, finish=False).projection is not None
    change(primary)
    assert primary(features, finish=False).projection is None


@pytest.mark.parametrize(("iterations", "left"), [(2, True), (4, False)])
def test_a_model_leaves_to_its_stack_only_what_it_can_finish(iterations, left):
    model = create_model("inverted_resnet_cifar10", iterations=iterations)
    with mock.patch.object(model.primary, "forward", wraps=model.primary.forward) as forward:
        model(torch.rand(1, 3, 32, 32))
    assert ("finish" in forward.call_args.kwargs) == left


@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_what_does_not_fit_is_refused(impl, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that nothing but the shapes is in the way
    children = norm_checks.unfinished((2, 4, 4, 3, 16), torch.float32)
    with pytest.raises(ValueError, match=r"`weight` must be .* with d = 16, got \(8, 8\)"):
        first_step(children, torch.randn(3, 3, 3, 5, 8, 8), impl=impl)
    with pytest.raises(ValueError, match="`stride` must be 1 for a linear layer, got 2"):
        first_step(children, torch.randn(48, 5, 4, 4), stride=2, impl=impl)
    with pytest.raises(TypeError, match=r"`weight` must be torch.float32 as .* got torch.float16"):
        first_step(children, torch.randn(3, 3, 3, 5, 4, 4).half(), impl=impl)
    with pytest.raises(ValueError, match="`weight` must be on cpu as the children are, got meta"):
        first_step(children, torch.randn(3, 3, 3, 5, 4, 4, device="meta"), impl=impl)
    short = children._replace(norm=Norm(torch.ones(9), torch.zeros(9), 1e-5))
    with pytest.raises(ValueError, match="norm over poses of 16 elements, got one over 9"):
        first_step(short, torch.randn(3, 3, 3, 5, 4, 4), impl=impl)


def test_the_kernels_are_asked_for_by_name_only_where_all_can_run(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    children = norm_checks.unfinished((2, 4, 4, 3, 16), torch.float32)
    with pytest.raises(ValueError, match="got 'triton': a transform of 16×300 is larger"):
        first_step(children, torch.randn(3, 3, 3, 5, 16, 300), impl="triton")


@pytest.mark.parametrize("linear", [False, True])
def test_autocast_rounds_what_comes_in_and_reaches_no_further(linear):
    children = norm_checks.unfinished((2, 4, 4, 3, 4), torch.float32)
    weight = torch.randn(48, 5, 2, 2) if linear else torch.randn(3, 3, 3, 5, 2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = first_step(children, weight)
    assert torch.equal(low, first_step(children.to(torch.bfloat16), weight.bfloat16()))


def test_statistics_are_wider_than_the_poses():
    """bf16 would lose the spread of poses far from zero, and make 1 of a gain of 1.0038."""
    generator = torch.Generator().manual_seed(0)
    poses = (300 + torch.randn(50, 16, generator=generator)).bfloat16()
    norm = Norm(torch.full((16,), 1.0038), torch.zeros(16), 1e-5)
    exact = normalized(poses.double(), norm)
    assert (normalized(poses, norm) - exact).norm() < 0.0025 * exact.norm()


@pytest.mark.parametrize("schedule", ["concurrent", "sequential"])
@pytest.mark.parametrize("initial_poses", ["zeros", "learned"])
@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_a_stack_normalises_its_primary_capsules(schedule, initial_poses, iterations):
    torch.manual_seed(0)
    primary = PrimaryCaps(3, 4, 16)
    options = {"initial_poses": initial_poses}
    layers = [ConvCaps(4, 4, 16, **options), LinearCaps(4 * 9, 3, 16, **options)]
    stack = CapsuleStack(layers, iterations=iterations, schedule=schedule)
    features = torch.randn(2, 3, 5, 5)
    got = stack(primary(features, finish=False))
    torch.testing.assert_close(got, stack(primary(features)))


def test_a_layer_of_ones_own_gets_finished_capsules():
    class Mean(torch.nn.Module):
        def forward(self, children, parents=None):
            return children.flatten(1, -2).mean(1, keepdim=True).expand(-1, 10, -1)

    model = create_model("inverted_resnet_cifar10", iterations=1)
    model.capsules = CapsuleStack([Mean()], iterations=1)
    hooked = []
    model.primary.register_forward_hook(lambda *_: hooked.append(1))
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10) and hooked


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("d", "rows"), [(16, 4), (24, 1), (36, 6), (64, 8)])
def test_the_kernels_compile(capability, dtype, d, rows):
    pytest.importorskip("triton")
    import triton_compiler

    from capsroute.ops.inverted.triton import norm

    poses, weight = torch.empty((128, 16, 16, 32, d), dtype=dtype), torch.empty(d)
    with triton_compiler.compiling(capability) as compiled:
        out = norm.norm_by_rows._init_fn(poses, weight, weight, 1e-5, rows)
        norm.norm_by_rows_backward._init_fn(out, poses, weight, 1e-5)
    names = [kernel.__name__ for kernel, _, _ in compiled]
    assert names == ["norm_kernel", "norm_gradient_kernel", "add_kernel"]
    for _, _, made in compiled:
        assert triton_compiler.resources(made)[1] == 0  # nothing is spilled


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("capsules", "d", "rows"), [(32, 16, 4), (32, 4, 2), (8, 32, 1)])
def test_the_projection_compiles(capability, dtype, capsules, d, rows):
    pytest.importorskip("triton")
    import triton_compiler

    from capsroute.ops.inverted.triton.projection import project_by_rows

    features = torch.empty(128, 16, 16, 128, dtype=dtype)
    projection, weight = torch.empty(capsules, d, 128, dtype=dtype), torch.empty(d)
    with triton_compiler.compiling(capability) as compiled:
        project_by_rows._init_fn(features, projection, weight, weight, 1e-5, rows)
    [(_, _, made)] = compiled
    assert triton_compiler.resources(made)[1] == 0  # nothing is spilled
    assert made.metadata.shared <= 99 * 1024  # consumer cards


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*norm_checks.PROJECTED, *norm_checks.LARGE_PROJECTED])
def test_the_projection_on_a_card(name, dtype):
    sizes = (norm_checks.PROJECTED | norm_checks.LARGE_PROJECTED)[name]
    for seed in range(5):
        norm_checks.check_projected(*sizes, dtype, seed, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_without_gradients_takes_the_projection():
    from capsroute.ops.inverted.triton import projection

    torch.manual_seed(0)
    model = create_model("inverted_resnet_cifar10", iterations=2).cuda().eval()
    images = torch.rand(8, 3, 32, 32, device="cuda")
    own = projection.project_by_rows
    with torch.autocast("cuda", torch.bfloat16):
        want = model(images).detach()
        with mock.patch.object(projection, "project_by_rows", wraps=own) as taken, torch.no_grad():
            got = model(images)
    assert taken.call_count == 1
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*norm_checks.TINY, *norm_checks.PRIMARY])
def test_the_kernels_on_a_card(name, dtype):
    shape, rows = (norm_checks.TINY | norm_checks.PRIMARY)[name]
    for seed in range(5):
        norm_checks.check(shape, rows, dtype, seed, "cuda")
