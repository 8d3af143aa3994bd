"""The routing of a batch, held fixed: which layers, which coefficients, and the way back up.

With its coefficients held (and the spread that a LayerNorm divides by, and the length that a
squash scales to), inverted and dynamic routing are linear maps from the features of the backbone
to the score of a class. A score is then a sum of what each vote gave to it. `Trace.rebuilt` is that
linear map run in plain PyTorch, so that its gradients are those parts.

Only coefficients that reach the scores are here (`Routing.used`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from capsroute.layers.activated import poses_of
from capsroute.layers.dynamic import DynamicConvCaps, DynamicLinearCaps
from capsroute.layers.em import EMClassCaps
from capsroute.layers.inverted import InvertedCaps
from capsroute.layers.primary import PrimaryCaps
from capsroute.models.base import CapsuleClassifier, ImageClassifier, Routing
from capsroute.models.dynamic import DynamicCapsNet
from capsroute.models.em import EMCapsNet
from capsroute.models.inverted import InvertedCapsNet
from capsroute.ops.inverted import reference

OURS = (InvertedCaps, DynamicConvCaps, DynamicLinearCaps)

Grid = tuple[int, int, int]
"""(rows, columns, capsules) of a layer; a linear layer is one position."""


@dataclass(frozen=True)
class Layer:
    """One routed layer in the iteration that counts."""

    children: Grid
    parents: Grid
    kernel: int
    """Side of the window that a parent sees; 0 for a parent that sees every child."""
    stride: int
    coefficients: Tensor
    """r: (B, H', W', k, k, in, out), or (B, in, out) where every parent sees every child."""
    shares: Tensor
    """What weighs the votes: r, times the child's activation where children have one (EM)."""
    weight: Tensor | None
    """The transforms; None for EM, whose scores are not linear in its votes."""
    finish: Callable[[Tensor], Tensor] | None
    """From the sum of weighed votes to the pose, linear; None for EM."""

    @property
    def linear(self) -> bool:
        return self.kernel == 0

    def votes(self, children: Tensor) -> Tensor:
        """(B, H', W', k, k, in, out, d) or (B, in, out, d)."""
        assert self.weight is not None  # asked of families that are linear
        if not self.linear:
            return reference.votes(children, self.weight, self.stride)
        flat = children.flatten(1, -2)[:, None, None]
        return reference.votes(flat, self.weight[None, None], 1)[:, 0, 0, 0, 0]

    def gather(self, votes: Tensor) -> Tensor:
        """Σ_i r_ij v_ij: (B, H', W', out, d) or (B, out, d)."""
        if self.linear:
            return torch.einsum("bij,bijd->bjd", self.shares, votes)
        return torch.einsum("bhwyxij,bhwyxijd->bhwjd", self.shares, votes)


@dataclass(frozen=True)
class Rebuilt:
    """The linear map from primary poses to scores, run once: every tensor carries gradients."""

    poses: list[Tensor]
    """Primary, then of each layer, after its LayerNorm or squash."""
    sums: list[Tensor]
    """Σ_i r_ij v_ij of each layer, before it."""
    scores: Tensor


@dataclass(frozen=True)
class Trace:
    """What the routing of a batch did, from the images up."""

    model: CapsuleClassifier
    images: Tensor
    """Normalised, (B, C, H, W), requiring gradients."""
    primary: Tensor
    """Poses of the primary capsules, (B, H, W, capsules, d), a function of `images`; norm held."""
    layers: list[Layer]
    routing: Routing

    @property
    def is_linear(self) -> bool:
        return self.layers[0].weight is not None

    @cached_property
    def rebuilt(self) -> Rebuilt:
        """Scores from the primary poses with the routing held; equal to the model's."""
        poses, sums = [self.primary], []
        with torch.enable_grad():
            for layer in self.layers:
                assert layer.finish is not None  # asked of families that are linear
                sums.append(layer.gather(layer.votes(poses[-1])))
                poses.append(layer.finish(sums[-1]))
            return Rebuilt(poses, sums, _scores(self.model, poses[-1]))


def trace(model: ImageClassifier, images: Tensor) -> Trace:
    """Run the model on images (B, C, H, W) and hold its routing, or a one-line TypeError."""
    check_explainable(model)
    if isinstance(model, EMCapsNet):
        return _trace_em(model, images)
    assert isinstance(model, InvertedCapsNet | DynamicCapsNet)
    with torch.no_grad():
        routing = model.route(images)
    pixels = model.prepare(images).detach().requires_grad_()
    with torch.enable_grad():
        primary = _held_primary(model.primary, model.backbone(pixels))
    modules = list(model.capsules.layers if isinstance(model, InvertedCapsNet) else model.capsules)
    layers: list[Layer] = []
    below, grid = primary.detach(), _grid(primary)
    for index, module in enumerate(modules):
        used = routing.used[index]
        poses, r = routing.poses[index][used], routing.coefficients[index][used]
        layer = _linear_layer(module, grid, poses, r)
        held = layer.gather(layer.votes(below))
        finish = _held_norm(module, held, poses)
        layers.append(replace(layer, finish=finish))
        below, grid = poses, layer.parents
    result = Trace(model, pixels, primary, layers, routing)
    for module in modules:
        if not isinstance(module, OURS):
            _check_rebuilt(result, module)
    return result


def _check_rebuilt(result: Trace, module: nn.Module) -> None:
    """A layer of one's own may do to its votes what is not known here."""
    if not torch.allclose(result.rebuilt.scores, result.routing.scores, rtol=1e-3, atol=1e-3):
        raise TypeError(
            f"`model` cannot be explained with a {type(module).__name__}: its poses must be the "
            "sum of its children's votes, each times its coefficient, then its `norm`"
        )


def why_unexplained(model: ImageClassifier | None) -> str | None:
    """Why there is nothing to show of a model, None if there is; no model: an exported file."""
    if model is None:
        return "an exported file has no routing to look at; the checkpoint that it came from has"
    if any(isinstance(m, InvertedCaps) and m.windows == "mixed" for m in model.modules()):
        return "its windows are mixed, so its capsules have no place in the image"
    if isinstance(model, InvertedCapsNet | DynamicCapsNet | EMCapsNet):
        return None
    if isinstance(model, CapsuleClassifier):
        return "how its scores follow from its votes is not known"
    return "it has no capsules"


def check_explainable(model: ImageClassifier) -> None:
    reason = why_unexplained(model)
    if reason is None:
        return
    instead = (
        "`model.route` shows its routing"
        if isinstance(model, CapsuleClassifier)
        else "choose an inverted, dynamic or EM model"
    )
    raise TypeError(
        f"`model` must be an inverted, dynamic or EM model to be explained, got {model.name}: "
        f"{reason}; {instead}"
    )


def _held_primary(module: nn.Module, features: Tensor) -> Tensor:
    """Primary poses as a linear function of the features, as in the layers above."""
    if not isinstance(module, PrimaryCaps):
        raise TypeError(
            f"`model` cannot be explained with a {type(module).__name__}: its primary capsules "
            "must be a PrimaryCaps"
        )
    channels = module.conv(features).permute(0, 2, 3, 1)
    sums = channels.unflatten(-1, (module.capsules, module.pose_dim))
    with torch.no_grad():
        hold = _held_norm(module, sums, poses_of(module(features)))
    return hold(sums)


def _linear_layer(module: nn.Module, children: Grid, poses: Tensor, r: Tensor) -> Layer:
    weight: Any = getattr(module, "weight", None)
    if weight is None or weight.ndim not in (4, 6):
        raise TypeError(
            f"`model` cannot be explained with a {type(module).__name__}: its transforms must be "
            "its `weight`, laid out as in LinearCaps or ConvCaps"
        )
    conv = weight.ndim == 6
    return Layer(
        children=children,
        parents=_grid(poses),
        kernel=weight.shape[0] if conv else 0,
        stride=int(getattr(module, "stride", 1)) if conv else 1,
        coefficients=r,
        shares=r,
        weight=weight.detach(),
        finish=None,
    )


def _held_norm(module: nn.Module, sums: Tensor, poses: Tensor) -> Callable[[Tensor], Tensor]:
    """What the layer does to a sum of votes, as a linear map that gives `poses` for `sums`."""
    norm: Any = getattr(module, "norm", None)
    if not isinstance(norm, nn.LayerNorm):  # squash, or ablation A: a change of length alone
        scale = _length(poses) / _length(sums)
        return lambda x: x * scale
    spread = (sums.var(dim=-1, correction=0, keepdim=True) + norm.eps).rsqrt()
    weight, bias = norm.weight.detach(), norm.bias.detach()

    def apply(x: Tensor) -> Tensor:
        return (x - x.mean(dim=-1, keepdim=True)) * spread * weight + bias

    # ablation C weighs a pose by its capsule's activation; elsewhere this is 1
    activation = _length(poses) / _length(apply(sums))
    return lambda x: apply(x) * activation


def _scores(model: CapsuleClassifier, poses: Tensor) -> Tensor:
    if isinstance(model, InvertedCapsNet):
        return model.classifier(poses)
    # the length of a class's pose, along the direction that it has
    direction = (poses / _length(poses)).detach()
    return (poses * direction).sum(dim=-1)


def _trace_em(model: EMCapsNet, images: Tensor) -> Trace:
    pixels = model.prepare(images).detach().requires_grad_()
    with torch.no_grad():
        routing = model.route(images)
        primary, log_activations = model.primary(model.backbone(pixels))
        layers: list[Layer] = []
        poses, grid = primary, _grid(primary)
        for index, module in enumerate(model.capsules):
            r = routing.coefficients[index][routing.used[index]]
            layers.append(_em_layer(module, grid, r, log_activations.exp()))
            poses, log_activations = module(poses, log_activations)
            grid = _grid(poses)
    return Trace(model, pixels, primary, layers, routing)


def _em_layer(module: Any, children: Grid, r: Tensor, activations: Tensor) -> Layer:
    everything = isinstance(module, EMClassCaps)
    kernel, out = (0 if everything else module.weight.shape[0]), r.shape[-1]
    if everything:
        parents, seen = (1, 1, out), activations.flatten(1)
    else:
        parents = (r.shape[1], r.shape[2], out)
        seen = reference.windows(activations[..., None], kernel, module.stride)[..., 0]
    return Layer(
        children=children,
        parents=parents,
        kernel=kernel,
        stride=module.stride,
        coefficients=r,
        shares=r * seen.unsqueeze(-1),
        weight=None,
        finish=None,
    )


def _grid(poses: Tensor) -> Grid:
    if poses.ndim == 3:
        return 1, 1, poses.shape[1]
    return poses.shape[1], poses.shape[2], poses.shape[3]


def _length(poses: Tensor) -> Tensor:
    return poses.norm(dim=-1, keepdim=True).clamp_min(1e-12)
