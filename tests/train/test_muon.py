"""Muon: what it takes for matrices, how it moves them, and that all else is AdamW's."""

import pytest
import torch
from torch import nn

from capsroute import create_model
from capsroute.ops.inverted import routing_step
from capsroute.train.config import OptimConfig
from capsroute.train.muon import Muon, as_matrix, from_matrix, matrix_kinds, orthogonalized
from capsroute.train.optim import make_optimizer

RECIPE = OptimConfig(optimizer="muon", lr=0.02, momentum=0.95, nesterov=True, weight_decay=0.1)


@pytest.mark.parametrize(
    ("name", "transforms"),
    [
        ("inverted_small_multimnist", ["capsules.layers.0.weight", "capsules.layers.1.weight"]),
        ("dynamic_vector_multimnist", ["capsules.0.weight", "capsules.1.weight"]),
        ("em_simple_cifar10", ["capsules.0.weight", "capsules.1.weight", "capsules.2.weight"]),
        ("cnn_cifar10", []),
    ],
)
def test_convolutions_and_transforms_are_matrices(name, transforms):
    with torch.device("meta"):
        model = create_model(name)
    kinds = {
        key: kind for key, p in model.named_parameters() for kind in [matrix_kinds(model).get(p)]
    }
    assert sorted(key for key, kind in kinds.items() if kind == "transforms") == transforms
    filters = {key for key, kind in kinds.items() if kind == "filters"}
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(filters) == len(convolutions) > 0
    assert not any("bias" in key or "norm" in key or "classifier" in key for key in filters)


def test_every_kind_of_convolution_has_filters():
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.ConvTranspose2d(3, 4, 2), nn.Conv3d(4, 5, 2))
    assert matrix_kinds(model) == {layer.weight: "filters" for layer in model}


@pytest.mark.parametrize("shape", [(18, 5, 4, 4), (18, 5, 6, 7)], ids=["matrix", "vector"])
def test_the_matrix_of_transforms_makes_the_sums_of_all_votes(shape):
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.float64)
    n_in, n_out, a, b = shape
    poses = torch.randn(3, n_in, 16 if a == b else a, dtype=torch.float64)
    rows = poses.unflatten(-1, (-1, a)).movedim(1, 2).flatten(2)  # (images, rows, in·a)
    sums = (rows @ as_matrix(weight, "transforms")).unflatten(-1, (n_out, b)).movedim(1, 2)
    torch.testing.assert_close(sums.flatten(2) / n_out, routing_step(poses, weight))


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((8, 3, 5, 5), "filters"), ((6, 5, 4, 4), "transforms"), ((3, 3, 2, 5, 6, 7), "transforms")],
)
def test_matrices_go_back_where_they_came_from(shape, kind):
    weight = torch.randn(shape)
    matrix = as_matrix(weight, kind)
    assert matrix.ndim == 2 and torch.equal(from_matrix(matrix, weight, kind), weight)


@pytest.mark.parametrize("shape", [(1, 12, 40), (2, 40, 12), (3, 9, 9)])
def test_singular_values_are_made_equal(shape):
    torch.manual_seed(0)
    left, values, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    uneven = left * torch.logspace(0, -2, values.shape[-1]) @ right
    found = left.mT @ orthogonalized(uneven) @ right.mT  # diagonal, but for rounding
    diagonal = found.diagonal(dim1=-2, dim2=-1)
    assert diagonal.min() > 0.6 and diagonal.max() < 1.3
    assert (found - torch.diag_embed(diagonal)).abs().max() < 1e-4


def test_zero_gradients_move_nothing():
    assert torch.equal(orthogonalized(torch.zeros(1, 3, 4)), torch.zeros(1, 3, 4))


def test_filters_move_as_by_pytorchs_own_muon():
    """Which takes matrices only, and multiplies in bfloat16: its rounding is the difference."""
    torch.manual_seed(0)
    conv = nn.Conv2d(6, 16, 3, bias=False)
    flat = nn.Parameter(conv.weight.detach().flatten(1).clone())
    ours = make_optimizer(RECIPE, conv)
    theirs = torch.optim.Muon(
        [flat], 0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    start = flat.detach().clone()
    for _ in range(5):
        conv.weight.grad = torch.randn_like(conv.weight)
        flat.grad = conv.weight.grad.flatten(1).clone()
        ours.step()
        theirs.step()
    moved, expected = conv.weight.flatten(1) - start, flat - start
    assert (moved - expected).norm() < 0.02 * expected.norm()


def test_all_else_moves_by_adamw():
    torch.manual_seed(0)
    ours, theirs = nn.LayerNorm(4), nn.LayerNorm(4)
    optimizer = make_optimizer(RECIPE, ours)
    assert isinstance(optimizer, Muon) and [g["kinds"] for g in optimizer.param_groups] == [None]
    plain = torch.optim.AdamW(theirs.parameters(), 0.02, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(3):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        optimizer.step()
        plain.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_weights_without_a_gradient_stay():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3))
    optimizer = make_optimizer(RECIPE, model)
    before = [p.detach().clone() for p in model.parameters()]
    model[0](torch.ones(1, 1, 3, 3)).sum().backward()
    optimizer.step()
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert moved == [True, True, False, False]


def test_what_routes_may_have_a_decay_of_its_own():
    model = create_model("inverted_small_multimnist")
    config = OptimConfig(optimizer="muon", weight_decay=0.2, capsule_decay=0.0)
    groups = make_optimizer(config, model).param_groups
    assert [(g["weight_decay"], g["kinds"] is None) for g in groups] == [
        (0.2, False),
        (0.2, True),
        (0.0, False),
        (0.0, True),
    ]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_the_learning_rate_may_be_a_tensor():
    """As it is on a GPU, where a graph reads another value at every replay."""
    torch.manual_seed(0)
    one, other = nn.Conv2d(2, 3, 3), nn.Conv2d(2, 3, 3)
    other.load_state_dict(one.state_dict())
    with_number, with_tensor = make_optimizer(RECIPE, one), make_optimizer(RECIPE, other)
    for group in with_tensor.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    for model, optimizer in ((one, with_number), (other, with_tensor)):
        model(torch.ones(1, 2, 5, 5)).square().sum().backward()
        optimizer.step()
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
