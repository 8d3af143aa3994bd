"""Ablation C of the paper: inverted dot-product routing with capsule activations as in EM routing.

The paper says only "the same kind of capsules activations as described in EM Routing CapsNets".
Our reading: every capsule carries an activation a in (0, 1) beside its pose, and one step is

    votes           v_ij  = p_i · W_ij
    coefficients    r_ij  = softmax_j( scale · ⟨q_j, v_ij⟩ + log a_j )     1/M without parents q
    weights         R_ij  = a_i · r_ij                                     EM's M-step
    pose            o_j   = Σ_i R_ij v_ij                                  before LayerNorm
    statistics      μ_j   = o_j / Σ_i R_ij
                    σ²_jh = Σ_i R_ij (v_ijh − μ_jh)² / Σ_i R_ij + 5e-4
    mass            m_j   = Σ_i R_ij / (children / parents)
    activation      a_j   = sigmoid( 1/T · (β_a − Σ_h (β_u + ½ log σ²_jh) · m_j) )

so agreement stays the inverted routing's, an inactive child has no say, an active parent is chosen
before an inactive one, and a parent is active when the votes it was given agree. Activation, mass
and inverse temperature 1/T (100 λ) are those of `ops/em.py`, by the same function: Hinton's
Σ_i R_ij as it stands is 40 in the class layer of CIFAR-10, whose activations it pins to 1, where
nothing can learn. As there, activations travel as logarithms.

The work is done tile by tile and recomputed in the backward pass, by `ops/vote_tiles.py`.
"""

import math
from collections.abc import Callable

from torch import Tensor

from capsroute.ops import vote_tiles
from capsroute.ops.inverted.api import check_shapes
from capsroute.ops.precision import own_precision
from capsroute.ops.vote_tiles import Children, Parents, sum_pose


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
    inverse_temperature: float,
    return_coefficients: bool = False,
) -> Parents:
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
        inverse_temperature: of the activations, 1/T above.
        return_coefficients: also return r.

    Returns:
        Poses before LayerNorm, log-activations and coefficients, in float32 under autocast too
        (float64 when the inputs are).
    """
    _check(children, child_log_activations, weight, parents, parent_log_activations, stride)
    vote_tiles.check_betas(weight, beta_u, beta_a)
    with own_precision(children):
        children, child_log_activations, weight, beta_u, beta_a = vote_tiles.at_least_float32(
            children, child_log_activations, weight, beta_u, beta_a
        )
        seen, layout = vote_tiles.arrange(children, child_log_activations, weight, stride)
        centre = vote_tiles.evenly_routed_mean(seen, len(beta_u))
        agreement = None
        if parents is not None and parent_log_activations is not None:
            agreement = _agreement(parents, parent_log_activations, centre, scale)
        routed = _route(
            seen, centre, agreement, beta_u, beta_a, inverse_temperature, return_coefficients
        )
        return layout.parents(*routed)


def _route(
    children: Children,
    centre: Tensor,
    agreement: Callable[[Tensor], Tensor] | None,
    beta_u: Tensor,
    beta_a: Tensor,
    inverse_temperature: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(o, log a, r), laid out as the votes are."""
    tiles = vote_tiles.split_tiles(children)
    moments, r = vote_tiles.routed_moments(tiles, centre, agreement, keep=keep)
    _, variance = vote_tiles.mean_and_variance(moments, centre)
    log_activations = vote_tiles.log_activation(
        moments.mass,
        variance,
        beta_u,
        beta_a,
        children=len(children.poses),
        inverse_temperature=inverse_temperature,
    )
    return moments.first + moments.mass[:, None, None] * centre, log_activations, r


def _agreement(
    parents: Tensor, log_activations: Tensor, centre: Tensor, scale: float | None
) -> Callable[[Tensor], Tensor]:
    """Logits from deviations v − c: ⟨q, v⟩ is ⟨q, c⟩ + ⟨q, v − c⟩."""
    out, b, rows, _ = centre.shape
    q = parents.to(centre.dtype).reshape(-1, out, rows, b).permute(1, 3, 2, 0)
    q = q * (1.0 / math.sqrt(rows * b) if scale is None else scale)
    log_a = vote_tiles.above_minus_infinity(log_activations.to(centre.dtype))
    log_prior = log_a.reshape(-1, out).t() + sum_pose(q * centre)
    return lambda deviation: log_prior + sum_pose(q * deviation)


def _check(
    children: Tensor,
    child_log_activations: Tensor,
    weight: Tensor,
    parents: Tensor | None,
    parent_log_activations: Tensor | None,
    stride: int,
) -> None:
    if (parents is None) != (parent_log_activations is None):
        raise ValueError("`parents` and `parent_log_activations` must be given together, got one")
    above = None if parents is None else parents.shape
    check_shapes(children.shape, weight.shape, above, stride)
    named = {"child_log_activations": (child_log_activations, children)}
    if parents is not None and parent_log_activations is not None:
        named["parent_log_activations"] = (parent_log_activations, parents)
    for name, (log_activations, poses) in named.items():
        vote_tiles.check_log_activations(name, log_activations, poses.shape[:-1])
