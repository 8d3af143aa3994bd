"""Ablation C: inverted routing between capsules that carry an activation beside their pose.

The paper describes it in one footnote ("the same kind of capsules activations as described in EM
Routing CapsNets"); `ops/inverted/activations.py` writes our reading of the step down. An activation
weighs its capsule wherever the pose is read from above: in the votes, and in the classifier, whose
score of a class is w · (a q) + b. A score so depends on both, and an inactive class scores b.

Two numbers were ours to choose, so that activations start near ½ in every layer and stay where
they can learn:

* *Temperature.* Concurrent routing has no clock for each layer, so every step has the inverse
  temperature of EM routing's second iteration, the last of its usual two: 100 λ = 0.0975.
* *Initial β_u.* A vote of normalised poses starts with the variance out / children in each of its
  elements: 1/80 for the classes of CIFAR-10, 5 for those of CIFAR-100. With β_u = 0 the sum over
  the 16 or 36 elements would decide alone where a layer's activations start. ½ log(children / out)
  is the price at which such votes cost nothing. (Without LayerNorm, A and C at once, they cost
  less, and activations start higher.) β_a starts at 0.

`tests/models/test_ablations.py` holds layers to that: undecided at the start for 1 to 5 iterations,
with gradients for both β, and short of saturation where weight decay has shrunk transforms to a
twentieth and gains to a quarter, as in a full run without activations (docs/routing.md). EM's
limit, 100 λ = 1, fails the last. Whether C so reaches the paper's accuracies is not known yet.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsroute.layers.inverted import ConvCaps, InvertedCaps, LinearCaps
from capsroute.layers.primary import PrimaryCaps
from capsroute.ops.em import inverse_temperature
from capsroute.ops.inverted.activations import activated_routing_step
from capsroute.ops.precision import widened

INVERSE_TEMPERATURE = inverse_temperature(1)


class ActivatedCapsules(NamedTuple):
    """Poses (…, capsules, d) and the logarithms of the activations, (…, capsules)."""

    poses: Tensor
    log_activations: Tensor

    def scaled(self) -> Tensor:
        """Poses weighed by their activations, as the classifier reads them."""
        return self.poses * self.log_activations.exp().unsqueeze(-1)


def poses_of(capsules: Tensor | ActivatedCapsules) -> Tensor:
    """As they are read from above, whether they carry an activation or not."""
    return capsules if isinstance(capsules, Tensor) else capsules.scaled()


class ActivatedPrimaryCaps(PrimaryCaps):
    """Primary capsules, and one more convolution with a sigmoid for their activations."""

    def __init__(
        self, in_channels: int, capsules: int, pose_dim: int, *, kernel_size: int, stride: int
    ) -> None:
        super().__init__(in_channels, capsules, pose_dim, kernel_size=kernel_size, stride=stride)
        self.activation = nn.Conv2d(in_channels, capsules, kernel_size, stride)

    def forward(self, features: Tensor) -> ActivatedCapsules:  # type: ignore[override]  # a pair
        logits = self.activation(features).permute(0, 2, 3, 1)
        return ActivatedCapsules(super().forward(features), F.logsigmoid(widened(logits)))


class _Activated(InvertedCaps):
    """Makes a step of the layer it is mixed into one of `activated_routing_step`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.initial_poses != "zeros":
            raise ValueError(
                f"`initial_poses` must be 'zeros' with `activations`, got {self.initial_poses!r}"
            )
        if self.windows != "sliding":
            raise ValueError(
                f"`windows` must be 'sliding' with `activations`, got {self.windows!r}"
            )
        *window, n_in, n_out = self.weight.shape[:-2]
        fair_share = math.prod(window) * n_in / n_out
        self.beta_u = nn.Parameter(torch.full((n_out,), 0.5 * math.log(fair_share)))
        self.beta_a = nn.Parameter(torch.zeros(n_out))

    def forward(  # type: ignore[override]  # capsules, not bare poses
        self,
        children: ActivatedCapsules,
        parents: ActivatedCapsules | None = None,
        *,
        return_coefficients: bool = False,
    ) -> ActivatedCapsules | tuple[ActivatedCapsules, Tensor]:
        poses, _ = self.arrange(children.poses)
        keeps = self.impl != "triton"  # which keeps no coefficients
        result = activated_routing_step(
            poses,
            children.log_activations.reshape(poses.shape[:-1]),
            self.weight,
            None if parents is None else parents.poses,
            None if parents is None else parents.log_activations,
            self.beta_u,
            self.beta_a,
            stride=self.stride,
            scale=self.scale,
            inverse_temperature=INVERSE_TEMPERATURE,
            impl=self.impl if keeps or not return_coefficients else "auto",
            return_coefficients=return_coefficients,
        )
        capsules = ActivatedCapsules(self.norm(result.poses), result.log_activations)
        if not return_coefficients:
            return capsules
        assert result.coefficients is not None  # asked for
        return capsules, result.coefficients


class ActivatedConvCaps(_Activated, ConvCaps):
    """`ConvCaps` of capsules with activations."""


class ActivatedLinearCaps(_Activated, LinearCaps):
    """`LinearCaps` of capsules with activations."""
