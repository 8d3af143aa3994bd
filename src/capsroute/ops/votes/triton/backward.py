"""Gradients of the moments of routed votes.

With d = v − c and G the gradients of the three moments,

    u_ij    = G0 + Σ (G1 d + G2 d²)                        ∂L/∂R
    ū_i     = Σ_j r u                                      ∂L/∂a
    e_ij    = R (u − ū)                                    ∂L/∂logit
    ∂L/∂d   = R (G1 + 2 G2 d) + e · (−2 query d or query)  ∂L/∂v, and −∂L/∂c once summed up

so what parents need are moments of the same votes, weighed by e: ∂L/∂prior = Σ e, ∂L/∂query =
−Σ e d² (or Σ e v). ∂L/∂v of some children at a time goes through memory on its way into ∂L/∂weight.
"""

import dataclasses

import torch
from torch import Tensor

from capsroute.ops.inverted.triton import geometry
from capsroute.ops.inverted.triton.fold import fold
from capsroute.ops.inverted.triton.geometry import ceil_div
from capsroute.ops.inverted.triton.splits import add_splits, partial
from capsroute.ops.inverted.triton.tile import STACK
from capsroute.ops.votes.moments import Contest, Moments
from capsroute.ops.votes.triton.forward import Sums, fill_shares
from capsroute.ops.votes.triton.gradients import children_kernel, slopes_kernel, weight_kernel
from capsroute.ops.votes.triton.launch import Operands


@dataclasses.dataclass(frozen=True)
class Gradients:
    children: Tensor
    activations: Tensor
    weight: Tensor
    centre: Tensor
    query: Tensor | None
    prior: Tensor | None


def gradients(
    given: Operands, contest: Contest | None, results: tuple[Tensor, Tensor], grads: Moments
) -> Gradients:
    """Of what the moments are made from; `results` are the mass and the first moment.

    Some children at a time: shares and slopes, then, of fewer, ∂L/∂v and what it gives.
    """
    sizes, tile = given.sizes, given.tile
    chunks = [range(tile.stacks)]
    if contest is not None:
        chunks = given.share_chunks(2)
    longest = max(map(len, chunks))
    most = max(len(some) for stacks in chunks for some in given.vote_chunks(stacks))
    windows = (sizes.k**2, sizes.positions, sizes.n_in)
    parts = tile.columns // given.part
    new = given.children.new_empty
    grad_windows = new(parts, *windows, sizes.rows * sizes.a)
    grad_activations = given.activations.new_empty(1, *windows, 1)
    grad_votes = new(most * tile.members, sizes.positions * tile.r_pad, tile.columns)
    grad_weight = torch.empty_like(given.weight)
    shares = slopes = given.activations  # read nowhere
    sums = None
    if contest is not None:
        shares, slopes = given.coefficients(longest), given.coefficients(longest)
        sums = Sums(given, longest, carried=len(chunks) > 1)
    for stacks in chunks:
        if contest is not None:
            fill_shares(given, contest, shares, stacks)
        _fill_slopes(given, contest, grads, shares, slopes, grad_activations, stacks)
        if sums is not None:
            sums.add(slopes, stacks)
        for some in given.vote_chunks(stacks):
            at = 0 if contest is None else (some.start - stacks.start) * tile.members
            pairs = shares[at:], slopes[at:]
            _fill_votes(given, contest, grads, *pairs, grad_votes, grad_windows, some)
            _fill_weight(given, grad_votes, grad_weight, some)
    flat = dataclasses.replace(sizes, rows=1, a=1)
    return Gradients(
        fold(grad_windows, given.children, sizes),
        fold(grad_activations, given.activations, flat),
        grad_weight,
        *_of_parents(given.centre, contest, results, grads, None if sums is None else sums.total()),
    )


def _of_parents(
    centre: Tensor,
    contest: Contest | None,
    results: tuple[Tensor, Tensor],
    grads: Moments,
    sloped: Moments | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """∂L/∂centre, ∂L/∂query, ∂L/∂prior from moments weighed by e."""
    mass, first = results
    _, grad_first, grad_second = grads
    grad_centre = -(grad_first * mass.unsqueeze(-1) + 2.0 * grad_second * first)
    if contest is None or sloped is None:
        return grad_centre, None, None
    grad_prior, e_first, e_second = sloped
    if contest.gaussian:
        return grad_centre + 2.0 * contest.query * e_first, -e_second, grad_prior
    return grad_centre, e_first + centre * grad_prior.unsqueeze(-1), grad_prior


def _fill_slopes(
    given: Operands,
    contest: Contest | None,
    grads: Moments,
    shares: Tensor,
    slopes: Tensor,
    grad_activations: Tensor,
    stacks: range,
) -> None:
    tiles, runs, split = given.runs("slopes", len(stacks))
    grad_mass, grad_first, grad_second = grads
    given.launch(
        slopes_kernel,
        "slopes",
        (tiles, runs),
        grad_mass=grad_mass,
        grad_first=grad_first,
        grad_second=grad_second,
        shares=shares,
        slopes=slopes,
        grad_activations=grad_activations,
        begin=stacks.start,
        end=stacks.stop,
        split=split,
        EVEN=contest is None,
    )


def _fill_votes(
    given: Operands,
    contest: Contest | None,
    grads: Moments,
    shares: Tensor,
    slopes: Tensor,
    grad_votes: Tensor,
    grad_windows: Tensor,
    stacks: range,
) -> None:
    parts = given.tile.columns // given.part
    tiles, runs, split = given.runs("children", len(stacks), parts)
    given.launch(
        children_kernel,
        "children",
        (tiles, runs, parts),
        query=given.centre if contest is None else contest.query,
        grad_first=grads[1],
        grad_second=grads[2],
        shares=shares,
        slopes=slopes,
        grad_votes=grad_votes,
        grad_windows=grad_windows,
        begin=stacks.start,
        end=stacks.stop,
        split=split,
        PART=given.part,
        EVEN=contest is None,
        GAUSSIAN=contest is not None and contest.gaussian,
    )


def _fill_weight(given: Operands, grad_votes: Tensor, grad_weight: Tensor, stacks: range) -> None:
    chosen = given.settings("weight")
    blocks = ceil_div(given.sizes.positions * given.tile.r_pad, chosen.rows)
    slots = chosen.resident * geometry.multiprocessors(grad_votes.device)
    splits, run = geometry.split_evenly(len(stacks), blocks, slots)
    out = grad_weight[stacks.start * STACK : stacks.stop * STACK]
    sums = partial(splits, out)
    given.launch(
        weight_kernel,
        "weight",
        (len(stacks), splits),
        grad_votes=grad_votes,
        grad_weight=sums,
        begin=stacks.start,
        end=stacks.stop,
        split=run * chosen.rows,
    )
    add_splits(sums, out)
