"""Capsule layers: what they check, how they start, what they keep in low precision."""

import math

import pytest
import torch

from capsroute.layers import CapsuleStack, ConvCaps, LinearCaps, PrimaryCaps


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ConvCaps(2, 2, 15), "`pose_dim` must be a square for matrix poses, got 15"),
        (lambda: LinearCaps(2, 2, 16, 9), r"must equal `pose_dim` \(=16\) .* got 9"),
        (lambda: ConvCaps(2, 2, 16, pose="tensor"), "'matrix' or 'vector', got 'tensor'"),
        (lambda: ConvCaps(2, 2, 16, initial_poses="ones"), "`initial_poses` must be one of"),
        (lambda: PrimaryCaps(2, 2, 4, normalization="batch"), "got 'batch'"),
        (lambda: ConvCaps(2, 2, 4)(torch.zeros(1, 2, 2, 2, 4)), "within the 2×2 children"),
    ],
)
def test_mistakes(build, message):
    with pytest.raises(ValueError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_initial_scale_is_the_authors():
    torch.manual_seed(0)
    conv = ConvCaps(8, 32, 16, kernel_size=3)
    assert conv.weight.std().item() == pytest.approx(math.sqrt(32 / (4 * 8 * 9)), rel=0.02)
    vector = LinearCaps(40, 10, 16, 8, pose="vector")
    assert vector.weight.std().item() == pytest.approx(math.sqrt(10 / (16 * 40)), rel=0.02)


def test_a_linear_layer_flattens_rows_columns_then_capsules():
    torch.manual_seed(0)
    layer = LinearCaps(2 * 3 * 4, 5, 4)
    children = torch.randn(2, 2, 3, 4, 4)
    assert torch.equal(layer(children), layer(children.reshape(2, 24, 4)))


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
