"""Capsule layers: what they check, how they start, what they pass on to the routing."""

import itertools
import math

import numpy as np
import pytest
import torch

from capsroute.layers import (
    CapsuleStack,
    ConvCaps,
    DynamicConvCaps,
    DynamicLinearCaps,
    EMClassCaps,
    EMConvCaps,
    LinearCaps,
    PrimaryCaps,
    SharedClassifier,
)
from capsroute.ops.dynamic import dynamic_routing, squash
from capsroute.ops.inverted import routing_step


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ConvCaps(2, 2, 15), "`pose_dim` must be a square for matrix poses, got 15"),
        (lambda: LinearCaps(2, 2, 16, 9), r"must equal `pose_dim` \(=16\) .* got 9"),
        (lambda: ConvCaps(2, 2, 16, pose="tensor"), "'matrix', 'vector', got 'tensor'"),
        (lambda: ConvCaps(2, 2, 16, initial_poses="ones"), "`initial_poses` must be one of"),
        (lambda: ConvCaps(2, 2, 16, windows="mix"), "`windows` must be one of .* got 'mix'"),
        (lambda: PrimaryCaps(2, 2, 4, normalization="batch"), "got 'batch'"),
        (lambda: ConvCaps(2, 2, 4)(torch.zeros(1, 2, 2, 2, 4)), "within the 2×2 children"),
        (
            lambda: ConvCaps(2, 2, 4, windows="mixed")(torch.zeros(1, 2, 5, 2, 4)),
            "within the 2×5 children",
        ),
        (
            lambda: ConvCaps(2, 2, 4, windows="mixed")(torch.zeros(1, 5, 2, 4)),
            r"must have shape \(B, H, W, in, d\)",
        ),
        (lambda: ConvCaps(2, 2, 4, stride=0), "`stride` must be .* at least 1, got 0"),
        (lambda: ConvCaps(2, 2, 4, kernel_size=0), "`kernel_size` must be .* at least 1, got 0"),
        (lambda: LinearCaps(0, 2, 4), "`in_capsules` must be an integer of at least 1, got 0"),
        (lambda: LinearCaps(3, 0, 4), "`out_capsules` must be an integer of at least 1, got 0"),
        (lambda: LinearCaps(3, 2, 0), "`pose_dim` must be an integer of at least 1, got 0"),
        (lambda: LinearCaps(3, 2.0, 4), "`out_capsules` must be an integer .* got 2.0"),
        (lambda: LinearCaps(3, 2, 4, impl="tritn"), "'tiled', 'triton', got 'tritn'"),
        (lambda: PrimaryCaps(2, 0, 4), "`capsules` must be an integer of at least 1, got 0"),
        (lambda: DynamicConvCaps(2, 2, 4, 4, iterations=0), "`iterations` must be .* got 0"),
        (lambda: DynamicLinearCaps(2, 2, 4, 4, impl="tritn"), "'triton', got 'tritn'"),
        (lambda: LinearCaps(3, 2, 4)(torch.zeros(3, 4)), r"shape \(B, in, d\) or .* got \(3, 4\)"),
        (lambda: CapsuleStack([], iterations=1), "`layers` must hold one layer at least, got none"),
        (
            lambda: CapsuleStack([DynamicLinearCaps(2, 2, 4, 4)], iterations=2),
            "one routing step a call, as ConvCaps does, got a DynamicLinearCaps, which does all",
        ),
        (
            lambda: PrimaryCaps(2, 2, 4)(torch.zeros(2, 5, 5)),
            r"`features` must have shape \(B, C, H, W\), got \(2, 5, 5\)",
        ),
    ],
)
def test_mistakes(build, message):
    with pytest.raises(ValueError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (ConvCaps(2, 3, 16, stride=2), "2 -> 3 capsules, matrix 4×4, kernel_size=3, stride=2"),
        (
            ConvCaps(2, 3, 16, stride=2, windows="mixed"),
            "2 -> 3 capsules, matrix 4×4, kernel_size=3, stride=2, windows=mixed",
        ),
        (LinearCaps(2, 3, 4, 8, pose="vector"), "2 -> 3 capsules, vector 4×8"),
        (
            DynamicConvCaps(2, 3, 4, 8, stride=2),
            "2 -> 3 capsules, vector 4×8, kernel_size=3, stride=2, iterations=3",
        ),
        (DynamicLinearCaps(2, 3, 4, 8), "2 -> 3 capsules, vector 4×8, iterations=3"),
        (
            EMConvCaps(2, 3, 16, stride=2),
            "2 -> 3 capsules, matrix 4×4, kernel_size=3, stride=2, iterations=2",
        ),
        (EMClassCaps(2, 3, 16), "2 -> 3 capsules, matrix 4×4, iterations=2"),
    ],
)
def test_layers_of_every_routing_print_alike(layer, told):
    assert layer.extra_repr() == told


def test_a_scale_that_would_have_to_learn():
    with pytest.raises(TypeError, match="`scale` must be a number, got a Tensor"):
        ConvCaps(3, 5, 4, scale=torch.nn.Parameter(torch.tensor(0.5)))


def test_initial_scale_is_the_authors():
    torch.manual_seed(0)
    conv = ConvCaps(8, 32, 16, kernel_size=3)
    assert conv.weight.std().item() == pytest.approx(math.sqrt(32 / (4 * 8 * 9)), rel=0.02)
    vector = LinearCaps(40, 10, 16, 8, pose="vector")
    assert vector.weight.std().item() == pytest.approx(math.sqrt(10 / (16 * 40)), rel=0.02)
    for dynamic in (DynamicConvCaps(8, 8, 4, 8), DynamicLinearCaps(40, 10, 8, 8)):
        assert dynamic.weight.std().item() == pytest.approx(0.1, rel=0.02)


def test_a_linear_layer_flattens_rows_columns_then_capsules():
    torch.manual_seed(0)
    layer = LinearCaps(2 * 3 * 4, 5, 4)
    children = torch.randn(2, 2, 3, 4, 4)
    assert torch.equal(layer(children), layer(children.reshape(2, 24, 4)))


def test_sizes_counted_by_numpy_are_taken():
    assert LinearCaps(np.prod([2, 3, 4]), np.int64(5), 4).weight.shape == (24, 5, 2, 2)


@pytest.mark.parametrize(
    ("layer", "children"),
    [
        (ConvCaps(4, 6, 4, stride=2, layer_norm=False, scale=1.0), (2, 7, 5, 4, 4)),
        (LinearCaps(24, 3, 4, layer_norm=False, scale=1.0), (2, 24, 4)),
    ],
)
def test_the_scale_of_the_agreement_is_the_one_given(layer, children):
    torch.manual_seed(0)
    children = torch.randn(children)
    parents = layer(children)
    expected = routing_step(children, layer.weight, parents, stride=layer.stride, scale=1.0)
    torch.testing.assert_close(layer(children, parents), expected)


def test_learned_poses_are_the_parents_of_the_first_iteration():
    torch.manual_seed(0)
    layer = LinearCaps(24, 3, 4, layer_norm=False, initial_poses="learned")
    layer.initial.data.normal_()
    children = torch.randn(2, 24, 4)
    expected = routing_step(children, layer.weight, layer.initial.expand(2, 3, 4))
    torch.testing.assert_close(layer(children), expected)


def mix_by_hand(children, k, stride):
    """What each position sees: a window's elements in the order (d, H', W'), dealt out d by d."""
    batch, rows, columns, capsules, d = children.shape
    height, width = (rows - k) // stride + 1, (columns - k) // stride + 1
    places = [(row, column) for row in range(height) for column in range(width)]
    seen = torch.empty(batch, height, width, k, k, capsules, d)
    for image, y, x, capsule in itertools.product(
        range(batch), range(k), range(k), range(capsules)
    ):
        written = [
            children[image, stride * row + y, stride * column + x, capsule, element]
            for element in range(d)
            for row, column in places
        ]
        for index, (row, column) in enumerate(places):
            dealt = torch.stack(written[index * d : (index + 1) * d])
            seen[image, row, column, y, x, capsule] = dealt
    return seen


@pytest.mark.parametrize("pose", ["matrix", "vector"])
def test_mixed_windows_are_those_of_the_authors_first_release(pose):
    torch.manual_seed(0)
    layer = ConvCaps(2, 3, 4, kernel_size=2, stride=2, pose=pose, windows="mixed")
    children = torch.randn(2, 7, 5, 2, 4, requires_grad=True)
    seen = mix_by_hand(children, 2, 2)
    assert seen.shape[1:3] == (3, 2)
    windows = seen.flatten(0, 2).flatten(1, 3)  # each position by itself, in a linear layer
    weight = layer.weight.flatten(0, 2)
    parents = layer.norm(routing_step(windows, weight))
    torch.testing.assert_close(layer(children), parents.unflatten(0, (2, 3, 2)))
    again = layer.norm(routing_step(windows, weight, parents)).unflatten(0, (2, 3, 2))
    updated = layer(children, layer(children))
    torch.testing.assert_close(updated, again)
    cotangent = torch.randn_like(again)
    gradients = [torch.autograd.grad(x, children, cotangent)[0] for x in (updated, again)]
    torch.testing.assert_close(*gradients)
    _, coefficients = layer(children, parents.unflatten(0, (2, 3, 2)), return_coefficients=True)
    assert coefficients.shape == (2, 3, 2, 2, 2, 2, 3)


def test_dynamic_convolutions_keep_their_stride():
    torch.manual_seed(0)
    layer = DynamicConvCaps(2, 3, 4, 8, stride=2, iterations=2)
    children = torch.randn(1, 7, 5, 2, 4)
    assert layer(children).shape == (1, 3, 2, 3, 8)
    assert torch.equal(layer(children), dynamic_routing(children, layer.weight, 2, stride=2))


def test_primary_capsules_are_squashed_for_dynamic_routing():
    torch.manual_seed(0)
    primary = PrimaryCaps(3, 4, 8, normalization="squash")
    features = torch.randn(2, 3, 5, 5)
    poses = primary.conv(features).permute(0, 2, 3, 1).unflatten(-1, (4, 8))
    torch.testing.assert_close(primary(features), squash(poses))


def test_scores_of_low_precision_poses_are_not_rounded():
    torch.manual_seed(0)
    classifier = SharedClassifier(16).bfloat16()
    poses = torch.randn(8, 10, 16).bfloat16()
    exact = (poses.double() * classifier.weight.double()).sum(-1) + classifier.bias.double()
    torch.testing.assert_close(classifier(poses), exact.float())


def test_poses_stay_in_low_precision_under_autocast():
    torch.manual_seed(0)
    primary = PrimaryCaps(3, 4, 16)
    stack = CapsuleStack([ConvCaps(4, 4, 16), LinearCaps(4 * 9, 3, 16)], iterations=3)
    features = torch.randn(2, 3, 5, 5)
    exact = stack(primary(features))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        poses = stack(primary(features))
    assert poses.dtype == torch.bfloat16
    assert (poses.float() - exact).norm() / exact.norm() < 0.05
