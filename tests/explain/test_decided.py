"""Entropy and winners, on coefficients small enough to reckon by hand."""

import math

import pytest
import torch

from capsroute.explain.decided import decisions, normalized_entropy, share_never_winning


def test_entropy_by_hand():
    assert normalized_entropy(torch.full((1, 3, 4), 0.25)) == pytest.approx(1)
    assert normalized_entropy(torch.eye(4)[None]) == pytest.approx(0)
    half = torch.tensor([[[0.5, 0.5, 0.0, 0.0]]])
    assert normalized_entropy(half) == pytest.approx(math.log(2) / math.log(4))
    assert normalized_entropy(torch.ones(1, 3, 1)) == 1.0  # one parent: no choice


def test_winners_of_a_linear_layer():
    r = torch.tensor([[[0.6, 0.3, 0.1], [0.7, 0.2, 0.1], [0.1, 0.5, 0.4]]])
    assert share_never_winning(r) == pytest.approx(1 / 3)


def test_winners_of_a_convolutional_layer_are_counted_by_position():
    r = torch.zeros(1, 1, 2, 1, 1, 2, 4)  # two positions, two children each, four parents
    r[0, 0, 0, 0, 0, :, 1] = 1.0  # at the first, one parent wins both
    r[0, 0, 1, 0, 0, 0, 0] = r[0, 0, 1, 0, 0, 1, 3] = 1.0  # at the second, two win one each
    assert share_never_winning(r) == pytest.approx(5 / 8)


def test_layers_that_did_not_route_say_so():
    even, decided = torch.full((1, 3, 2), 0.5), torch.tensor([[[0.9, 0.1]] * 3])
    first, second = decisions([[even, decided], [even, decided]], [0, 1])
    assert not first.routed and first.never_win is None and first.used == 1
    assert second.routed and second.never_win == 0.5 and second.used == 2
    assert len(first.entropy) == 2  # what never reached the scores is shown all the same
    assert first.as_dict()["routed"] is False


def test_nearly_even_is_told_from_even():
    exact = torch.full((1, 3, 10), 0.1)
    nearly = exact.clone()
    nearly[0, 0, 0], nearly[0, 0, 1] = 0.104, 0.096
    decided = torch.eye(10)[None, :3]
    even, hardly, routed = decisions([[exact], [exact, nearly], [exact, decided]], [0, 1, 1])
    assert even.even and even.state == "shared evenly" and even.deviation < 1e-6
    assert not hardly.even and not hardly.routed and hardly.never_win is None
    assert hardly.deviation == pytest.approx(0.04, rel=1e-4)
    assert hardly.state == "hardly routed, within 4.0 % of even"
    assert routed.state == "routed" and routed.deviation == pytest.approx(9)
    assert (even.children, even.parents) == (3, 10)
    windows = torch.full((1, 2, 2, 3, 3, 4, 8), 1 / 8)
    assert decisions([[windows]], [0])[0].children == 3 * 3 * 4


def test_what_went_to_nobody_is_not_taken_for_a_decision():
    r = torch.full((1, 3, 4), 0.05)  # even, and four fifths of each child to nobody
    (layer,) = decisions([[r]], [0])
    assert layer.entropy == [pytest.approx(1)] and layer.state == "shared evenly"
    assert layer.nobody == pytest.approx(0.8) and layer.as_dict()["nobody"] == layer.nobody
    lone = torch.tensor([[[0.2, 0.0], [0.0, 0.0]]])  # all to one parent; nothing at all
    assert normalized_entropy(lone) == pytest.approx(0.5)
    assert decisions([[torch.eye(4)[None]]], [0])[0].nobody == 0
    rounded = torch.linspace(0, 1, 200).view(1, 50, 4).softmax(-1).bfloat16()
    assert rounded.double().sum(-1).mean() < 1 - 1e-5
    assert decisions([[rounded]], [0])[0].nobody == 0


def test_a_deviation_is_rounded_up():
    r = torch.tensor([[[0.50201, 0.49799]]], dtype=torch.float64)
    assert decisions([[r]], [0])[0].deviation_percent == "0.5 %"
