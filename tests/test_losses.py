"""Losses against their formulas, one image and one class at a time."""

import math

import pytest
import torch

from capsroute import losses


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    return scores, torch.tensor([2, 0, 1, 1])


def test_cross_entropy(batch):
    logits, targets = batch
    each = [
        -math.log(math.exp(row[t]) / sum(math.exp(x) for x in row))
        for row, t in zip(logits, targets, strict=True)
    ]
    assert losses.cross_entropy(logits, targets).item() == pytest.approx(sum(each) / 4)


def test_binary_cross_entropy_takes_indices_and_multi_hot_rows(batch):
    logits, targets = batch
    rows = torch.nn.functional.one_hot(targets, 3)
    total = 0.0
    for n in range(4):
        for j in range(3):
            p = 1 / (1 + math.exp(-logits[n, j]))
            total -= math.log(p if rows[n, j] else 1 - p)
    for given in (targets, rows, rows.double()):
        loss = losses.binary_cross_entropy(logits, given)
        assert loss.item() == pytest.approx(total / 12)


def test_margin(batch):
    scores, targets = batch
    lengths = scores.sigmoid()
    total = 0.0
    for n in range(4):
        for j in range(3):
            x = lengths[n, j].item()
            if j == targets[n]:
                total += max(0, 0.9 - x) ** 2
            else:
                total += 0.5 * max(0, x - 0.1) ** 2
    assert losses.margin(lengths, targets).item() == pytest.approx(total / 4)


def test_spread(batch):
    scores, targets = batch
    activations = scores.sigmoid()
    total = 0.0
    for n in range(4):
        for j in range(3):
            if j != targets[n]:
                lead = (activations[n, targets[n]] - activations[n, j]).item()
                total += max(0, 0.4 - lead) ** 2
    loss = losses.spread(activations, targets, margin=0.4)
    assert loss.item() == pytest.approx(total / 4)


@pytest.mark.parametrize("loss", [losses.margin, losses.binary_cross_entropy])
@pytest.mark.parametrize(
    "targets", [torch.zeros(1).long(), torch.zeros(4), torch.zeros(4, 2), torch.zeros(4, 1).long()]
)
def test_targets_of_another_batch_or_of_other_classes(loss, targets):
    with pytest.raises(ValueError, match=r"class indices \(4,\) or rows \(4, 3\), got torch\."):
        loss(torch.rand(4, 3), targets)


def test_spread_takes_no_rows():
    with pytest.raises(ValueError, match=r"`targets` must be class indices .* got \(2, 3\)"):
        losses.spread(torch.rand(2, 3), torch.eye(3)[:2])


def test_spread_margin_rises_over_ten_epochs():
    assert losses.spread_margin(0) == pytest.approx(0.2)
    assert losses.spread_margin(5) == pytest.approx(0.55)
    assert losses.spread_margin(10) == losses.spread_margin(300) == pytest.approx(0.9)
    assert losses.spread_margin(torch.tensor(5.0)).item() == pytest.approx(0.55)
