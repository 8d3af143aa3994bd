"""Would a trained model be better if it routed more decidedly? And what training made of the votes.

LayerNorm undoes any scale of the votes, so all that the scale decides is how decided the routing
is. The agreement of a trained model is scaled, and the model measured again.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from capsroute.experiments.movement import mean_squares
from capsroute.layers.inverted import InvertedCaps
from capsroute.layers.primary import PoseNorm
from capsroute.models.inverted import InvertedCapsNet
from capsroute.train.metrics import correct

FOLDER = "sharper_routing"  # under results/
FACTORS = (0, 0.1, 1, 10, 100, 1000)  # 0: every parent gets the same share


@torch.no_grad()
def sharper_routing(
    model: InvertedCapsNet, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]
) -> dict[str, Any]:
    """Accuracy in percent, and unevenness of the class layer, with agreements scaled by FACTORS.

    Unevenness as in `pose_movement`, in the model's last iteration.
    """
    model.eval()
    own = {layer: layer.scale for layer in _layers(model)}
    accuracy, unevenness, images = [], [], 0
    try:
        for factor in FACTORS:
            for layer, scale in own.items():
                layer.scale = factor * (scale or 1.0 / math.sqrt(layer.out_pose_dim))
            right, uneven, images = _measure(model, batches())
            accuracy.append(100.0 * right / images)
            unevenness.append(math.sqrt(uneven / images))
    finally:
        for layer, scale in own.items():
            layer.scale = scale
    return {
        "factors": list(FACTORS),
        "accuracy": accuracy,
        "unevenness": unevenness,
        "images": images,
    }


def _measure(
    model: InvertedCapsNet, batches: Iterable[tuple[Tensor, Tensor]]
) -> tuple[float, float, int]:
    right, uneven, count = 0.0, 0.0, 0
    for images, targets in batches:
        scores, coefficients = _scores_and_class_coefficients(model, images)
        right += correct(model, scores, targets).sum().item()
        uneven += mean_squares(coefficients) * len(images)
        count += len(images)
    return right, uneven, count


def _scores_and_class_coefficients(model: InvertedCapsNet, images: Tensor) -> tuple[Tensor, Tensor]:
    """`model.route` would make the coefficients of every layer, and take 30 times as long."""
    calls: list[tuple[Any, ...]] = []
    layer = model.capsules.layers[-1]
    hook = layer.register_forward_pre_hook(lambda _, operands: calls.append(operands))
    try:
        scores = model(images)
    finally:
        hook.remove()
    return scores, layer(*calls[-1], return_coefficients=True)[1]


def vote_scales(model: InvertedCapsNet) -> dict[str, list[float]]:
    """By layer: how large the transforms are beside their initial scale, and LayerNorm's gain.

    Root mean squares, both 1 in a new model; a vote's scale is the product of both, of the
    transforms here and of the gain below.
    """
    layers = _layers(model)
    norms = [model.primary.norm, *(layer.norm for layer in layers)]
    return {
        "transforms": [_rms(layer.weight) / layer.initial_std for layer in layers],
        "gains": [_rms(norm.weight) for norm in norms if isinstance(norm, PoseNorm)],
    }


def _layers(model: InvertedCapsNet) -> list[InvertedCaps]:
    return [layer for layer in model.capsules.layers if isinstance(layer, InvertedCaps)]


def _rms(tensor: Tensor) -> float:
    return tensor.detach().double().square().mean().sqrt().item()
