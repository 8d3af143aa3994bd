"""The parents' new poses, and the kernel for small poses that sums up weighted votes.

Every parent's votes for a tile of positions are one product of the tensor cores, the rest happens
in its accumulator (tile.py), and one pass over the children does everything. The kernel serves the
backward pass too, whose ∂L/∂q is a sum of votes weighted by slopes (README.md). Large poses are in
large.py.
"""

# Kernel arguments have no Python types, constants are in capitals.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from capsroute.ops.inverted.triton import geometry
from capsroute.ops.inverted.triton.common import softmax, window_corner
from capsroute.ops.inverted.triton.geometry import Geometry, ceil_div
from capsroute.ops.inverted.triton.large import large_votes
from capsroute.ops.inverted.triton.splits import add_splits, partial
from capsroute.ops.inverted.triton.tile import (
    Tile,
    as_poses,
    from_stack,
    is_small,
    load_stack,
    load_transform,
    pose_dot,
    pose_elements,
    tile_rows,
)
from capsroute.ops.inverted.triton.tuning import settings


@triton.jit(do_not_specialize=["begin", "end", "split"])
def route_kernel(
    children,
    weight,
    parents,
    coefficients,
    out,
    positions,
    height,
    width,
    out_height,
    out_width,
    stride,
    scale,
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
    GIVEN: tl.constexpr,
    CARRY: tl.constexpr,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Σ_i r_ij v_ij over `split` stacks of children: (splits, positions, N_OUT, R·B).

    `KEEP` stores r in coefficients, (window, positions, N_OUT). With `GIVEN` the votes' weights are
    the slopes that coefficients holds, (children, positions, parents, [r, slope]), of the stacks
    from `begin` to `end` and of no others; `CARRY` adds their sum to what is there.
    """
    MEMBERS: tl.constexpr = 16 // A_PAD
    POSITIONS: tl.constexpr = ROWS // R_PAD
    PARENTS: tl.constexpr = COLUMNS // B_PAD
    start = tl.program_id(0) * POSITIONS
    row, r = tile_rows(start, ROWS, R_PAD)
    # clamped rather than masked: what lies outside is computed and not stored
    row = tl.minimum(row, positions - 1)
    corner = window_corner(row, height, width, out_height, out_width, stride, N_IN, R * A)
    n = start + tl.arange(0, POSITIONS)
    inside = n < positions
    n = tl.minimum(n, positions - 1)
    j = tl.arange(0, PARENTS)
    pair = n[:, None] * (2 * PARENTS) + tl.arange(0, 2 * PARENTS)[None, :]
    element, real = pose_elements(j, N_OUT, R, B, R_PAD, B_PAD)
    own = (n * (N_OUT * R * B))[:, None, None, None] + element
    total = tl.zeros_like(own).to(tl.float32)
    q = total
    first = tl.program_id(1) * split
    last = tl.cdiv(K * K * N_IN, MEMBERS)
    if GIVEN:
        coefficients = from_stack(coefficients, begin, MEMBERS * 2 * PARENTS, positions)
        first += begin
        last = end
    else:
        q = tl.load(parents + own, mask=real, other=0.0).to(tl.float32) * scale
    for stack in tl.range(first, tl.minimum(first + split, last)):
        p = load_stack(children, corner, r, stack, width, N_IN, K, R, A, R_PAD, A_PAD)
        for member in tl.static_range(MEMBERS):
            w = load_transform(weight, stack, tl.arange(0, COLUMNS), member, COLUMNS, A_PAD)
            v = as_poses(tl.dot(p, w, input_precision=PRECISION), R_PAD, B_PAD, HIGH)
            child = tl.cast(stack, tl.int64) * MEMBERS + member
            if GIVEN:
                both = tl.load(coefficients + child * positions * (2 * PARENTS) + pair)
                _, share = tl.split(tl.reshape(both, (POSITIONS, PARENTS, 2)).to(tl.float32))
            else:
                agreement = pose_dot(v, q)
                if N_OUT != PARENTS:
                    agreement = tl.where((j < N_OUT)[None, :], agreement, float("-inf"))
                share = softmax(agreement, children.dtype.element_ty)
            if KEEP:
                at = child * positions * N_OUT + (n[:, None] * N_OUT + j[None, :])
                kept = inside[:, None] & (j < N_OUT)[None, :] & (child < K * K * N_IN)
                tl.store(coefficients + at, share.to(coefficients.dtype.element_ty), mask=kept)
            total += share[:, None, :, None] * v
    to = out + tl.cast(tl.program_id(1), tl.int64) * positions * (N_OUT * R * B) + own
    stored = real & inside[:, None, None, None]
    if CARRY:
        total += tl.load(to, mask=stored, other=0.0)
    tl.store(to, total.to(out.dtype.element_ty), mask=stored)


# Tiles whose sums are written once more, read and added in the time that a stack takes a program:
# from bytes and instructions, not timed.
PARTIALS_A_STACK = 120


def vote_precision(dtype: torch.dtype) -> str:
    """Six products of bf16 hold the 24 bits of fp32; three of tf32 would hold 22.

    For votes only: the tensor cores cut off what they add up, which a sum over a child's row does
    not notice and a sum over a thousand positions does. Never "ieee" for fp32, which an H200 got
    wrong (README.md); the interpreter, which has one product, does not.
    """
    exact = dtype != torch.float32 or triton.knobs.runtime.interpret
    return "ieee" if exact else "bf16x6"


def vote_runs(kernel: str, children: Tensor, sizes: Geometry, stacks: int) -> int:
    """Into how many runs, each with its own sum, so many stacks go."""
    tile = Tile.of(sizes)
    chosen = settings(kernel, tile, children.dtype)
    tiles = ceil_div(sizes.positions, chosen.rows // tile.r_pad)
    slots = chosen.resident * geometry.multiprocessors(children.device)
    return geometry.split_evenly(tiles, stacks, slots, tiles / PARTIALS_A_STACK)[0]


def sum_votes(
    sums: Tensor,
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    coefficients: Tensor,
    sizes: Geometry,
    scale: float,
    stacks: range,
    *,
    given: bool = False,
    carry: bool = False,
) -> None:
    """Small poses: fill `sums`, (runs, ...), with these stacks' votes weighted by r.

    Or by their slopes, which `coefficients` holds (given). Or add to what `sums` holds (carry).
    """
    tile = Tile.of(sizes)
    chosen = settings("slopes" if given else "route", tile, children.dtype)
    geometry.launch(
        route_kernel,
        (ceil_div(sizes.positions, chosen.rows // tile.r_pad), len(sums)),
        children=children,
        weight=weight,
        parents=parents,
        coefficients=coefficients,
        out=sums,
        scale=scale,
        begin=stacks.start,
        end=stacks.stop,
        split=ceil_div(len(stacks), len(sums)),
        **sizes.addressing(),
        ROWS=chosen.rows,
        **tile.constants(),
        GIVEN=given,
        CARRY=carry,
        KEEP=not given and coefficients.numel() > 0,
        PRECISION=vote_precision(children.dtype),
        **chosen.options(),
    )


def weighted_votes(
    children: Tensor, weight: Tensor, parents: Tensor, sizes: Geometry, scale: float, keep: bool
) -> tuple[Tensor, Tensor]:
    """The parents' new poses, and r as (window, positions, out), empty unless `keep`."""
    if not is_small(sizes):
        return large_votes(children, weight, parents, sizes, scale, keep)
    kept = (sizes.window, sizes.positions, sizes.n_out) if keep else (0,)
    dtype = geometry.coefficient_dtype(children.dtype)
    shares = torch.empty(kept, device=children.device, dtype=dtype)
    poses = torch.empty(sizes.parents_shape(), device=children.device, dtype=children.dtype)
    stacks = range(Tile.of(sizes).stacks)
    sums = partial(vote_runs("route", children, sizes, len(stacks)), poses)
    sum_votes(sums, children, weight, parents, shares, sizes, scale, stacks)
    return add_splits(sums, poses), shares
