"""Dynamic routing (Sabour et al., 2017): routing by agreement between squashed vectors.

The logit of a child-parent pair starts at zero and grows by ⟨v_j, û_ij⟩ in every iteration, so in
iteration t it is ⟨Σ_{τ<t} v_j^τ, û_ij⟩. That makes each iteration one step of the inverted routing
with unit scale, whose "parents" are the sum of all outputs so far: the same convolution for the
first iteration, the same kernels for the rest, and the votes û never exist here either.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from capsroute.ops.inverted import routing_step
from capsroute.ops.precision import widened

EPS = 1e-8  # under roots, where it keeps the gradient of a zero pose finite
Observer = Callable[[Tensor, Tensor], None]


def squash(poses: Tensor) -> Tensor:
    """Scale each pose to length |s|²/(1+|s|²)."""
    wide = widened(poses)
    square = wide.square().sum(dim=-1, keepdim=True)
    return (wide * (square / (1.0 + square)) * torch.rsqrt(square + EPS)).to(poses.dtype)


def length(poses: Tensor) -> Tensor:
    """|v| of each pose, the capsule's probability."""
    return (widened(poses).square().sum(dim=-1) + EPS).sqrt()


def dynamic_routing(
    children: Tensor,
    weight: Tensor,
    iterations: int,
    *,
    stride: int = 1,
    impl: str = "auto",
    observe: Observer | None = None,
) -> Tensor:
    """Dynamic routing: the parents' squashed poses after `iterations` rounds.

    Shapes are those of `routing_step`: convolutional (B, H, W, in, d) or linear (B, in, d). The
    parents at one output position compete for each child they see. Gradients flow through every
    round. `observe(poses, coefficients)` is called in each.
    """
    if iterations < 1:
        raise ValueError(f"`iterations` must be at least 1, got {iterations}")
    options: dict[str, Any] = {"stride": stride, "scale": 1.0, "impl": impl}
    total: Tensor | None = None
    for _ in range(iterations):
        if observe is None:
            poses = squash(routing_step(children, weight, total, **options))
        else:
            sums, coefficients = routing_step(
                children, weight, total, return_coefficients=True, **options
            )
            poses = squash(sums)
            observe(poses, coefficients)
        wide = widened(poses)
        total = wide if total is None else total + wide
    return poses
