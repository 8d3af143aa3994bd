"""Ablation C: inverted routing between capsules that carry an activation beside their pose.

The paper describes it in one footnote ("the same kind of capsules activations as described in EM
Routing CapsNets"); `ops/inverted/activations.py` writes our reading of it down. An activation
weighs its capsule wherever the pose is used from above: in the votes, and in the classifier.
Concurrent routing has no clock for each layer, so λ is EM routing's limit, 0.01, in every step.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsroute.layers.inverted import ConvCaps, InvertedCaps, LinearCaps
from capsroute.layers.primary import PrimaryCaps
from capsroute.ops.inverted.activations import activated_routing_step

SHARPNESS = 0.01


class ActivatedCapsules(NamedTuple):
    """Poses (…, capsules, d) and the logarithms of the activations, (…, capsules)."""

    poses: Tensor
    log_activations: Tensor

    def scaled(self) -> Tensor:
        """Poses weighed by their activations, as the classifier reads them."""
        return self.poses * self.log_activations.exp().unsqueeze(-1)


class ActivatedPrimaryCaps(PrimaryCaps):
    """Primary capsules, and one more convolution with a sigmoid for their activations."""

    def __init__(
        self, in_channels: int, capsules: int, pose_dim: int, *, kernel_size: int, stride: int
    ) -> None:
        super().__init__(in_channels, capsules, pose_dim, kernel_size=kernel_size, stride=stride)
        self.activation = nn.Conv2d(in_channels, capsules, kernel_size, stride)

    def forward(self, features: Tensor) -> ActivatedCapsules:  # type: ignore[override]  # a pair
        logits = self.activation(features).permute(0, 2, 3, 1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return ActivatedCapsules(super().forward(features), F.logsigmoid(wide))


class _Activated(InvertedCaps):
    """One step of `activated_routing_step` with its β_u and β_a for each capsule type."""

    def add_betas(self) -> None:
        self.beta_u = nn.Parameter(torch.zeros(self.out_capsules))
        self.beta_a = nn.Parameter(torch.zeros(self.out_capsules))

    def step(
        self,
        children: ActivatedCapsules,
        parents: ActivatedCapsules | None,
        stride: int,
        return_coefficients: bool,
    ) -> ActivatedCapsules | tuple[ActivatedCapsules, Tensor]:
        result = activated_routing_step(
            children.poses,
            children.log_activations,
            self.weight,
            None if parents is None else parents.poses,
            None if parents is None else parents.log_activations,
            self.beta_u,
            self.beta_a,
            stride=stride,
            scale=self.scale,
            sharpness=SHARPNESS,
            return_coefficients=return_coefficients,
        )
        capsules = ActivatedCapsules(self.norm(result.poses), result.log_activations)
        if not return_coefficients:
            return capsules
        assert result.coefficients is not None  # asked for
        return capsules, result.coefficients


class ActivatedConvCaps(ConvCaps, _Activated):
    """`ConvCaps` of capsules with activations."""

    def __init__(
        self,
        in_capsules: int,
        out_capsules: int,
        pose_dim: int,
        *,
        kernel_size: int,
        stride: int,
        pose: str,
        layer_norm: bool,
        scale: float | None,
    ) -> None:
        super().__init__(
            in_capsules,
            out_capsules,
            pose_dim,
            kernel_size=kernel_size,
            stride=stride,
            pose=pose,
            layer_norm=layer_norm,
            scale=scale,
        )
        self.add_betas()

    def forward(  # type: ignore[override]  # capsules, not bare poses
        self,
        children: ActivatedCapsules,
        parents: ActivatedCapsules | None = None,
        *,
        return_coefficients: bool = False,
    ) -> ActivatedCapsules | tuple[ActivatedCapsules, Tensor]:
        return self.step(children, parents, self.stride, return_coefficients)


class ActivatedLinearCaps(LinearCaps, _Activated):
    """`LinearCaps` of capsules with activations."""

    def __init__(
        self,
        in_capsules: int,
        out_capsules: int,
        pose_dim: int,
        *,
        pose: str,
        layer_norm: bool,
        scale: float | None,
    ) -> None:
        super().__init__(
            in_capsules, out_capsules, pose_dim, pose=pose, layer_norm=layer_norm, scale=scale
        )
        self.add_betas()

    def forward(  # type: ignore[override]  # capsules, not bare poses
        self,
        children: ActivatedCapsules,
        parents: ActivatedCapsules | None = None,
        *,
        return_coefficients: bool = False,
    ) -> ActivatedCapsules | tuple[ActivatedCapsules, Tensor]:
        flat = ActivatedCapsules(children.poses.flatten(1, -2), children.log_activations.flatten(1))
        return self.step(flat, parents, 1, return_coefficients)
