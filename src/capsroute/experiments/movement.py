"""How far poses still move, iteration by iteration: does concurrent routing settle?

The paper hopes that routing reaches a fixed point. A trained model is run for many more iterations
than it was trained with, every layer updated in each, and the poses of one iteration are compared
with those of the one before.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capsroute.models.inverted import InvertedCapsNet
from capsroute.train.metrics import correct

FOLDER = "pose_movement"  # under results/
SHOWN = (2, 3, 5, 10, 20, 50)  # iterations that the report's table shows


@torch.no_grad()
def pose_movement(
    model: InvertedCapsNet, batches: Iterable[tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    """Over (images, targets): mean ‖pₜ − pₜ₋₁‖ / ‖pₜ‖ by layer, and accuracy if stopped at t.

    `movement[layer][t - 2]` for t from 2, `accuracy[t - 1]` in percent for t from 1. And
    `unevenness[layer][t - 1]`, the root of the mean of (M r − 1)²: none of it where each of the M
    parents gets the same share r of every child.
    """
    moved: list[Tensor] = []
    right: list[Tensor] = []
    uneven: list[Tensor] = []
    count = 0
    model.eval()
    for images, targets in batches:
        routing = model.route(images)
        moved.append(torch.stack([_steps(layer) for layer in routing.poses]) * len(images))
        scores = [model.classifier(poses) for poses in routing.poses[-1]]
        right.append(torch.stack([correct(model, each, targets).sum() for each in scores]))
        squares = [[mean_squares(each) for each in layer] for layer in routing.coefficients]
        uneven.append(torch.tensor(squares, dtype=torch.float64) * len(images))
        count += len(images)
    movement = torch.stack(moved).sum(0) / count
    accuracy = 100.0 * torch.stack(right).sum(0) / count
    unevenness = (torch.stack(uneven).sum(0) / count).sqrt()
    return {
        "movement": movement.tolist(),
        "unevenness": unevenness.tolist(),
        "accuracy": accuracy.tolist(),
        "images": count,
    }


def mean_squares(coefficients: Tensor) -> float:
    """The mean of (M r − 1)²; coefficients are (…, M)."""
    return (coefficients.shape[-1] * coefficients - 1.0).square().mean().item()


def _steps(poses: list[Tensor]) -> Tensor:
    """(iterations − 1,): the mean over capsules of how far each step went."""
    wide = torch.stack([each.double() for each in poses])
    steps = (wide[1:] - wide[:-1]).norm(dim=-1) / wide[1:].norm(dim=-1)
    return steps.flatten(1).mean(1)


def read_movements(results: Path) -> dict[str, dict[str, Any]]:
    """What tools/pose_movement.py wrote, poses from zero before those from random ones."""
    found: dict[str, dict[str, Any]] = {}
    for zeros in sorted((results / FOLDER).glob("*_zeros.json")):
        name = zeros.stem.removesuffix("_zeros")
        found[name] = json.loads(zeros.read_text())
        random = zeros.with_name(f"{name}_random.json")
        if random.exists():
            found[f"{name}, random start"] = json.loads(random.read_text())
    return found
