"""A model's layers as the rows of the paper's appendix tables."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from capsroute.layers.dynamic import DynamicConvCaps, DynamicLinearCaps
from capsroute.layers.em import EMClassCaps, EMConvCaps, EMPrimaryCaps
from capsroute.layers.heads import SharedClassifier
from capsroute.layers.inverted import ConvCaps, InvertedCaps, LinearCaps
from capsroute.layers.primary import PrimaryCaps
from capsroute.models.backbones import ResidualBlock
from capsroute.models.base import ImageClassifier, count_parameters, evaluating
from capsroute.models.inverted import InvertedCapsNet


@dataclass
class Row:
    """One row: what is done, the size of what comes out, and the parameters it holds."""

    operation: str
    output: str
    parameters: int


def _conv(m: nn.Conv2d) -> str:
    k, s, p = m.kernel_size[0], m.stride[0], m.padding[0]
    return (
        f"input_dim={m.in_channels}, output_dim={m.out_channels}, {k}x{k} conv, "
        f"stride={s}, padding={p}"
    )


def _pose(layer: ConvCaps | LinearCaps) -> str:
    d = layer.out_pose_dim
    side = math.isqrt(d)
    return f"{side}x{side}" if layer.pose == "matrix" else f"{d}"


def _after(layer: ConvCaps | LinearCaps) -> str:
    activated = " with activations" if hasattr(layer, "beta_a") else ""
    normed = "\nLayer Norm" if isinstance(layer.norm, nn.LayerNorm) else ""
    return activated + normed


def _primary(m: PrimaryCaps) -> str:
    last = {"layer": "\nLayer Norm", "squash": "\nSquash"}[m.normalization]
    return f"{_conv(m.conv)}\nCapsules reshape{last}"


_DESCRIPTIONS: dict[type[nn.Module], Callable[[Any], str]] = {
    nn.Conv2d: _conv,
    nn.ReLU: lambda m: "ReLU",
    nn.BatchNorm2d: lambda m: "Batch Norm",
    nn.AvgPool2d: lambda m: f"{m.kernel_size}x{m.kernel_size} average pooling, padding=0",
    nn.AdaptiveAvgPool2d: lambda m: "average pooling over all positions",
    nn.Flatten: lambda m: "Flatten",
    nn.Linear: lambda m: f"input_dim={m.in_features}, output_dim={m.out_features}, linear",
    SharedClassifier: lambda m: f"input_dim={m.in_features}, output_dim=1, linear\nReshape",
    ResidualBlock: lambda m: (
        f"{m.conv1.out_channels}-dim. residual building block, stride={m.conv1.stride[0]}"
    ),
    PrimaryCaps: _primary,
    ConvCaps: lambda m: (
        f"Conv Inverted Dot-Product Attention Routing to {m.out_capsules} {_pose(m)}-dim. "
        f"capsules, {m.kernel_size}x{m.kernel_size} conv, stride={m.stride}"
        f"{', mixed windows' if m.windows == 'mixed' else ''}{_after(m)}"
    ),
    LinearCaps: lambda m: (
        f"Linear Inverted Dot-Product Attention Routing to {m.out_capsules} {_pose(m)}-dim. "
        f"capsules{_after(m)}"
    ),
    DynamicConvCaps: lambda m: (
        f"Conv Dynamic Routing to {m.weight.shape[3]} {m.weight.shape[5]}-dim. capsules, "
        f"{m.kernel_size}x{m.kernel_size} conv, stride={m.stride}\nSquash"
    ),
    DynamicLinearCaps: lambda m: (
        f"Linear Dynamic Routing to {m.weight.shape[1]} {m.weight.shape[3]}-dim. capsules\nSquash"
    ),
    EMPrimaryCaps: lambda m: (
        f"{_conv(m.pose)}\n&\n{_conv(m.activation)}\nSigmoid\nCapsules reshape"
    ),
    EMConvCaps: lambda m: (
        f"Conv EM Routing to {m.weight.shape[3]} {m.weight.shape[4]}x{m.weight.shape[5]}-dim. "
        f"capsules, {m.weight.shape[0]}x{m.weight.shape[0]} conv, stride={m.stride}"
    ),
    EMClassCaps: lambda m: (
        f"Linear EM Routing to {m.weight.shape[1]} {m.weight.shape[2]}x{m.weight.shape[3]}-dim. "
        "capsules, transforms shared by all positions"
    ),
}
_JOINS_THE_ROW_ABOVE = (nn.ReLU, nn.BatchNorm2d)
_FULLY_CONNECTED = (LinearCaps, DynamicLinearCaps, EMClassCaps)
_CAPSULES = (PrimaryCaps, EMPrimaryCaps, ConvCaps, DynamicConvCaps, EMConvCaps, *_FULLY_CONNECTED)
_VECTOR_POSES = (DynamicConvCaps, DynamicLinearCaps)


def layer_rows(model: ImageClassifier) -> list[Row]:
    """Rows in the order of the first forward pass, by running the model once on one image."""
    rows: list[Row] = []
    seen: set[nn.Module] = set()
    handles = [
        module.register_forward_hook(_recorder(text, rows, seen, _has_vector_poses(model)))
        for module, text in _described(model)
    ]
    device = next(model.parameters()).device
    try:
        with torch.no_grad(), evaluating(model):
            # for scores alone, the primary capsules may leave their norm to the layer above
            run = model.route if isinstance(model, InvertedCapsNet) else model
            run(torch.zeros(1, model.in_channels, *model.image_size, device=device))
    finally:
        for handle in handles:
            handle.remove()
    return rows


def _described(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Modules that make a row of their own; what is inside one belongs to its row."""
    for kind in type(module).__mro__:
        if kind in _DESCRIPTIONS:
            return [(module, _DESCRIPTIONS[kind](module))]
    return [row for child in module.children() for row in _described(child)]


def _has_vector_poses(model: nn.Module) -> bool:
    return any(
        isinstance(layer, _VECTOR_POSES) or getattr(layer, "pose", None) == "vector"
        for layer in model.modules()
    )


def _recorder(
    text: str, rows: list[Row], seen: set[nn.Module], vector: bool
) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if module in seen:  # a layer routes once an iteration and stands in the table once
            return
        seen.add(module)
        parameters = count_parameters(module)
        if isinstance(module, _JOINS_THE_ROW_ABOVE) and rows:
            rows[-1].operation += f"\n{text}"
            rows[-1].parameters += parameters
            return
        poses = inputs[0] if isinstance(inputs[0], Tensor) else inputs[0][0]
        if isinstance(module, _FULLY_CONNECTED) and poses.ndim == 5:
            rows.append(Row("Capsules flatten", _capsule_size(poses.flatten(1, -2), vector), 0))
        if isinstance(module, InvertedCaps):  # which `route` asks for coefficients, too
            output = output[0]
        capsules = isinstance(module, _CAPSULES)
        size = _capsule_size(output, vector) if capsules else _feature_size(output)
        rows.append(Row(text, size, parameters))

    return hook


def _capsule_size(output: Any, vector: bool) -> str:
    """Poses as the paper writes them, 7x7x32x4x4 for matrices, and activations under them."""
    if isinstance(output, tuple):
        poses, activations = output
        return f"{_capsule_size(poses, vector)}\n&\n{_joined(activations.shape[1:])}"
    *places, d = output.shape[1:]
    side = math.isqrt(d)
    return _joined([*places, d] if vector else [*places, side, side])


def _feature_size(output: Tensor) -> str:
    """Features are (C, H, W); the paper writes HxWxC."""
    shape = output.shape[1:]
    return _joined([*shape[1:], shape[0]])


def _joined(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))
