"""Ablation C's layers: what they hold, what they take, and that their activations learn."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capsroute.layers import CapsuleStack, ConvCaps, LinearCaps
from capsroute.layers.activated import (
    INVERSE_TEMPERATURE,
    ActivatedCapsules,
    ActivatedConvCaps,
    ActivatedLinearCaps,
    ActivatedPrimaryCaps,
)
from capsroute.layers.heads import SharedClassifier
from capsroute.ops.inverted.activations import activated_routing_step


class Small(nn.Module):
    def __init__(self, iterations: int) -> None:
        super().__init__()
        self.primary = ActivatedPrimaryCaps(1, 4, 16, kernel_size=3, stride=1)
        layers = [ActivatedConvCaps(4, 6, 16, stride=2), ActivatedLinearCaps(2 * 2 * 6, 3, 16)]
        self.capsules = CapsuleStack(layers, iterations=iterations)
        self.classifier = SharedClassifier(16)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        top = self.capsules(self.primary(images))
        return self.classifier(top.scaled()), top.log_activations.exp()


def drawn_capsules(*shape: int) -> ActivatedCapsules:
    return ActivatedCapsules(torch.randn(*shape, 4), F.logsigmoid(torch.randn(*shape)))


@pytest.mark.parametrize(
    ("plain", "activated", "children_each"),
    [
        (ConvCaps(4, 6, 4, kernel_size=3), ActivatedConvCaps(4, 6, 4, kernel_size=3), 9 * 4 / 6),
        (LinearCaps(24, 3, 4), ActivatedLinearCaps(24, 3, 4), 24 / 3),
    ],
)
def test_two_betas_more_than_the_layer_without(plain, activated, children_each):
    assert activated.state_dict().keys() - plain.state_dict().keys() == {"beta_u", "beta_a"}
    free = torch.full((plain.out_capsules,), 0.5 * math.log(children_each))
    torch.testing.assert_close(activated.beta_u.data, free)
    assert not activated.beta_a.any()


def test_a_linear_layer_flattens_activations_as_it_does_poses():
    torch.manual_seed(0)
    layer = ActivatedLinearCaps(2 * 3 * 4, 5, 4)
    children = drawn_capsules(2, 2, 3, 4)
    flat = ActivatedCapsules(children.poses.flatten(1, 3), children.log_activations.flatten(1))
    for actual, expected in zip(layer(children), layer(flat), strict=True):
        assert torch.equal(actual, expected)


def test_a_convolution_keeps_its_stride_and_returns_coefficients():
    layer = ActivatedConvCaps(4, 6, 4, kernel_size=3, stride=2)
    capsules, coefficients = layer(drawn_capsules(2, 7, 5, 4), return_coefficients=True)
    assert capsules.poses.shape == (2, 3, 2, 6, 4)
    assert capsules.log_activations.shape == (2, 3, 2, 6)
    assert coefficients.shape == (2, 3, 2, 3, 3, 4, 6)


def test_the_scale_of_the_agreement_is_the_one_given():
    torch.manual_seed(0)
    layer = ActivatedLinearCaps(24, 3, 4, scale=1.0)
    children = drawn_capsules(2, 24)
    parents = layer(children)
    expected = activated_routing_step(
        *children,
        layer.weight,
        *parents,
        layer.beta_u,
        layer.beta_a,
        scale=1.0,
        inverse_temperature=INVERSE_TEMPERATURE,
        return_coefficients=True,
    )
    _, coefficients = layer(children, parents, return_coefficients=True)
    torch.testing.assert_close(coefficients, expected.coefficients)


def test_options_without_meaning_here_are_refused():
    with pytest.raises(ValueError, match=r"`initial_poses` must be 'zeros' .* got 'random'"):
        ActivatedLinearCaps(4, 3, 4, initial_poses="random")
    with pytest.raises(ValueError, match=r"`windows` must be 'sliding' .* got 'mixed'"):
        ActivatedConvCaps(4, 3, 4, windows="mixed")


def test_every_vote_held_or_a_tile_of_them_is_the_same():
    layer, children = ActivatedLinearCaps(24, 3, 4), drawn_capsules(2, 24)
    parents = layer(children)
    layer.impl = "reference"
    for some, same in zip(layer(children), parents, strict=True):
        torch.testing.assert_close(some, same)


def test_coefficients_are_kept_where_the_kernels_are_asked_for():
    """They keep none, so the step that explains is made without them."""
    layer, children = ActivatedLinearCaps(24, 3, 4), drawn_capsules(2, 24)
    want = layer(children, return_coefficients=True)[1]
    layer.impl = "triton"
    torch.testing.assert_close(layer(children, return_coefficients=True)[1], want)
    with pytest.raises(ValueError, match="`impl` must be able to run here, got 'triton'"):
        layer(children)


@pytest.mark.parametrize("iterations", [1, 3])
def test_learns_where_a_square_is_without_saturating(iterations):
    torch.manual_seed(0)
    model = Small(iterations)
    images, labels = torch.zeros(24, 1, 7, 7), torch.arange(24) % 3
    for image, label in zip(images, labels, strict=True):
        top = 2 * int(label)
        image[0, top : top + 3, torch.randint(0, 5, ())] = 1.0
    images += 0.1 * torch.rand_like(images)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    for _ in range(60):
        scores, _ = model(images)
        optimizer.zero_grad()
        F.cross_entropy(scores, labels).backward()
        optimizer.step()
    scores, activations = model(images)
    assert (scores.argmax(1) == labels).double().mean() > 0.9
    assert activations.min() > 0.01 and activations.max() < 0.99
    assert activations.std(0).max() > 0.005  # they say something of the image
