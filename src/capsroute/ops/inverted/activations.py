"""Ablation C of the paper: inverted dot-product routing with capsule activations as in EM routing.

The paper says only "the same kind of capsules activations as described in EM Routing CapsNets".
Our reading: every capsule carries an activation a in (0, 1) beside its pose, and one step is

    votes           v_ij  = p_i · W_ij
    coefficients    r_ij  = softmax_j( scale · ⟨q_j, v_ij⟩ + log a_j )     1/M without parents q
    weights         R_ij  = a_i · r_ij                                     EM's M-step
    pose            o_j   = Σ_i R_ij v_ij                                  before LayerNorm
    statistics      μ_j   = o_j / Σ_i R_ij
                    σ²_jh = Σ_i R_ij (v_ijh − μ_jh)² / Σ_i R_ij + 5e-4
    activation      a_j   = sigmoid( λ · (β_a − Σ_h (β_u + ½ log σ²_jh) · Σ_i R_ij) )

so agreement stays the inverted routing's, an inactive child has no say, an active parent is chosen
before an inactive one, and a parent is active when the votes it was given agree. As in EM routing
here, activations travel as logarithms; unlike there, the mass Σ_i R_ij is Hinton's, as it stands.

The work is done tile by tile and recomputed in the backward pass, by `ops/vote_tiles.py`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from capsroute.ops.precision import own_precision
from capsroute.ops.vote_tiles import (
    Children,
    Moments,
    accumulate,
    at_least_float32,
    by_capsule,
    by_window,
    check_betas,
    check_children,
    evenly_routed_mean,
    gather_children,
    log_activation,
    mean_and_variance,
    output_size,
    split_tiles,
    sum_pose,
    uniform_coefficients,
    votes,
    weighted_moments,
)


class ActivatedStep(NamedTuple):
    """The parents after one step."""

    poses: Tensor  # o, before LayerNorm: (B, H', W', out, d') or (B, out, d')
    log_activations: Tensor  # (B, H', W', out) or (B, out)
    coefficients: Tensor | None  # r: (B, H', W', k, k, in, out) or (B, in, out), if asked for


def activated_routing_step(
    children: Tensor,
    child_log_activations: Tensor,
    weight: Tensor,
    parents: Tensor | None,
    parent_log_activations: Tensor | None,
    beta_u: Tensor,
    beta_a: Tensor,
    *,
    stride: int = 1,
    scale: float | None = None,
    sharpness: float,
    return_coefficients: bool = False,
) -> ActivatedStep:
    """One step of ablation C; see the module for the procedure.

    In a convolutional layer the parents compete for a child window by window: among the capsules
    at one output position.

    Args:
        children: poses (B, H, W, in, d), or (B, in, d) for a linear layer.
        child_log_activations: (B, H, W, in) or (B, in), at most 0.
        weight: (k, k, in, out, a, b) or (in, out, a, b). With a = d the pose is a vector and the
            vote has b elements; with a = b = √d the pose is a matrix.
        parents: q, their poses from the step before (after LayerNorm); `None` in the first step.
        parent_log_activations: from the step before; `None` together with `parents`.
        beta_u, beta_a: (out,) each.
        stride: of the convolution; there is no padding.
        scale: of the agreement; 1/√d' unless given.
        sharpness: EM's λ, an inverse temperature.
        return_coefficients: also return r.

    Returns:
        Poses, log-activations and coefficients, in float32 under autocast too (float64 when the
        inputs are).
    """
    if (parents is None) != (parent_log_activations is None):
        raise ValueError("`parents` and `parent_log_activations` must be given together, got one")
    linear = children.ndim == 3
    named = {"children": children, "child_log_activations": child_log_activations}
    _check(named, weight, beta_u, beta_a, stride, linear)
    if linear:  # a convolution whose image is one pixel
        weight = weight[None, None]
        children = children[:, None, None]
        child_log_activations = child_log_activations[:, None, None]
    kernel = (weight.shape[0], weight.shape[1])
    size = output_size(children, kernel, stride)
    window = (*kernel, children.shape[3])
    out, d = weight.shape[3], children.shape[-1] // weight.shape[-2] * weight.shape[-1]
    with own_precision(children):
        children, child_log_activations, weight, beta_u, beta_a = at_least_float32(
            children, child_log_activations, weight, beta_u, beta_a
        )
        seen = gather_children(children, child_log_activations, weight, stride)
        centre = evenly_routed_mean(seen, out)
        q, log_a = _by_position(parents, parent_log_activations, centre, linear, size)
        step = _tile_step(centre, q, log_a, 1.0 / math.sqrt(d) if scale is None else scale)
        moments, r = accumulate(step, split_tiles(seen), return_coefficients)
        poses = moments.first + moments.mass[:, None, None] * centre
        _, variance = mean_and_variance(moments, centre)
        log_activations = log_activation(moments.mass, variance, beta_u, beta_a, sharpness)
    result = ActivatedStep(
        by_capsule(poses, size),
        log_activations.t().unflatten(0, size),
        None if r is None else by_window(r, size, window),
    )
    return _without_position(result) if linear else result


def _tile_step(
    centre: Tensor, parents: Tensor | None, log_a: Tensor | None, scale: float
) -> Callable[[Children], tuple[Moments, Tensor]]:
    """Coefficients of a tile's children, and the moments of their votes about the centre."""

    def step(tile: Children) -> tuple[Moments, Tensor]:
        v = votes(tile, centre)
        if parents is None or log_a is None:
            r = uniform_coefficients(tile, centre)
        else:
            r = (scale * sum_pose(v * parents) + log_a).softmax(dim=1)
        return weighted_moments(r, tile.log_activations, v - centre), r

    return step


def _by_position(
    parents: Tensor | None,
    log_a: Tensor | None,
    centre: Tensor,
    linear: bool,
    size: tuple[int, int, int],
) -> tuple[Tensor | None, Tensor | None]:
    """Parents as (out, b, R, N) and their log-activations as (out, N), like the votes."""
    if parents is None or log_a is None:
        return None, None
    out, b, rows, _ = centre.shape
    expected = (size[0], out, rows * b) if linear else (*size, out, rows * b)
    if parents.shape != expected:
        raise ValueError(f"`parents` must have shape {expected}, got {tuple(parents.shape)}")
    if log_a.shape != expected[:-1]:
        raise ValueError(
            f"`parent_log_activations` must have shape {expected[:-1]}, got {tuple(log_a.shape)}"
        )
    q = parents.to(centre.dtype).reshape(-1, out, rows, b).permute(1, 3, 2, 0)
    return q, log_a.to(centre.dtype).reshape(-1, out).t()


def _without_position(step: ActivatedStep) -> ActivatedStep:
    r = step.coefficients
    return ActivatedStep(
        step.poses[:, 0, 0],
        step.log_activations[:, 0, 0],
        None if r is None else r[:, 0, 0, 0, 0],
    )


def _check(
    named: dict[str, Tensor],
    weight: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    stride: int,
    linear: bool,
) -> None:
    if weight.ndim != (4 if linear else 6):
        expected = "(in, out, a, b)" if linear else "(k, k, in, out, a, b)"
        raise ValueError(
            f"`weight` must have shape {expected} for these children, got {tuple(weight.shape)}"
        )
    check_children(named, weight, stride, linear=linear)
    if linear and stride != 1:
        raise ValueError(f"`stride` must be 1 for a linear layer, got {stride}")
    d, (a, b) = named["children"].shape[-1], weight.shape[-2:]
    if not (a == d or (a == b and a * b == d)):
        raise ValueError(
            "the last two sizes of `weight` must be (d, d') for vector poses or (√d, √d) for "
            f"matrix poses with d = {d}, got {(a, b)}"
        )
    check_betas(weight, beta_u, beta_a)
