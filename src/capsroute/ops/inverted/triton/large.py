"""Kernels for large poses: a vote is a product of its own, and coefficients pass through memory.

`coefficients_kernel` writes r, or r and the slopes; `aggregate_kernel` sums up votes weighted by
either; `large_children_kernel` and `large_weight_kernel` form ∂L/∂v_ij = r_ij g_j + slope_ij q_j.
"""

# Kernel arguments have no Python types, constants are in capitals.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803

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
from capsroute.ops.inverted.triton.geometry import Geometry, ceil_div, power_of_two
from capsroute.ops.inverted.triton.splits import add_splits, partial
from capsroute.ops.inverted.triton.tuning import large_stages


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
        slope = scale * softmax_gradient(share, u, children.dtype.element_ty)
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


@triton.jit
def large_children_kernel(
    weight,
    parents,
    grad_poses,
    shares,
    slopes,
    grad_windows,
    positions,
    height,
    width,
    out_height,
    out_width,
    stride,
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
    """Σ_j ∂L/∂v_ij W_ijᵀ of one child, seen from each window: (k², positions, N_IN, R·A)."""
    child = tl.program_id(1)
    n, r = pose_rows(tl.program_id(0) * BLOCK_N, BLOCK_N, BLOCK_R)
    c, d = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_B)
    inside = (n < positions) & (r < R)
    w_at = tl.cast(child, tl.int64) * (N_OUT * A * B) + (c[None, :] * B + d[:, None])
    w_in = (c < A)[None, :] & (d < B)[:, None]
    q_at = (n * N_OUT * R + r)[:, None] * B + d[None, :]
    q_in = inside[:, None] & (d < B)[None, :]
    s_at = tl.cast(child, tl.int64) * positions * N_OUT + n * N_OUT
    total = tl.zeros((BLOCK_N * BLOCK_R, BLOCK_A), tl.float32)
    for parent in range(N_OUT):
        share = tl.load(shares + s_at + parent, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(slopes + s_at + parent, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad_poses + q_at + parent * (R * B), mask=q_in, other=0.0)
        q = tl.load(parents + q_at + parent * (R * B), mask=q_in, other=0.0)
        w = tl.load(weight + w_at + parent * (A * B), mask=w_in, other=0.0)
        grad_v = (share[:, None] * g + slope[:, None] * q).to(w.dtype)
        total = tl.dot(grad_v, w, total, input_precision=PRECISION)
    to = tl.cast(child // N_IN, tl.int64) * positions + n
    to = ((to * N_IN + child % N_IN) * R + r) * A
    tl.store(
        grad_windows + to[:, None] + c[None, :],
        total.to(grad_windows.dtype.element_ty),
        mask=inside[:, None] & (c < A)[None, :],
    )


@triton.jit
def large_weight_kernel(
    children,
    parents,
    grad_poses,
    shares,
    slopes,
    grad_weight,
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
    """Σ pᵀ ∂L/∂v of one child and parent over `split` positions: (splits, window, N_OUT, A, B)."""
    parent, child = tl.program_id(0) % N_OUT, tl.program_id(0) // N_OUT
    c, d = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_B)
    offset = child_offset(child, width, N_IN, K, R * A)
    pairs = tl.cast(child, tl.int64) * positions * N_OUT + parent
    total = tl.zeros((BLOCK_A, BLOCK_B), tl.float32)
    first = tl.program_id(1) * split
    last = tl.minimum(first + split, positions)
    for start in range(first, last, BLOCK_N):
        n, r = pose_rows(start, BLOCK_N, BLOCK_R)
        inside = (n < last) & (r < R)
        corner = window_corner(n, height, width, out_height, out_width, stride, N_IN, R * A)
        at = (corner + offset + r * A)[None, :] + c[:, None]
        p = tl.load(children + at, mask=inside[None, :] & (c < A)[:, None], other=0.0)
        share = tl.load(shares + pairs + n * N_OUT, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(slopes + pairs + n * N_OUT, mask=inside, other=0.0).to(tl.float32)
        q_at = ((n * N_OUT + parent) * R + r)[:, None] * B + d[None, :]
        q_in = inside[:, None] & (d < B)[None, :]
        g = tl.load(grad_poses + q_at, mask=q_in, other=0.0)
        q = tl.load(parents + q_at, mask=q_in, other=0.0)
        grad_v = (share[:, None] * g + slope[:, None] * q).to(p.dtype)
        total = tl.dot(p, grad_v, total, input_precision=PRECISION)
    to = (tl.cast(tl.program_id(1), tl.int64) * (K * K * N_IN) + child) * N_OUT + parent
    tl.store(
        grad_weight + to * (A * B) + (c[:, None] * B + d[None, :]),
        total.to(grad_weight.dtype.element_ty),
        mask=(c < A)[:, None] & (d < B)[None, :],
    )


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
    out = torch.empty(sizes.parents_shape(), device=children.device, dtype=children.dtype)
    sums = partial(splits, out)
    geometry.launch(
        aggregate_kernel,
        (tiles, sizes.n_out, splits),
        children=children,
        weight=weight,
        coefficients=slopes if backward else shares,
        out=sums,
        split=split,
        **sizes.addressing(),
        **blocks,
        PRECISION="ieee",
        num_warps=4,
        num_stages=large_stages(children.dtype),
    )
    return add_splits(sums, out), shares, slopes


def large_gradients(
    grad_poses: Tensor,
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    grad_windows: Tensor,
    sizes: Geometry,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Fill `grad_windows`; return ∂L/∂weight and ∂L/∂parents."""
    grad_parents, shares, slopes = aggregate_large(
        children, weight, parents, grad_poses, sizes, scale
    )
    blocks = large_blocks(sizes, 64)
    tensors = {"parents": parents, "grad_poses": grad_poses, "shares": shares, "slopes": slopes}
    geometry.launch(
        large_children_kernel,
        (ceil_div(sizes.positions, blocks["BLOCK_N"]), sizes.window),
        weight=weight,
        **tensors,
        grad_windows=grad_windows,
        **sizes.addressing(),
        **blocks,
        PRECISION="ieee",
        num_warps=4,
        num_stages=large_stages(children.dtype),
    )
    programs = sizes.window * sizes.n_out
    slots = 4 * geometry.multiprocessors(children.device)
    splits, run = geometry.split_evenly(
        programs, ceil_div(sizes.positions, blocks["BLOCK_N"]), slots
    )
    grad_weight = torch.empty_like(weight)
    sums = partial(splits, grad_weight)
    geometry.launch(
        large_weight_kernel,
        (programs, splits),
        children=children,
        **tensors,
        grad_weight=sums,
        split=run * blocks["BLOCK_N"],
        **sizes.addressing(),
        **blocks,
        PRECISION="ieee",
        num_warps=4,
        num_stages=large_stages(children.dtype),
    )
    return add_splits(sums, grad_weight), grad_parents
