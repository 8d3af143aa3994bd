"""Receptive fields: against gradients of a network that hides none, and by hand."""

import numpy as np
import pytest
import torch
from explained_models import images, make
from torch import nn

import capsroute
from capsroute.explain.fields import Fields, _uncut, primary_fields
from capsroute.explain.trace import trace
from capsroute.explain.tree import layer_fields


def test_the_small_models_fields_by_hand():
    """5×5, 3×3, 3×3 convolutions of stride 2: 17 pixels, 8 apart, the first around pixel 0."""
    fields = primary_fields(capsroute.create_model("inverted_small_multimnist"))
    expected = [[0, 9], [0, 17], [8, 25], [16, 33], [24, 36]]
    assert fields.rows.tolist() == fields.columns.tolist() == expected
    assert fields.box(1, 3) == (0, 16, 17, 33)


@pytest.mark.parametrize("name", ["inverted_simple_cifar10", "em_simple_cifar10"])
def test_fields_against_gradients(name):
    """With positive weights nothing cancels, so gradients reach all that is seen."""
    model = capsroute.create_model(name, image_size=(14, 18)).eval().double()
    fields = primary_fields(model)
    for module in model.backbone.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.constant_(module.weight, 0.01)
            nn.init.constant_(module.bias, 0.01)
    pixels = torch.rand(1, 3, 14, 18, dtype=torch.float64, requires_grad=True)
    features = model.backbone(pixels).sum(dim=1)
    for row, column in ((0, 0), (3, 4), (6, 8)):
        (slope,) = torch.autograd.grad(features[0, row, column], pixels, retain_graph=True)
        rows, columns = slope[0].sum(dim=0).nonzero().T
        box = fields.box(row, column)
        seen = (rows.min(), columns.min(), rows.max() + 1, columns.max() + 1)
        assert tuple(box) == tuple(int(value) for value in seen)


def test_a_parent_sees_what_its_children_see():
    model = make("inverted")
    traced = trace(model, images(model, 1))
    fields = layer_fields(primary_fields(model), traced.layers)
    below, middle, top = fields
    assert middle.rows.tolist() == [[below.rows[0, 0], below.rows[2, 1]]]
    assert top.box(0, 0) == (0, 0, 24, 24)


def test_fields_cut_by_the_border_keep_their_spacing():
    axis = np.array([[0, 5], [0, 9], [2, 13], [6, 14]])
    middles, extent = _uncut(axis, 14)
    assert extent == 11 and middles.tolist() == [-1, 3, 7, 11]
    everything = np.array([[0, 14], [0, 14]])
    middles, extent = _uncut(everything, 14)
    assert extent == 14 and middles.tolist() == [3, 10]


def test_spreading_keeps_the_sum_and_stays_within_the_field():
    fields = primary_fields(capsroute.create_model("inverted_small_multimnist"))
    values = torch.zeros(1, 5, 5)
    values[0, 2, 3] = 2.0
    heat = fields.spread(values, (36, 36))[0]
    assert heat.sum().item() == pytest.approx(2)
    rows, columns = heat.nonzero().T
    top, left, bottom, right = fields.box(2, 3)
    assert (rows.min(), rows.max() + 1, columns.min(), columns.max() + 1) == (
        top,
        bottom,
        left,
        right,
    )


def test_interpolating_keeps_the_sum_and_meets_the_values_at_the_middles():
    fields = Fields(*[np.array([[0, 3], [0, 5], [2, 7], [4, 8]])] * 2)  # middles 0, 2, 4, 6
    values = torch.rand(2, 4, 4)
    laid = fields.interpolate(values, (8, 8))
    torch.testing.assert_close(laid.sum(dim=(1, 2)), values.sum(dim=(1, 2)))
    one = torch.zeros(1, 4, 4)
    one[0, 1, 2] = 4.0
    expected = torch.outer(torch.tensor([0, 0.5, 1, 0.5]), torch.tensor([0.5, 1, 0.5]))
    laid = fields.interpolate(one, (8, 8))[0]
    torch.testing.assert_close(laid[:4, 3:6], expected)
    assert laid.sum().item() == pytest.approx(4)


def test_who_sees_most_of_the_image():
    small = primary_fields(capsroute.create_model("inverted_small_multimnist"))
    assert not small.see_most((36, 36)) and small.see_most((20, 20))
    half = Fields(np.array([[0, 4]]), np.array([[0, 8]]))
    assert not half.see_most((8, 8)) and half.see_most((8, 7))


def test_places_lie_around_the_middles_and_grow_with_the_layers():
    fields = Fields(*[np.array([[max(0, c - 20), min(32, c + 21)] for c in range(0, 32, 2)])] * 2)
    places = fields.places((32, 32))  # a quarter of the image, and the pixel in the middle
    assert places.box(5, 0) == (6, 0, 15, 5) and places.box(15, 15) == (26, 26, 32, 32)
    coarse = Fields(*[np.array([[0, 32]] * 4)] * 2).places((32, 32))  # 8 apart: it and the next
    assert coarse.box(1, 2) == (0, 8, 24, 32)


def test_fields_of_an_axis_each():
    fields = Fields(np.array([[0, 3]]), np.array([[1, 4], [2, 5]]))
    assert fields.box(0, 1) == (0, 2, 3, 5)
