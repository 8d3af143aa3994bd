"""EM routing (Hinton, Sabour & Frosst 2018, "Matrix capsules with EM routing"), in log space.

A parent j is a Gaussian over the votes v_ij = p_i · W_ij of its children, diagonal, with mean μ_j
(its pose), variance σ²_j and activation a_j. One iteration is an E-step and an M-step:

    E   r_ij = softmax_j( log a_j − ½ Σ_h [ (v_ijh − μ_jh)² / σ²_jh + log σ²_jh ] )
        (1/M for each of the M parents in the first iteration)
    M   R_ij  = a_i · r_ij
        μ_jh  = Σ_i R_ij v_ijh / Σ_i R_ij
        σ²_jh = Σ_i R_ij (v_ijh − μ_jh)² / Σ_i R_ij + 5e-4
        a_j   = sigmoid( 100 λ · (β_a − Σ_h (β_u + ½ log σ²_jh) · m_j) )
        λ = 0.01 · (1 − 0.95^(t+1)) in iteration t = 0, 1, …

*Which parents compete for a child.* The softmax runs over the M capsule types of one output
position: window by window. A child seen from several positions is shared out anew in each; in the
class layer there is one position, and all classes compete for every child.

*The mass m_j.* Hinton writes sigmoid(λ · (β_a − Σ_h (…) · Σ_i R_ij)). That sum grows with the
children of a parent: with half-active children it is 4.5 in a 3×3 layer of 32 capsules, 40 in the
class layer of CIFAR-10 and 4 in that of CIFAR-100, so that with one λ for all layers some saturate
while others hardly move. Like IBM/matrix-capsules-with-em-routing (Gritzman 2019) we measure mass
in units that do not depend on the layer, m_j = Σ_i R_ij / (children / parents), and sharpen by its
factor of 100. Here the factor multiplies β_a too, which is a change of units only: λ starts at
5e-4, and β_a would otherwise have to reach the thousands before a parent that wins no child could
be clearly less than half active.

*Memory.* Votes are M times as large as the unfolded poses and are never all held at once. An
iteration is one pass over the children, which forms their votes, does the E-step and adds to the
moments Σ R, Σ R (v − c) and Σ R (v − c)², taken about c lest the variance cancel: the mean of the
iteration before, or of evenly shared votes in the first. Backward forms the votes again
(`ops/votes`). Nothing here waits for the device.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from capsroute.ops.precision import own_precision
from capsroute.ops.votes import Votes, votes_of
from capsroute.ops.votes.moments import (
    Contest,
    Parents,
    at_least_float32,
    check_betas,
    check_log_activations,
    log_activation,
    mean_and_variance,
)


def em_routing(
    poses: Tensor,
    log_activations: Tensor,
    weight: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    *,
    iterations: int,
    stride: int = 1,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Route capsules to the layer above by EM; the module's docstring has the procedure.

    Activations are passed as logarithms, so that no layer takes the logarithm of a sigmoid that
    underflowed; `log_activations.exp()` gives the activations.

    Args:
        poses: the children's poses, (B, H, W, in, d) with d = n².
        log_activations: the children's log-activations, (B, H, W, in), at most 0.
        weight: transforms, (k, k, in, out, n, n) for a convolutional layer without padding or
            (in, out, n, n) for the class layer. There, every capsule at every position is a child
            of every class, transforms are shared by all positions, and votes carry their
            coordinates ("coordinate addition": row and column, scaled to (0, 1), are added to the
            first two elements of the vote's last column).
        beta_u: price of coding one element of a pose, (out,).
        beta_a: price of not being active, (out,).
        iterations: number of E- and M-steps, at least 1. The first E-step is uniform.
        stride: stride of the convolution.
        impl: as in `routing_step`: `reference` holds every vote, `tiled` a tile of them, the
            kernels of `triton` none; `auto` chooses.

    Returns:
        The parents' poses, (B, H', W', out, d) or (B, out, d), and the logarithms of their
        activations, (B, H', W', out) or (B, out). Both are float32, even under autocast
        (float64 if the inputs are). Under autocast poses and transforms are rounded to its
        dtype, as for any product, and nothing else is.
    """
    operands = poses, log_activations, weight, beta_u, beta_a
    last = _route(*operands, iterations, stride, impl, keep=False)[-1]
    return last.poses, last.log_activations


def em_routing_history(
    poses: Tensor,
    log_activations: Tensor,
    weight: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    *,
    iterations: int,
    stride: int = 1,
) -> list[Parents]:
    """`em_routing`, but every iteration is returned, with the coefficients r of its E-step.

    The class layer's children are ordered as (row, column, capsule).
    """
    operands = poses, log_activations, weight, beta_u, beta_a
    return _route(*operands, iterations, stride, "auto", keep=True)


def _route(
    poses: Tensor,
    log_activations: Tensor,
    weight: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    iterations: int,
    stride: int,
    impl: str,
    *,
    keep: bool,
) -> list[Parents]:
    """Of every iteration, with coefficients; of the last alone, and without, unless `keep`."""
    _check(poses, log_activations, weight, beta_u, beta_a, iterations, stride)
    poses, log_activations, weight, beta_u, beta_a = at_least_float32(
        poses, log_activations, weight, beta_u, beta_a
    )
    if weight.ndim == 4:
        poses, weight = with_coordinates(poses, weight)
    votes = votes_of(poses, log_activations, weight, stride=stride, impl=impl, keep=keep)
    mean = votes.mean()  # out here, or PyTorch cannot read the exported graph
    with own_precision(poses):
        states = _expectation_maximisation(votes, mean, beta_u, beta_a, iterations, keep)
        return [votes.parents(*state) for state in states]


def inverse_temperature(iteration: int) -> float:
    """100 λ of an iteration counted from 0: activations are decided ever more sharply."""
    return 100.0 * (0.01 * (1.0 - 0.95 ** (iteration + 1)))


def _expectation_maximisation(
    votes: Votes, mean: Tensor, beta_u: Tensor, beta_a: Tensor, iterations: int, keep: bool
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """(μ, log a, r) of every iteration; only the last unless `keep`."""
    contest: Contest | None = None  # the first E-step is uniform
    states: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for iteration in range(iterations):
        moments, r = votes.moments(mean, contest, keep=keep)
        mean, variance = mean_and_variance(moments, centre=mean)
        log_a = log_activation(
            moments.mass,
            variance,
            beta_u,
            beta_a,
            children=votes.children,
            inverse_temperature=inverse_temperature(iteration),
        )
        # ½ log 2π is the same for all parents and leaves the softmax unchanged
        log_prior = log_a - 0.5 * variance.log().sum(-1)
        contest = Contest(0.5 / variance, log_prior, gaussian=True)
        states.append((mean, log_a, r))
    return states if keep else states[-1:]


def with_coordinates(poses: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinate addition as one more column of the poses, which transforms add to the last.

    (B, H, W, in, n·n) and (in, out, n, n) as (B, H, W, in, n·(n + 1)) and (in, out, n + 1, n).
    """
    batch, height, width, capsules, d = poses.shape
    n = math.isqrt(d)
    row = (torch.arange(height, device=poses.device, dtype=poses.dtype) + 0.5) / height
    column = (torch.arange(width, device=poses.device, dtype=poses.dtype) + 0.5) / width
    place = torch.stack(torch.meshgrid(row, column, indexing="ij"), dim=-1)  # (H, W, 2)
    place = F.pad(place, (0, n - 2))[None, :, :, None, :, None]
    place = place.expand(batch, height, width, capsules, n, 1)
    last = F.pad(weight.new_ones(1), (n - 1, 0)).expand(*weight.shape[:2], 1, n)
    poses = torch.cat([poses.unflatten(-1, (n, n)), place], dim=-1)
    return poses.flatten(-2), torch.cat([weight, last], dim=-2)


def _check(
    poses: Tensor,
    log_activations: Tensor,
    weight: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    iterations: int,
    stride: int,
) -> None:
    if iterations < 1:
        raise ValueError(f"`iterations` must be at least 1, got {iterations}")
    if weight.ndim not in (4, 6):
        raise ValueError(
            "`weight` must have shape (k, k, in, out, n, n) or (in, out, n, n), "
            f"got {tuple(weight.shape)}"
        )
    n = weight.shape[-1]
    if weight.shape[-2] != n:
        raise ValueError(f"`weight` must end in square transforms, got {tuple(weight.shape)}")
    if weight.ndim == 4 and n < 2:
        raise ValueError(f"`weight` must be at least 2×2 to add coordinates, got {n}×{n}")
    _check_children(poses, log_activations, weight)
    if stride < 1:
        raise ValueError(f"`stride` must be at least 1, got {stride}")
    if weight.ndim == 4 and stride != 1:
        raise ValueError(f"`stride` must be 1 for the class layer, got {stride}")
    check_betas(weight, beta_u, beta_a)


def _check_children(poses: Tensor, log_activations: Tensor, weight: Tensor) -> None:
    capsules, n = weight.shape[-4], weight.shape[-1]
    if poses.ndim != 5 or poses.shape[-2] != capsules:
        raise ValueError(
            f"`poses` must have shape (B, H, W, {capsules}, d) to fit `weight`, "
            f"got {tuple(poses.shape)}"
        )
    if poses.shape[-1] != n * n:
        raise ValueError(
            f"`poses` must have {n * n} elements to fit `weight`, got {poses.shape[-1]}"
        )
    check_log_activations("log_activations", log_activations, poses.shape[:-1])
    if weight.ndim == 6 and (
        weight.shape[0] != weight.shape[1] or weight.shape[0] > min(poses.shape[1:3])
    ):
        raise ValueError(
            f"`weight` must have a square kernel within the {poses.shape[1]}×{poses.shape[2]} "
            f"input, got {weight.shape[0]}×{weight.shape[1]}"
        )
