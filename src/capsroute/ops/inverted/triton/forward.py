"""Kernels that form votes: coefficients, and sums of votes weighted by them.

Small poses (`route_kernel`): every parent's votes for a tile of positions are one product of the
tensor cores, the rest happens in its accumulator (tile.py), and one pass over the children does
everything. Large poses (`coefficients_kernel`, `aggregate_kernel`): a vote is a product of its own,
and the coefficients pass through memory. All serve the backward pass too, whose ∂L/∂q is a sum of
votes weighted by slopes (README.md).
"""

# Kernel arguments have no Python types, constants are in capitals.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from capsroute.ops.inverted.triton import geometry
from capsroute.ops.inverted.triton.common import child_offset, softmax, window_corner
from capsroute.ops.inverted.triton.geometry import Geometry, ceil_div, power_of_two
from capsroute.ops.inverted.triton.tile import (
    Tile,
    as_poses,
    is_small,
    load_stack,
    load_transform,
    pose_dot,
    pose_elements,
    tile_rows,
)
from capsroute.ops.inverted.triton.tuning import large_stages, settings


@triton.jit
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
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Σ_i r_ij v_ij over `split` stacks of children: (splits, positions, N_OUT, R·B).

    `KEEP` stores r in coefficients, (window, positions, N_OUT). With `GIVEN` the votes' weights are
    the slopes that coefficients holds, (children, positions, parents, [r, slope]).
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
    if not GIVEN:
        q = tl.load(parents + own, mask=real, other=0.0).to(tl.float32) * scale
    first = tl.program_id(1) * split
    last = tl.minimum(first + split, tl.cdiv(K * K * N_IN, MEMBERS))
    for stack in tl.range(first, last):
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
    tl.store(to, total.to(out.dtype.element_ty), mask=real & inside[:, None, None, None])


@triton.jit
def pose_rows(first, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    """Poses as rows of a matrix: the position of each and its row in the pose."""
    row = tl.arange(0, BLOCK_N * BLOCK_R)
    return first + row // BLOCK_R, row % BLOCK_R


@triton.jit
def coefficients_kernel(
    children,
    weight,
    parents,
    grad_poses,
    shares,
    slopes,
    positions,
    height,
    width,
    out_height,
    out_width,
    stride,
    scale,
    N_IN: tl.constexpr,
    N_OUT: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BACKWARD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """r, and backward scale · ∂L/∂a, of one child: (window, positions, N_OUT).

    weight is (window, N_OUT, A, B).
    """
    child = tl.program_id(1)
    n, r = pose_rows(tl.program_id(0) * BLOCK_N, BLOCK_N, BLOCK_R)
    c, d, j = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_J)
    inside = (n < positions) & (r < R)
    corner = window_corner(n, height, width, out_height, out_width, stride, N_IN, R * A)
    at = corner + child_offset(child, width, N_IN, K, R * A) + r * A
    p = tl.load(
        children + at[:, None] + c[None, :], mask=inside[:, None] & (c < A)[None, :], other=0.0
    )
    w_at = tl.cast(child, tl.int64) * N_OUT * A * B + (c[:, None] * B + d[None, :])
    w_in = (c < A)[:, None] & (d < B)[None, :]
    q_at = (n * N_OUT * R + r)[:, None] * B + d[None, :]
    q_in = inside[:, None] & (d < B)[None, :]
    agreement = tl.full((BLOCK_N, BLOCK_J), float("-inf"), tl.float32)
    u = tl.zeros((BLOCK_N, BLOCK_J), tl.float32)
    for parent in range(N_OUT):
        w = tl.load(weight + w_at + parent * (A * B), mask=w_in, other=0.0)
        v = tl.dot(p, w, input_precision=PRECISION)
        q = tl.load(parents + q_at + parent * (R * B), mask=q_in, other=0.0).to(tl.float32)
        column = tl.sum(tl.reshape(tl.sum(v * q, axis=1), (BLOCK_N, BLOCK_R)), axis=1)
        agreement = tl.where((j == parent)[None, :], column[:, None], agreement)
        if BACKWARD:
            g = tl.load(grad_poses + q_at + parent * (R * B), mask=q_in, other=0.0).to(tl.float32)
            column = tl.sum(tl.reshape(tl.sum(v * g, axis=1), (BLOCK_N, BLOCK_R)), axis=1)
            u = tl.where((j == parent)[None, :], column[:, None], u)
    share = softmax(agreement * scale, children.dtype.element_ty)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.cast(child, tl.int64) * positions * N_OUT + (n[:, None] * N_OUT + j[None, :])
    inside = (n < positions)[:, None] & (j < N_OUT)[None, :]
    tl.store(shares + at, share.to(shares.dtype.element_ty), mask=inside)
    if BACKWARD:
        slope = scale * share * (u - tl.sum(share * u, axis=1)[:, None])
        tl.store(slopes + at, slope.to(slopes.dtype.element_ty), mask=inside)


@triton.jit
def aggregate_kernel(
    children,
    weight,
    coefficients,
    out,
    positions,
    height,
    width,
    out_height,
    out_width,
    stride,
    split,
    N_IN: tl.constexpr,
    N_OUT: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Σ_i coefficient_ij v_ij over `split` children: (splits, positions, N_OUT, R·B)."""
    parent = tl.program_id(1)
    n, r = pose_rows(tl.program_id(0) * BLOCK_N, BLOCK_N, BLOCK_R)
    c, d = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_B)
    inside = (n < positions) & (r < R)
    corner = window_corner(n, height, width, out_height, out_width, stride, N_IN, R * A) + r * A
    p_at = corner[:, None] + c[None, :]
    p_in = inside[:, None] & (c < A)[None, :]
    w_at = parent * (A * B) + c[:, None] * B + d[None, :]
    w_in = (c < A)[:, None] & (d < B)[None, :]
    total = tl.zeros((BLOCK_N * BLOCK_R, BLOCK_B), tl.float32)
    first = tl.program_id(2) * split
    for child in range(first, tl.minimum(first + split, K * K * N_IN)):
        offset = child_offset(child, width, N_IN, K, R * A)
        p = tl.load(children + p_at + offset, mask=p_in, other=0.0)
        w = tl.load(
            weight + tl.cast(child, tl.int64) * (N_OUT * A * B) + w_at, mask=w_in, other=0.0
        )
        at = tl.cast(child, tl.int64) * positions * N_OUT + n * N_OUT + parent
        coefficient = tl.load(coefficients + at, mask=inside, other=0.0).to(tl.float32)
        total += coefficient[:, None] * tl.dot(p, w, input_precision=PRECISION)
    to = tl.cast(tl.program_id(2), tl.int64) * positions * (N_OUT * R * B)
    to += ((n * N_OUT + parent) * R + r)[:, None] * B + d[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=inside[:, None] & (d < B)[None, :])


# Tiles whose sums are written once more, read and added in the time that a stack takes a program:
# from bytes and instructions, not timed.
PARTIALS_A_STACK = 120


def vote_precision(dtype: torch.dtype) -> str:
    """Three products of tf32 keep what fp32 holds.

    For votes only: the tensor cores cut off what they add up, which a sum over a child's row does
    not notice and a sum over a thousand positions does.
    """
    return "tf32x3" if dtype == torch.float32 else "ieee"


def aggregate(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    coefficients: Tensor,
    sizes: Geometry,
    scale: float,
    given: bool,
) -> Tensor:
    """Small poses: the sum of votes weighted by r, or by the slopes in `coefficients` (given)."""
    tile = Tile.of(sizes)
    chosen = settings("slopes" if given else "route", tile, children.dtype)
    tiles = ceil_div(sizes.positions, chosen.rows // tile.r_pad)
    slots = chosen.resident * geometry.multiprocessors(children.device)
    splits, split = geometry.split_evenly(tiles, tile.stacks, slots, tiles / PARTIALS_A_STACK)
    out = geometry.partial(splits, sizes.parents_shape(), children)
    geometry.launch(
        route_kernel,
        (tiles, splits),
        children=children,
        weight=weight,
        parents=parents,
        coefficients=coefficients,
        out=out,
        scale=scale,
        split=split,
        **sizes.addressing(),
        ROWS=chosen.rows,
        **tile.constants(),
        GIVEN=given,
        KEEP=not given and coefficients.numel() > 0,
        PRECISION=vote_precision(children.dtype),
        **chosen.options(),
    )
    return geometry.add_splits(out, children.dtype)


def large_blocks(sizes: Geometry, rows: int) -> dict[str, int]:
    """Tile sizes of the kernels for large poses: `rows` pose rows, or few more."""
    block_r = power_of_two(sizes.rows)
    return {
        "BLOCK_N": max(1, rows // block_r),
        "BLOCK_R": block_r,
        "BLOCK_A": max(16, power_of_two(sizes.a)),
        "BLOCK_B": max(16, power_of_two(sizes.b)),
    }


def aggregate_large(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    grad_poses: Tensor | None,
    sizes: Geometry,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Large poses: the sum of votes weighted by r, or backward by the slopes; r; the slopes.

    Both are (window, positions, out); the slopes are empty unless backward.
    """
    backward = grad_poses is not None
    kept = (sizes.window, sizes.positions, sizes.n_out)
    dtype = geometry.coefficient_dtype(children.dtype)
    shares = torch.empty(kept, device=children.device, dtype=dtype)
    slopes = torch.empty_like(shares) if backward else shares.new_empty(0)
    blocks = large_blocks(sizes, 64)
    tiles = ceil_div(sizes.positions, blocks["BLOCK_N"])
    geometry.launch(
        coefficients_kernel,
        (tiles, sizes.window),
        children=children,
        weight=weight,
        parents=parents,
        grad_poses=parents if grad_poses is None else grad_poses,
        shares=shares,
        slopes=slopes,
        scale=scale,
        **sizes.addressing(),
        **blocks,
        BLOCK_J=max(2, power_of_two(sizes.n_out)),
        BACKWARD=backward,
        PRECISION="ieee",
        num_warps=4,
        num_stages=large_stages(children.dtype),
    )
    slots = 8 * geometry.multiprocessors(children.device)
    splits, split = geometry.split_evenly(tiles * sizes.n_out, sizes.window, slots, price=8.0)
    out = geometry.partial(splits, sizes.parents_shape(), children)
    geometry.launch(
        aggregate_kernel,
        (tiles, sizes.n_out, splits),
        children=children,
        weight=weight,
        coefficients=slopes if backward else shares,
        out=out,
        split=split,
        **sizes.addressing(),
        **blocks,
        PRECISION="ieee",
        num_warps=4,
        num_stages=large_stages(children.dtype),
    )
    return geometry.add_splits(out, children.dtype), shares, slopes


def weighted_votes(
    children: Tensor, weight: Tensor, parents: Tensor, sizes: Geometry, scale: float, keep: bool
) -> tuple[Tensor, Tensor]:
    """The parents' new poses, and r as (window, positions, out), empty unless `keep`."""
    if not is_small(sizes):
        poses, shares, _ = aggregate_large(children, weight, parents, None, sizes, scale)
        return poses, shares if keep else children.new_empty(0)
    kept = (sizes.window, sizes.positions, sizes.n_out) if keep else (0,)
    dtype = geometry.coefficient_dtype(children.dtype)
    shares = torch.empty(kept, device=children.device, dtype=dtype)
    return aggregate(children, weight, parents, shares, sizes, scale, given=False), shares
