"""Kernels for large poses: a vote is a product of its own, and coefficients pass through memory.

`coefficients_kernel` writes r, or r and the slopes; `aggregate_kernel` sums up votes weighted by
either. `large_gradients.py` has the rest of the backward pass.

Coefficients are (window, N_OUT, planes, padded positions): a plane of r, backward another one of
slopes. Positions come last and padded to whole tiles, so that they are loaded several at a time and
unmasked: what lies in the padding is finite and meets poses of zero, or rows that nobody stores.
"""

# Kernel arguments have no Python types, constants are in capitals, tuples grow by addition.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment,var-annotated"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from capsroute.ops.inverted.triton import geometry
from capsroute.ops.inverted.triton.common import (
    child_offset,
    softmax,
    softmax_gradient,
    window_corner,
)
from capsroute.ops.inverted.triton.geometry import Geometry, ceil_div
from capsroute.ops.inverted.triton.splits import add_splits, partial
from capsroute.ops.inverted.triton.tuning import LargeTile, Settings, large_settings

PARTIALS_AN_ITEM = 150_000  # elements of another buffer that cost about as much as a turn of a loop


@triton.jit
def pose_rows(first, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    """Poses as rows of a matrix: the position of each and its row in the pose."""
    row = tl.arange(0, BLOCK_N * BLOCK_R)
    return first + row // BLOCK_R, row % BLOCK_R


@triton.jit
def zero_accumulator(M: tl.constexpr, N: tl.constexpr, TYPE: tl.constexpr):
    """Zeros where the tensor cores would leave them: what is added to them moves there, once."""
    if tl.float32 == TYPE:
        return tl.zeros((M, N), tl.float32)
    else:
        return tl.dot(tl.zeros((M, 16), TYPE), tl.zeros((16, N), TYPE))


@triton.jit
def agreements(
    poses,
    w,
    p,
    BLOCK_R: tl.constexpr,
    BLOCK_J: tl.constexpr,
    CHILDREN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """⟨p W, q⟩ = ⟨p, q Wᵀ⟩ of each child, for BLOCK_J columns: (positions, CHILDREN · BLOCK_J)."""
    ROWS: tl.constexpr = poses.shape[0]
    x = tl.dot(poses, w, input_precision=PRECISION) * p
    x = tl.sum(tl.reshape(x, (ROWS, CHILDREN, w.shape[1] // CHILDREN)), axis=2)
    if BLOCK_R > 1:
        x = tl.sum(tl.reshape(x, (ROWS // BLOCK_R, BLOCK_R, CHILDREN)), axis=1)
    x = tl.broadcast_to(x[:, :, None], (ROWS // BLOCK_R, CHILDREN, BLOCK_J))
    return tl.reshape(x, (ROWS // BLOCK_R, CHILDREN * BLOCK_J))


@triton.jit
def coefficients_kernel(
    children,
    weight,
    parents,
    grad_poses,
    coefficients,
    positions,
    padded,
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
    CHILDREN: tl.constexpr,
    PLANES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """r of CHILDREN children, and with two planes scale · ∂L/∂a. weight is (window, N_OUT, A, B).

    q and g go into products as they lie in memory. The children's poses, which are multiplied with
    every parent's product, move to its threads once.
    """
    TYPE: tl.constexpr = children.dtype.element_ty
    WINDOW: tl.constexpr = K * K * N_IN
    n, r = pose_rows(tl.program_id(0) * BLOCK_N, BLOCK_N, BLOCK_R)
    first = tl.program_id(1) * CHILDREN
    k, d = tl.arange(0, CHILDREN * BLOCK_A), tl.arange(0, BLOCK_B)
    child, c = tl.minimum(first + k // BLOCK_A, WINDOW - 1), k % BLOCK_A
    inside = (n < positions) & (r < R)
    corner = window_corner(n, height, width, out_height, out_width, stride, N_IN, R * A) + r * A
    p_at = corner[:, None] + (child_offset(child, width, N_IN, K, R * A) + c)[None, :]
    p = tl.load(children + p_at, mask=inside[:, None] & (c < A)[None, :], other=0.0)
    p = p.to(tl.float32) + zero_accumulator(BLOCK_N * BLOCK_R, CHILDREN * BLOCK_A, TYPE)
    w_at = (child * (N_OUT * A * B) + c * B)[None, :] + d[:, None]
    w_in = (c < A)[None, :] & (d < B)[:, None]
    q_at = (n * (N_OUT * R) + r)[:, None] * B + d[None, :]
    q_in = inside[:, None] & (d < B)[None, :]
    pair = tl.arange(0, CHILDREN * BLOCK_J)
    child, j = first + pair // BLOCK_J, pair % BLOCK_J
    agreement = tl.zeros((BLOCK_N, CHILDREN * BLOCK_J), tl.float32)
    if BLOCK_R == 1:
        agreement = zero_accumulator(BLOCK_N, CHILDREN * BLOCK_J, TYPE)
    u = agreement
    for parent in range(N_OUT):
        here = (j == parent)[None, :]
        w = tl.load(weight + w_at + parent * (A * B), mask=w_in, other=0.0)
        q = tl.load(parents + q_at + parent * (R * B), mask=q_in, other=0.0)
        new = agreements(q, w, p, BLOCK_R, BLOCK_J, CHILDREN, PRECISION)
        agreement = tl.where(here, new, agreement)
        if PLANES == 2:
            g = tl.load(grad_poses + q_at + parent * (R * B), mask=q_in, other=0.0)
            u = tl.where(here, agreements(g, w, p, BLOCK_R, BLOCK_J, CHILDREN, PRECISION), u)
    agreement = tl.where((j < N_OUT)[None, :], agreement * scale, float("-inf"))
    share = softmax(tl.reshape(agreement, (BLOCK_N * CHILDREN, BLOCK_J)), TYPE)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    to = tl.cast((child * N_OUT + j) * PLANES, tl.int64)[None, :] * padded + n[:, None]
    real = ((child < WINDOW) & (j < N_OUT))[None, :]
    kept = tl.reshape(share, (BLOCK_N, CHILDREN * BLOCK_J))
    tl.store(coefficients + to, kept.to(coefficients.dtype.element_ty), mask=real)
    if PLANES == 2:
        u = tl.reshape(u, (BLOCK_N * CHILDREN, BLOCK_J))
        slope = scale * softmax_gradient(share, u, TYPE)
        kept = tl.reshape(slope, (BLOCK_N, CHILDREN * BLOCK_J))
        tl.store(coefficients + padded + to, kept.to(coefficients.dtype.element_ty), mask=real)


@triton.jit
def load_columns(
    coefficients,
    n,
    first,
    child,
    padded,
    N_OUT: tl.constexpr,
    PARENTS: tl.constexpr,
    PLANES: tl.constexpr,
):
    """(rows, PARENTS): the last plane of a child's coefficients, for one or two parents."""
    at = tl.cast(child * N_OUT + first, tl.int64)
    columns = tl.load(coefficients + (at * PLANES + PLANES - 1) * padded + n)
    if PARENTS == 1:
        return columns[:, None]
    else:
        at += tl.minimum(first + 1, N_OUT - 1) - first
        return tl.join(columns, tl.load(coefficients + (at * PLANES + PLANES - 1) * padded + n))


@triton.jit
def aggregate_kernel(
    children,
    weight,
    coefficients,
    out,
    positions,
    padded,
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
    PARENTS: tl.constexpr,
    PLANES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Σ_i coefficient_ij v_ij over `split` children: (splits, positions, N_OUT, R·B).

    Of PARENTS parents, whose transforms lie side by side; weighted by the last plane.
    """
    n, r = pose_rows(tl.program_id(0) * BLOCK_N, BLOCK_N, BLOCK_R)
    first_parent = tl.program_id(1) * PARENTS
    c, k = tl.arange(0, BLOCK_A), tl.arange(0, PARENTS * BLOCK_B)
    parent, d = first_parent + k // BLOCK_B, k % BLOCK_B
    real = (parent < N_OUT) & (d < B)
    inside = (n < positions) & (r < R)
    corner = window_corner(n, height, width, out_height, out_width, stride, N_IN, R * A) + r * A
    p_at = corner[:, None] + c[None, :]
    p_in = inside[:, None] & (c < A)[None, :]
    w_at = (parent * (A * B) + d)[None, :] + c[:, None] * B
    w_in = (c < A)[:, None] & real[None, :]
    total = tl.zeros((BLOCK_N * BLOCK_R, PARENTS * BLOCK_B), tl.float32)
    first = tl.program_id(2) * split
    last = tl.minimum(first + split, K * K * N_IN)
    coming = load_columns(coefficients, n, first_parent, first, padded, N_OUT, PARENTS, PLANES)
    for child in range(first, last):
        offset = child_offset(child, width, N_IN, K, R * A)
        p = tl.load(children + p_at + offset, mask=p_in, other=0.0)
        w = tl.load(weight + child * (N_OUT * A * B) + w_at, mask=w_in, other=0.0)
        votes = tl.dot(p, w, input_precision=PRECISION)
        # one child ahead: too narrow for the copies that the compiler has under way by itself
        column, following = coming.to(tl.float32), tl.minimum(child + 1, last - 1)
        coming = load_columns(
            coefficients, n, first_parent, following, padded, N_OUT, PARENTS, PLANES
        )
        column = tl.broadcast_to(column[:, :, None], (BLOCK_N * BLOCK_R, PARENTS, BLOCK_B))
        total += tl.reshape(column, total.shape) * votes
    to = tl.cast(tl.program_id(2), tl.int64) * positions * (N_OUT * R * B)
    to += ((n * N_OUT)[:, None] + parent[None, :]) * (R * B) + ((r * B)[:, None] + d[None, :])
    tl.store(out + to, total.to(out.dtype.element_ty), mask=inside[:, None] & real[None, :])


def large_splits(programs: int, items: int, chosen: Settings, out: Tensor) -> tuple[int, int]:
    """Into how many runs the items of every program go, and how long a run is."""
    slots = chosen.resident * geometry.multiprocessors(out.device)
    price = out.numel() / PARTIALS_AN_ITEM
    return geometry.split_evenly(programs, items, slots, price)


def large_coefficients(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    grad_poses: Tensor | None,
    sizes: Geometry,
    scale: float,
) -> Tensor:
    """(window, out, planes, padded positions): r, and backward the slopes."""
    planes = 1 if grad_poses is None else 2
    kinds = ("large_shares", "large_votes")
    if planes == 2:
        kinds = ("large_slopes", "large_votes", "large_children", "large_weight")
    chosen = [large_settings(kind, sizes, children.dtype) for kind in kinds]
    whole = max(LargeTile.of(sizes, each.rows).block_n for each in chosen)
    padded = whole * ceil_div(sizes.positions, whole)
    coefficients = torch.empty(
        (sizes.window, sizes.n_out, planes, padded),
        device=children.device,
        dtype=geometry.coefficient_dtype(children.dtype),
    )
    tile = LargeTile.of(sizes, chosen[0].rows)
    geometry.launch(
        coefficients_kernel,
        (padded // tile.block_n, ceil_div(sizes.window, chosen[0].group)),
        children=children,
        weight=weight,
        parents=parents,
        grad_poses=parents if grad_poses is None else grad_poses,
        coefficients=coefficients,
        padded=padded,
        scale=scale,
        **sizes.addressing(),
        **tile.constants(),
        BLOCK_J=tile.block_j,
        CHILDREN=chosen[0].group,
        PLANES=planes,
        PRECISION="ieee",
        **chosen[0].options(),
    )
    return coefficients


def large_sums(children: Tensor, weight: Tensor, coefficients: Tensor, sizes: Geometry) -> Tensor:
    """Votes weighted by the last plane of coefficients, added over the children."""
    chosen = large_settings("large_votes", sizes, children.dtype)
    tile = LargeTile.of(sizes, chosen.rows)
    tiles = ceil_div(sizes.positions, tile.block_n)
    groups = ceil_div(sizes.n_out, chosen.group)
    out = torch.empty(sizes.parents_shape(), device=children.device, dtype=children.dtype)
    splits, split = large_splits(tiles * groups, sizes.window, chosen, out)
    sums = partial(splits, out)
    geometry.launch(
        aggregate_kernel,
        (tiles, groups, splits),
        children=children,
        weight=weight,
        coefficients=coefficients,
        out=sums,
        padded=coefficients.shape[3],
        split=split,
        **sizes.addressing(),
        **tile.constants(),
        PARENTS=chosen.group,
        PLANES=coefficients.shape[2],
        PRECISION="ieee",
        **chosen.options(),
    )
    return add_splits(sums, out)


def large_votes(
    children: Tensor, weight: Tensor, parents: Tensor, sizes: Geometry, scale: float, keep: bool
) -> tuple[Tensor, Tensor]:
    """The parents' new poses, and r as (window, positions, out), empty unless `keep`."""
    coefficients = large_coefficients(children, weight, parents, None, sizes, scale)
    poses = large_sums(children, weight, coefficients, sizes)
    if not keep:
        return poses, coefficients.new_empty(0)
    return poses, coefficients[:, :, 0, : sizes.positions].transpose(1, 2).contiguous()
