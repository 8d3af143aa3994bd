"""The EM layers: shapes, parameter counts, mistakes, and that they learn."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capsroute.layers.em import EMClassCaps, EMConvCaps, EMPrimaryCaps


class Small(nn.Module):
    def __init__(self, classes: int = 3, iterations: int = 2) -> None:
        super().__init__()
        self.primary = EMPrimaryCaps(1, 3, 4)
        self.conv = EMConvCaps(3, 4, 4, kernel_size=3, stride=2, iterations=iterations)
        self.classes = EMClassCaps(4, classes, 4, iterations=iterations)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        _, log_activations = self.classes(*self.conv(*self.primary(images)))
        return log_activations.exp()


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_parameter_counts_of_the_paper():
    assert count(EMPrimaryCaps(256, 32, 16)) == 257 * 512 + 257 * 32
    assert count(EMConvCaps(32, 32, 16, stride=2)) == 147_456 + 64
    assert count(EMClassCaps(32, 10, 16)) == 32 * 10 * 16 + 20


def test_transforms_start_as_the_identity_and_noise():
    torch.manual_seed(0)
    for layer in (EMConvCaps(16, 16, 16, kernel_size=3), EMClassCaps(64, 64, 16)):
        matrices = layer.weight.detach().flatten(0, -3)
        torch.testing.assert_close(matrices.mean(0), torch.eye(4), rtol=0, atol=0.03)
        torch.testing.assert_close(matrices.std(0), torch.full((4, 4), 0.25), rtol=0.05, atol=0)


def test_shapes():
    model = Small()
    poses, log_activations = model.primary(torch.rand(2, 1, 7, 9))
    assert poses.shape == (2, 7, 9, 3, 4) and log_activations.shape == (2, 7, 9, 3)
    assert (log_activations <= 0).all()
    poses, log_activations = model.conv(poses, log_activations)
    assert poses.shape == (2, 3, 4, 4, 4) and log_activations.shape == (2, 3, 4, 4)
    poses, log_activations = model.classes(poses, log_activations)
    assert poses.shape == (2, 3, 4) and log_activations.shape == (2, 3)


def test_route_ends_in_what_forward_returns():
    model = Small(iterations=3)
    lower = model.primary(torch.rand(2, 1, 7, 7))
    for layer, window in ((model.conv, (3, 3, 3, 3, 3, 4)), (model.classes, (3 * 3 * 4, 3))):
        history = layer.route(*lower)
        assert [state.coefficients.shape for state in history] == [(2, *window)] * 3
        lower = layer(*lower)
        assert torch.equal(history[-1].poses, lower[0])
        assert torch.equal(history[-1].log_activations, lower[1])


def test_every_vote_held_or_a_tile_of_them_is_the_same():
    model = Small()
    lower = model.primary(torch.rand(2, 1, 7, 7))
    for layer in (model.conv, model.classes):
        want = layer(*lower)
        layer.impl = "reference"
        for some, same in zip(layer(*lower), want, strict=True):
            torch.testing.assert_close(some, same)
        lower = want


def test_kernels_that_cannot_run_are_refused_but_routing_is_shown():
    layer = EMConvCaps(3, 4, 4, impl="triton")
    lower = Small().primary(torch.rand(2, 1, 7, 7))
    with pytest.raises(ValueError, match="`impl` must be able to run here, got 'triton'"):
        layer(*lower)
    assert len(layer.route(*lower)) == layer.iterations


def test_the_pose_is_a_row_major_matrix_with_weights_on_its_right():
    layer = EMConvCaps(1, 1, 4, kernel_size=1, iterations=1)
    pose = torch.arange(4.0)
    poses, _ = layer(pose.view(1, 1, 1, 1, 4), torch.zeros(1, 1, 1, 1))
    torch.testing.assert_close(
        poses.flatten(), (pose.view(2, 2) @ layer.weight[0, 0, 0, 0]).flatten()
    )


def test_autocast_keeps_routing_in_float32():
    model = Small()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        activations = model(torch.rand(2, 1, 7, 7))
    assert activations.dtype == torch.float32
    activations.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_learns_where_a_square_is():
    torch.manual_seed(0)
    model = Small()
    images = torch.zeros(24, 1, 7, 7)
    labels = torch.arange(24) % 3
    for image, label in zip(images, labels, strict=True):
        top = 2 * int(label)
        image[0, top : top + 3, torch.randint(0, 5, ())] = 1.0
    images += 0.1 * torch.rand_like(images)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(80):
        loss = F.multi_margin_loss(model(images), labels, p=2, margin=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = (model(images).argmax(1) == labels).double().mean()
    assert accuracy > 0.9


def test_exports_with_any_batch_size():
    model = Small().eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(
        model, (torch.rand(3, 1, 7, 7),), dynamic_shapes={"images": {0: batch}}
    )
    images = torch.rand(5, 1, 7, 7)
    torch.testing.assert_close(program.module()(images), model(images))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: EMPrimaryCaps(1, 2, 5), "`pose_dim` must be a square for matrix poses, got 5"),
        (lambda: EMPrimaryCaps(1, 0, 4), "`capsules` must be an integer of at least 1, got 0"),
        (lambda: EMPrimaryCaps(1, 2, 4)(torch.zeros(1, 3, 3)), r"`features` .* got \(1, 3, 3\)"),
        (lambda: EMConvCaps(1, 2, 8), "`pose_dim` must be a square for matrix poses, got 8"),
        (lambda: EMConvCaps(1, 2, 4, kernel_size=0), "`kernel_size` must be .* at least 1, got 0"),
        (lambda: EMConvCaps(1, 2, 4, stride=0), "`stride` must be .* at least 1, got 0"),
        (lambda: EMConvCaps(1, 2, 4, iterations=0), "`iterations` must be .* at least 1, got 0"),
        (lambda: EMClassCaps(0, 2, 4), "`in_capsules` must be an integer of at least 1, got 0"),
        (lambda: EMClassCaps(1, 2, 1), "`pose_dim` must be at least 4 to hold coordinates, got 1"),
        (lambda: EMClassCaps(1, 2, 4, impl="fast"), "`impl` must be one of .* got 'fast'"),
        (lambda: EMConvCaps(1, 2, 4, impl="fast"), "`impl` must be one of .* got 'fast'"),
        (
            lambda: EMConvCaps(1, 2, 4)(torch.zeros(1, 2, 2, 1, 4), torch.zeros(1, 2, 2, 1)),
            "square kernel within the 2×2 input, got 3×3",
        ),
    ],
)
def test_mistakes_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
