"""Gradients of the moments of routed votes.

With d = v − c and G the gradients of the three moments,

    u_ij    = G0 + Σ (G1 d + G2 d²)                        ∂L/∂R
    ū_i     = Σ_j r u                                      ∂L/∂a
    e_ij    = R (u − ū)                                    ∂L/∂logit
    ∂L/∂d   = R (G1 + 2 G2 d) + e · (−2 query d or query)  ∂L/∂v, and −∂L/∂c once summed up

so what parents need are moments of the same votes, weighed by e: ∂L/∂prior = Σ e, ∂L/∂query =
−Σ e d² (or Σ e v). ∂L/∂v of some children at a time goes through memory on its way into ∂L/∂weight.
"""

# Kernel arguments have no Python types, constants are in capitals.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803, N806

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from capsroute.ops.inverted.triton import geometry
from capsroute.ops.inverted.triton.common import window_corner
from capsroute.ops.inverted.triton.fold import fold
from capsroute.ops.inverted.triton.geometry import ceil_div
from capsroute.ops.inverted.triton.splits import add_splits, partial
from capsroute.ops.inverted.triton.tile import (
    STACK,
    as_matrix,
    as_poses,
    from_stack,
    load_stack,
    load_transform,
    pose_dot,
    pose_elements,
    tile_rows,
)
from capsroute.ops.votes.moments import Contest, Moments
from capsroute.ops.votes.triton.forward import (
    Sums,
    child_activation,
    fill_shares,
    part_parents,
)
from capsroute.ops.votes.triton.launch import Operands


@triton.jit(do_not_specialize=["begin", "end", "split"])
def slopes_kernel(
    children,
    activations,
    weight,
    centre,
    grad_mass,
    grad_first,
    grad_second,
    shares,
    slopes,
    grad_activations,
    positions,
    height,
    width,
    out_height,
    out_width,
    stride,
    begin,
    end,
    split,
    N_IN: tl.constexpr,
    N_OUT: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    R_PAD: tl.constexpr,
    A_PAD: tl.constexpr,
    B_PAD: tl.constexpr,
    HIGH: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """e of `split` stacks, as `shares` lies, and ū of every window: (k², positions, N_IN)."""
    MEMBERS: tl.constexpr = 16 // A_PAD
    POSITIONS: tl.constexpr = ROWS // R_PAD
    PARENTS: tl.constexpr = COLUMNS // B_PAD
    start = tl.program_id(0) * POSITIONS
    row, r = tile_rows(start, ROWS, R_PAD)
    row = tl.minimum(row, positions - 1)
    corner = window_corner(row, height, width, out_height, out_width, stride, N_IN, R * A)
    n = start + tl.arange(0, POSITIONS)
    inside = n < positions
    n = tl.minimum(n, positions - 1)
    seen = window_corner(n, height, width, out_height, out_width, stride, N_IN, 1)
    j = tl.arange(0, PARENTS)
    element, real = pose_elements(j, N_OUT, R, B, R_PAD, B_PAD)
    own = (n * (N_OUT * R * B))[:, None, None, None] + element
    # About zero where digits are few and columns many, or a centre would take as many registers
    # again: G1 d + G2 d² = (x + y v) v + …
    CENTRED: tl.constexpr = (children.dtype.element_ty == tl.float32) or (COLUMNS <= 64)
    x = tl.load(grad_first + own, mask=real, other=0.0)
    y = tl.load(grad_second + own, mask=real, other=0.0)
    c = tl.load(centre + own, mask=real, other=0.0)
    at = n[:, None] * N_OUT + j[None, :]
    bias = tl.load(grad_mass + at, mask=(j < N_OUT)[None, :], other=0.0)
    if not CENTRED:
        bias += pose_dot(y * c - x, c)
        x -= 2.0 * y * c
    pair = n[:, None] * PARENTS + j[None, :]
    shares = from_stack(shares, begin, MEMBERS * PARENTS, positions)
    slopes = from_stack(slopes, begin, MEMBERS * PARENTS, positions)
    first = begin + tl.program_id(1) * split
    for stack in tl.range(first, tl.minimum(first + split, end)):
        p = load_stack(children, corner, r, stack, width, N_IN, K, R, A, R_PAD, A_PAD)
        for member in tl.static_range(MEMBERS):
            w = load_transform(weight, stack, tl.arange(0, COLUMNS), member, COLUMNS, A_PAD)
            v = as_poses(tl.dot(p, w, input_precision=PRECISION), R_PAD, B_PAD, HIGH)
            if CENTRED:
                v -= c
            u = bias + pose_dot(x + y * v, v)
            child = stack * MEMBERS + member
            if EVEN:
                mean = tl.sum(u, axis=1) * (1.0 / N_OUT)
            else:
                to = tl.cast(child, tl.int64) * positions * PARENTS + pair
                share = tl.load(shares + to).to(tl.float32)
                active = child_activation(activations, seen, child, width, N_IN, K)
                mean = tl.sum(share * u, axis=1)
                u -= mean[:, None]
                rest = tl.sum(share * u, axis=1)  # what the mean was rounded off by
                slope = active[:, None] * share * (u - rest[:, None])
                mean += rest
                tl.store(slopes + to, slope.to(slopes.dtype.element_ty), mask=inside[:, None])
            tap = tl.cast(child // N_IN, tl.int64) * positions * N_IN
            tl.store(
                grad_activations + (tap + child % N_IN + n * N_IN),
                mean,
                mask=inside & (child < K * K * N_IN),
            )


@triton.jit(do_not_specialize=["begin", "end", "split"])
def children_kernel(
    children,
    activations,
    weight,
    centre,
    query,
    grad_first,
    grad_second,
    shares,
    slopes,
    grad_votes,
    grad_windows,
    positions,
    height,
    width,
    out_height,
    out_width,
    stride,
    begin,
    end,
    split,
    N_IN: tl.constexpr,
    N_OUT: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    R_PAD: tl.constexpr,
    A_PAD: tl.constexpr,
    B_PAD: tl.constexpr,
    HIGH: tl.constexpr,
    PART: tl.constexpr,
    EVEN: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """∂L/∂v of `split` stacks and a part of the parents, and what it gives ∂L/∂p of each window.

    (children, positions · R_PAD, COLUMNS), and (parts, k², positions, N_IN, R·A). Half a stack at a
    time goes into the second, since a product needs 8 columns and no more.
    """
    MEMBERS: tl.constexpr = 16 // A_PAD
    HALF: tl.constexpr = 8 // A_PAD
    POSITIONS: tl.constexpr = ROWS // R_PAD
    PARENTS: tl.constexpr = COLUMNS // B_PAD
    start = tl.program_id(0) * POSITIONS
    row, r = tile_rows(start, ROWS, R_PAD)
    is_row = row < positions
    row = tl.minimum(row, positions - 1)
    corner = window_corner(row, height, width, out_height, out_width, stride, N_IN, R * A)
    n = tl.minimum(start + tl.arange(0, POSITIONS), positions - 1)
    seen = window_corner(n, height, width, out_height, out_width, stride, N_IN, 1)
    part = tl.program_id(2)
    column = part * PART + tl.arange(0, PART)
    j = part_parents(part, PART, PARENTS, HIGH, B_PAD)
    element, real = pose_elements(j, N_OUT, R, B, R_PAD, B_PAD)
    own = (n * (N_OUT * R * B))[:, None, None, None] + element
    c = tl.load(centre + own, mask=real, other=0.0)
    g = tl.load(grad_first + own, mask=real, other=0.0)
    y = 2.0 * tl.load(grad_second + own, mask=real, other=0.0)
    if not EVEN:
        q = tl.load(query + own, mask=real, other=0.0)
        if GAUSSIAN:
            q = -2.0 * q
    pair = n[:, None] * PARENTS + j[None, :]
    shares = from_stack(shares, begin, MEMBERS * PARENTS, positions)
    slopes = from_stack(slopes, begin, MEMBERS * PARENTS, positions)
    grad_votes = from_stack(grad_votes, begin, MEMBERS * R_PAD * COLUMNS, positions)
    windows = grad_windows + tl.cast(part, tl.int64) * (K * K) * positions * (N_IN * R * A)
    to_row = (row * R_PAD + r)[:, None] * COLUMNS + column[None, :]
    k = tl.arange(0, 8)
    first = begin + tl.program_id(1) * split
    for stack in tl.range(first, tl.minimum(first + split, end)):
        p = load_stack(children, corner, r, stack, width, N_IN, K, R, A, R_PAD, A_PAD)
        for s in tl.static_range(2):
            half = stack * 2 + s
            grad_p = tl.zeros((ROWS, 8), tl.float32)
            for member in tl.static_range(HALF):
                w = load_transform(weight, stack, column, s * HALF + member, COLUMNS, A_PAD)
                v = as_poses(tl.dot(p, w, input_precision=PRECISION), R_PAD, B_PAD, HIGH)
                child = half * HALF + member
                at = tl.cast(child, tl.int64) * positions * PARENTS + pair
                active = child_activation(activations, seen, child, width, N_IN, K)[:, None]
                apart = v - c
                if EVEN:
                    share = (active * (1.0 / N_OUT))[:, None, :, None]
                    grad_v = share * (g + y * apart)
                else:
                    share = active * tl.load(shares + at).to(tl.float32)
                    slope = tl.load(slopes + at).to(tl.float32)
                    share, slope = share[:, None, :, None], slope[:, None, :, None]
                    if GAUSSIAN:
                        grad_v = share * g + (share * y + slope * q) * apart
                    else:
                        grad_v = share * (g + y * apart) + slope * q
                grad_v = as_matrix(grad_v, R_PAD, B_PAD, HIGH).to(children.dtype.element_ty)
                to = tl.cast(child, tl.int64) * positions * (R_PAD * COLUMNS) + to_row
                tl.store(grad_votes + to, grad_v, mask=is_row[:, None])
                w = load_transform(weight, half, column, member, COLUMNS, A_PAD, 8)
                grad_p = tl.dot(grad_v, tl.trans(w), grad_p, input_precision="ieee")
            child = half * HALF + k // A_PAD
            tap = tl.cast(child // N_IN, tl.int64) * positions * (N_IN * R * A)
            to = windows + (tap + child % N_IN * (R * A) + k % A_PAD)[None, :]
            is_column = (child < K * K * N_IN) & (k % A_PAD < A)
            tl.store(
                to + ((row * N_IN * R + r) * A)[:, None],
                grad_p.to(windows.dtype.element_ty),
                mask=(is_row & (r < R))[:, None] & is_column[None, :],
            )


@triton.jit(do_not_specialize=["begin", "end", "split"])
def weight_kernel(
    children,
    grad_votes,
    grad_weight,
    positions,
    height,
    width,
    out_height,
    out_width,
    stride,
    begin,
    end,
    split,
    N_IN: tl.constexpr,
    N_OUT: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    R_PAD: tl.constexpr,
    A_PAD: tl.constexpr,
    B_PAD: tl.constexpr,
    HIGH: tl.constexpr,
):
    """∂L/∂W of a stack over `split` rows of poses: (splits, (end − begin) · 16, COLUMNS)."""
    MEMBERS: tl.constexpr = 16 // A_PAD
    stack = begin + tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    k = tl.arange(0, 16)
    grad_votes = from_stack(grad_votes, begin, MEMBERS * R_PAD * COLUMNS, positions)
    total = tl.zeros((16, COLUMNS), tl.float32)
    first = tl.program_id(1) * split
    last = tl.minimum(first + split, positions * R_PAD)
    for start in tl.range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < last
        row = tl.minimum(row, last - 1)
        n, r = row // R_PAD, row % R_PAD
        corner = window_corner(n, height, width, out_height, out_width, stride, N_IN, R * A)
        p = load_stack(children, corner, r, stack, width, N_IN, K, R, A, R_PAD, A_PAD)
        for member in tl.static_range(MEMBERS):
            at = tl.cast(stack * MEMBERS + member, tl.int64) * positions * (R_PAD * COLUMNS)
            at += row[:, None] * COLUMNS + column[None, :]
            grad_v = tl.load(grad_votes + at, mask=inside[:, None], other=0.0)
            one = tl.where((k // A_PAD == member)[None, :], p, 0.0)
            total = tl.dot(tl.trans(one), grad_v, total, input_precision="ieee")
    to = tl.cast(tl.program_id(1), tl.int64) * (end - begin) + tl.program_id(0)
    to = to * (16 * COLUMNS) + k[:, None] * COLUMNS + column[None, :]
    tl.store(grad_weight + to, total.to(grad_weight.dtype.element_ty))


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
    dtype = given.children.dtype
    chunks = [range(tile.stacks)]
    if contest is not None:
        chunks = given.chunks(2 * geometry.coefficient_dtype(dtype).itemsize)
    vote = tile.r_pad * tile.b_pad * dtype.itemsize
    longest, most = len(chunks[0]), len(given.chunks(vote, chunks[0])[0])
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
        for some in given.chunks(vote, stacks):
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
