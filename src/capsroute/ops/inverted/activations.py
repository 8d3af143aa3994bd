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

Votes are formed and summed up, and formed again in the backward pass, by `ops/votes`.
"""

import math

from torch import Tensor

from capsroute.ops.inverted.api import check_shapes
from capsroute.ops.precision import own_precision
from capsroute.ops.votes import votes_of
from capsroute.ops.votes.moments import (
    Contest,
    Parents,
    above_minus_infinity,
    at_least_float32,
    check_betas,
    check_log_activations,
    log_activation,
    mean_and_variance,
)


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
    impl: str = "auto",
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
        impl: as in `routing_step`: `reference` holds every vote, `tiled` a tile of them, the
            kernels of `triton` none; `auto` chooses.
        return_coefficients: also return r, which `triton` does not keep.

    Returns:
        Poses before LayerNorm, log-activations and coefficients, in float32 under autocast too
        (float64 when the inputs are). Under autocast children and transforms are rounded to its
        dtype, as for any product, and nothing else is.
    """
    _check(children, child_log_activations, weight, parents, parent_log_activations, stride)
    check_betas(weight, beta_u, beta_a)
    children, child_log_activations, weight, beta_u, beta_a = at_least_float32(
        children, child_log_activations, weight, beta_u, beta_a
    )
    votes = votes_of(
        children,
        child_log_activations,
        weight,
        stride=stride,
        impl=impl,
        keep=return_coefficients,
    )
    centre = votes.mean()  # out here, or PyTorch cannot read the exported graph
    with own_precision(children):
        contest = None
        if parents is not None and parent_log_activations is not None:
            contest = _agreement(parents, parent_log_activations, centre, scale)
        moments, r = votes.moments(centre, contest, keep=return_coefficients)
        _, variance = mean_and_variance(moments, centre)
        log_activations = log_activation(
            moments.mass,
            variance,
            beta_u,
            beta_a,
            children=votes.children,
            inverse_temperature=inverse_temperature,
        )
        poses = moments.first + moments.mass.unsqueeze(-1) * centre
        return votes.parents(poses, log_activations, r)


def _agreement(
    parents: Tensor, log_activations: Tensor, centre: Tensor, scale: float | None
) -> Contest:
    """Parents of the step before, laid out as the centre of the votes."""
    query = parents.to(centre.dtype).reshape(centre.shape)
    query = query * (1.0 / math.sqrt(centre.shape[-1]) if scale is None else scale)
    prior = above_minus_infinity(log_activations.to(centre.dtype)).reshape(centre.shape[:-1])
    return Contest(query, prior, gaussian=False)


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
        check_log_activations(name, log_activations, poses.shape[:-1])
