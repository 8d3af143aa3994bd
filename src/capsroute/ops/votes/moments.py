"""Moments of routed votes, and what EM routing and ablation C make of them.

What belongs to parents is laid out as the layer is: (B, H', W', out, d') or (B, H', W', out).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

VARIANCE_FLOOR = 5e-4
LEAST_MASS = 1e-20  # a parent with less than this keeps the mean it had; far above fp32 underflow


class Moments(NamedTuple):
    """Σ_i R_ij (v_ij − c_j)^n for n = 0, 1, 2 and some centre c."""

    mass: Tensor  # (B, H', W', out)
    first: Tensor  # (B, H', W', out, d')
    second: Tensor  # (B, H', W', out, d')


class Contest(NamedTuple):
    """How parents compete for a child: a softmax over them of what makes their shares.

    prior − Σ query (v − c)² if `gaussian`, else prior + Σ query v.
    """

    query: Tensor  # (B, H', W', out, d')
    prior: Tensor  # (B, H', W', out)
    gaussian: bool


class Parents(NamedTuple):
    """The layer above after one step; without H', W' where the layer is linear."""

    poses: Tensor  # (B, H', W', out, d') or (B, out, d')
    log_activations: Tensor  # (B, H', W', out) or (B, out)
    coefficients: Tensor | None  # r, if asked for: (B, H', W', k, k, in, out) or (B, I, out)


def at_least_float32(*tensors: Tensor) -> list[Tensor]:
    """All in one dtype: float64 if any is, else float32."""
    double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return [tensor.to(torch.float64 if double else torch.float32) for tensor in tensors]


def above_minus_infinity(log_activations: Tensor) -> Tensor:
    """Finite, so that a softmax is even where no capsule is active at all."""
    return log_activations.clamp_min(torch.finfo(log_activations.dtype).min)


def mean_and_variance(moments: Moments, centre: Tensor) -> tuple[Tensor, Tensor]:
    """μ and σ² from the moments about `centre`."""
    mass = moments.mass.clamp_min(LEAST_MASS).unsqueeze(-1)
    shift = moments.first / mass
    variance = moments.second / mass - shift.square()
    return centre + shift, variance.clamp_min(0.0) + VARIANCE_FLOOR


def log_activation(
    mass: Tensor,
    variance: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    *,
    children: int,
    inverse_temperature: float,
) -> Tensor:
    """log a_j from what parent j's votes cost to code, for `children` of each parent position.

    Mass is measured in fair shares, children / parents, so that one temperature suits all layers.
    """
    fair_share = children / mass.shape[-1]
    cost = (beta_u.unsqueeze(-1) + 0.5 * variance.log()).sum(-1) * (mass / fair_share)
    return F.logsigmoid(inverse_temperature * (beta_a - cost))


def check_log_activations(name: str, log_activations: Tensor, expected: tuple[int, ...]) -> None:
    """Raise unless there is one for each pose."""
    if log_activations.shape != expected:
        raise ValueError(
            f"`{name}` must have shape {tuple(expected)}, got {tuple(log_activations.shape)}"
        )


def check_betas(weight: Tensor, beta_u: Tensor, beta_a: Tensor) -> None:
    """Raise unless there is one β_u and one β_a for each parent type."""
    expected = (weight.shape[-3],)
    for name, beta in (("beta_u", beta_u), ("beta_a", beta_a)):
        if beta.shape != expected:
            raise ValueError(f"`{name}` must have shape {expected}, got {tuple(beta.shape)}")
