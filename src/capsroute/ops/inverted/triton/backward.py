"""Kernels for ∂L/∂children and ∂L/∂weight, given r and scale · ∂L/∂a of every pair.

∂L/∂v_ij = r_ij g_j + slope_ij q_j is formed in registers and goes straight into two products for
the tensor cores. No atomics: sums over positions, parents and windows that cross programs go
through buffers that are added in a fixed order.
"""

# Kernel arguments have no Python types, constants are in capitals, tuples grow by addition.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"
# ruff: noqa: N803, N806, RUF005

import torch
import triton
import triton.language as tl
from torch import Tensor

from capsroute.ops.inverted.triton import geometry
from capsroute.ops.inverted.triton.forward import (
    _child_offset,
    _pose_rows,
    _window_corner,
    large_blocks,
    split_evenly,
    weighted_votes,
)
from capsroute.ops.inverted.triton.geometry import Geometry, ceil_div, power_of_two


@triton.jit
def _spread(
    x,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """(N, J) -> (N·R, J·B): a pair's coefficient beside each element of its vote."""
    x = tl.broadcast_to(x[:, None, :, None], (BLOCK_N, BLOCK_R, BLOCK_J, BLOCK_B))
    return tl.reshape(x, (BLOCK_N * BLOCK_R, BLOCK_J * BLOCK_B))


@triton.jit
def small_children_kernel(
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
    split,
    N_IN: tl.constexpr,
    N_OUT: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """∂L/∂p of `split` children, seen from each window: (parent blocks, k², positions, N_IN, R·A).

    A tile's rows are (position, row of the pose), its columns (parent, column of the pose). g and q
    stay in registers while the children pass. weight is (window, A, N_OUT, B).
    """
    column = tl.arange(0, BLOCK_J * BLOCK_B)
    j, d = tl.program_id(2) * BLOCK_J + column // BLOCK_B, column % BLOCK_B
    real = (j < N_OUT) & (d < B)
    c = tl.arange(0, BLOCK_A)
    # transposed: (parent and column, row of the transform)
    w_at = c[None, :] * (N_OUT * B) + (j * B + d)[:, None]
    w_in = (c < A)[None, :] & real[:, None]
    start = tl.program_id(0) * BLOCK_N
    n, r = _pose_rows(start, BLOCK_N, BLOCK_R)
    at = (n * N_OUT * R + r)[:, None] * B + (j * (R * B) + d)[None, :]
    inside = (n < positions) & (r < R)
    g = tl.load(grad_poses + at, mask=inside[:, None] & real[None, :], other=0.0)
    q = tl.load(parents + at, mask=inside[:, None] & real[None, :], other=0.0)
    p_at = (n * (N_IN * R) + r)[:, None] * A + c[None, :]
    p_in = inside[:, None] & (c < A)[None, :]
    parent = tl.program_id(2) * BLOCK_J + tl.arange(0, BLOCK_J)
    pair = start + tl.arange(0, BLOCK_N)
    s_at = pair[:, None] * N_OUT + parent[None, :]
    s_in = (pair < positions)[:, None] & (parent < N_OUT)[None, :]
    first = tl.program_id(1) * split
    for child in range(first, tl.minimum(first + split, K * K * N_IN)):
        pairs = tl.cast(child, tl.int64) * positions * N_OUT
        share = tl.load(shares + pairs + s_at, mask=s_in, other=0.0).to(tl.float32)
        slope = tl.load(slopes + pairs + s_at, mask=s_in, other=0.0).to(tl.float32)
        w = tl.load(weight + child * (A * N_OUT * B) + w_at, mask=w_in, other=0.0)
        grad_v = _spread(share, BLOCK_N, BLOCK_R, BLOCK_J, BLOCK_B) * g
        grad_v += _spread(slope, BLOCK_N, BLOCK_R, BLOCK_J, BLOCK_B) * q
        grad_p = tl.dot(grad_v.to(w.dtype), w, input_precision=PRECISION)
        windows = tl.cast(tl.program_id(2) * (K * K) + child // N_IN, tl.int64) * positions
        to = (windows * N_IN + child % N_IN) * (R * A)
        tl.store(grad_windows + to + p_at, grad_p.to(grad_windows.dtype.element_ty), mask=p_in)


@triton.jit
def small_weight_kernel(
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
    BLOCK_J: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """∂L/∂W of GROUP children over `split` positions: (splits, window, A, N_OUT, B).

    A tile of g and q serves the whole group. Rows past the end are read from the last position and
    meet coefficients of zero; columns past the end are not stored.
    """
    WINDOW: tl.constexpr = K * K * N_IN
    EXACT: tl.constexpr = N_OUT % BLOCK_J == 0 and B == BLOCK_B
    column = tl.arange(0, BLOCK_J * BLOCK_B)
    j, d = tl.program_id(2) * BLOCK_J + column // BLOCK_B, column % BLOCK_B
    real = (j < N_OUT) & (d < B)
    parent = tl.program_id(2) * BLOCK_J + tl.arange(0, BLOCK_J)
    c = tl.arange(0, BLOCK_A)
    total = ()
    for _ in tl.static_range(GROUP):
        total = total + (tl.zeros((BLOCK_A, BLOCK_J * BLOCK_B), tl.float32),)
    first = tl.program_id(1) * split
    last = tl.minimum(first + split, positions)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        s_at = n[:, None] * N_OUT + parent[None, :]
        s_in = (n < last)[:, None] & (parent < N_OUT)[None, :]
        n, r = _pose_rows(start, BLOCK_N, BLOCK_R)
        inside = (n < last) & (r < R)
        n, row = tl.minimum(n, last - 1), tl.minimum(r, R - 1)
        at = (n * N_OUT * R + row)[:, None] * B + (j * (R * B) + d)[None, :]
        if EXACT:
            g = tl.load(grad_poses + at)
            q = tl.load(parents + at)
        else:
            g = tl.load(grad_poses + at, mask=real[None, :], other=0.0)
            q = tl.load(parents + at, mask=real[None, :], other=0.0)
        corner = _window_corner(n, height, width, out_height, out_width, stride, N_IN, R * A)
        p_at = (corner + row * A)[None, :] + c[:, None]
        p_in = inside[None, :] & (c < A)[:, None]
        new = ()
        for member in tl.static_range(GROUP):
            # a last group that is too large repeats the last child, and writes the same twice
            child = tl.minimum(tl.program_id(0) * GROUP + member, WINDOW - 1)
            pairs = tl.cast(child, tl.int64) * positions * N_OUT
            share = tl.load(shares + pairs + s_at, mask=s_in, other=0.0).to(tl.float32)
            slope = tl.load(slopes + pairs + s_at, mask=s_in, other=0.0).to(tl.float32)
            grad_v = _spread(share, BLOCK_N, BLOCK_R, BLOCK_J, BLOCK_B) * g
            grad_v += _spread(slope, BLOCK_N, BLOCK_R, BLOCK_J, BLOCK_B) * q
            offset = _child_offset(child, width, N_IN, K, R * A)
            p = tl.load(children + offset + p_at, mask=p_in, other=0.0)
            product = tl.dot(p, grad_v.to(p.dtype), total[member], input_precision=PRECISION)
            new = new + (product,)
        total = new
    for member in tl.static_range(GROUP):
        child = tl.minimum(tl.program_id(0) * GROUP + member, WINDOW - 1)
        to = (tl.cast(tl.program_id(1), tl.int64) * WINDOW + child) * (A * N_OUT * B)
        tl.store(
            grad_weight + to + c[:, None] * (N_OUT * B) + (j * B + d)[None, :],
            total[member].to(grad_weight.dtype.element_ty),
            mask=(c < A)[:, None] & real[None, :],
        )


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
    """Σ_j ∂L/∂v_ij W_ijᵀ of one child, seen from each window: (1, k², positions, N_IN, R·A)."""
    child = tl.program_id(1)
    n, r = _pose_rows(tl.program_id(0) * BLOCK_N, BLOCK_N, BLOCK_R)
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
    offset = _child_offset(child, width, N_IN, K, R * A)
    pairs = tl.cast(child, tl.int64) * positions * N_OUT + parent
    total = tl.zeros((BLOCK_A, BLOCK_B), tl.float32)
    first = tl.program_id(1) * split
    last = tl.minimum(first + split, positions)
    for start in range(first, last, BLOCK_N):
        n, r = _pose_rows(start, BLOCK_N, BLOCK_R)
        inside = (n < last) & (r < R)
        corner = _window_corner(n, height, width, out_height, out_width, stride, N_IN, R * A)
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


@triton.jit
def fold_kernel(
    grad_windows,
    grad_children,
    positions,
    height,
    width,
    out_height,
    out_width,
    stride,
    pixels,
    K: tl.constexpr,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Each child gathers its gradient from the windows that see it, and from the parent blocks."""
    pixel = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    x = pixel % width
    y = pixel // width % height
    image = pixel // (width * height)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = (pixel < pixels)[:, None] & (channel < CHANNELS)[None, :]
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for tap in tl.static_range(K * K):
        up, left = y - tap // K, x - tap % K
        row, column = up // stride, left // stride
        seen = (up >= 0) & (left >= 0) & (row * stride == up) & (column * stride == left)
        seen = seen & (row < out_height) & (column < out_width)
        n = tl.cast((image * out_height + row) * out_width + column, tl.int64)
        for part in tl.static_range(PARTS):
            base = tl.cast(part * (K * K) + tap, tl.int64) * positions
            at = ((base + n) * CHANNELS)[:, None] + channel[None, :]
            mask = real & seen[:, None]
            total += tl.load(grad_windows + at, mask=mask, other=0.0).to(tl.float32)
    to = (tl.cast(pixel, tl.int64) * CHANNELS)[:, None] + channel[None, :]
    tl.store(grad_children + to, total.to(grad_children.dtype.element_ty), mask=real)


def gradients(
    grad_poses: Tensor,
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    sizes: Geometry,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """∂L/∂children, ∂L/∂weight and ∂L/∂parents."""
    grad_parents, shares, slopes = weighted_votes(
        children, weight, parents, grad_poses, sizes, scale, keep=True
    )
    run = _small_gradients if sizes.small else _large_gradients
    grad_windows, grad_weight = run(grad_poses, children, weight, parents, shares, slopes, sizes)
    return _fold(grad_windows, children, sizes), grad_weight, grad_parents


def _windows(parts: int, sizes: Geometry, like: Tensor) -> Tensor:
    shape = (parts, sizes.k**2, sizes.positions, sizes.n_in, sizes.rows * sizes.a)
    return torch.empty(shape, device=like.device, dtype=like.dtype)


def _position_splits(sizes: Geometry, block: int, programs: int, wanted: int) -> tuple[int, int]:
    blocks = ceil_div(sizes.positions, block)
    run = ceil_div(blocks, max(1, wanted // programs))
    return ceil_div(blocks, run), run * block


def _sum_weight(partial: Tensor, weight: Tensor) -> Tensor:
    total = partial[0] if partial.shape[0] == 1 else partial.sum(0).to(weight.dtype)
    return total.view(weight.shape)


def gradient_tuning(sizes: Geometry, dtype: torch.dtype) -> dict[str, int]:
    """Pose rows and columns of a tile, warps, programs a multiprocessor.

    `c_` for ∂L/∂children, `w_` for ∂L/∂weight.
    """
    if dtype == torch.float32:  # no tensor cores, so the tile lives in registers
        return {
            "c_rows": 32,
            "w_rows": 32,
            "columns": 64,
            "group": 4,
            "num_warps": 4,
            "programs": 8,
        }
    return {"c_rows": 64, "w_rows": 64, "columns": 128, "group": 4, "num_warps": 4, "programs": 8}


def _small_gradients(
    grad_poses: Tensor,
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    shares: Tensor,
    slopes: Tensor,
    sizes: Geometry,
) -> tuple[Tensor, Tensor]:
    tuning = gradient_tuning(sizes, children.dtype)
    wanted = tuning["programs"] * geometry.multiprocessors(children.device)
    block_b, block_r = power_of_two(sizes.b), power_of_two(sizes.rows)
    block_j = power_of_two(sizes.n_out)
    block_j = max(ceil_div(16, block_b), min(block_j, tuning["columns"] // block_b))
    parts = ceil_div(sizes.n_out, block_j)
    tensors = {"parents": parents, "grad_poses": grad_poses, "shares": shares, "slopes": slopes}
    blocks = {"BLOCK_R": block_r, "BLOCK_J": block_j, "BLOCK_A": 16, "BLOCK_B": block_b}

    block_n = max(ceil_div(16, block_r), tuning["c_rows"] // block_r)
    tiles = ceil_div(sizes.positions, block_n)
    splits, split = split_evenly(tiles * parts, sizes.window, wanted)
    grad_windows = _windows(parts, sizes, children)
    geometry.launch(
        small_children_kernel,
        (tiles, splits, parts),
        weight=weight,
        **tensors,
        grad_windows=grad_windows,
        split=split,
        **sizes.addressing(),
        BLOCK_N=block_n,
        **blocks,
        PRECISION="ieee",
        num_warps=tuning["num_warps"],
        num_stages=2,
    )
    block_n = max(ceil_div(16, block_r), tuning["w_rows"] // block_r)
    groups = ceil_div(sizes.window, tuning["group"])
    splits, split = _position_splits(sizes, block_n, groups * parts, wanted)
    dtype = weight.dtype if splits == 1 else torch.float32
    grad_weight = torch.empty((splits, *weight.shape), device=weight.device, dtype=dtype)
    geometry.launch(
        small_weight_kernel,
        (groups, splits, parts),
        children=children,
        **tensors,
        grad_weight=grad_weight,
        split=split,
        **sizes.addressing(),
        BLOCK_N=block_n,
        **blocks,
        GROUP=tuning["group"],
        PRECISION="ieee",
        num_warps=tuning["num_warps"],
        num_stages=2,
    )
    return grad_windows, _sum_weight(grad_weight, weight)


def _large_gradients(
    grad_poses: Tensor,
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    shares: Tensor,
    slopes: Tensor,
    sizes: Geometry,
) -> tuple[Tensor, Tensor]:
    grad_windows = _windows(1, sizes, children)
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
        num_stages=3,
    )
    programs = sizes.window * sizes.n_out
    wanted = 4 * geometry.multiprocessors(children.device)
    splits, split = _position_splits(sizes, blocks["BLOCK_N"], programs, wanted)
    dtype = weight.dtype if splits == 1 else torch.float32
    grad_weight = torch.empty((splits, *weight.shape), device=weight.device, dtype=dtype)
    geometry.launch(
        large_weight_kernel,
        (programs, splits),
        children=children,
        **tensors,
        grad_weight=grad_weight,
        split=split,
        **sizes.addressing(),
        **blocks,
        PRECISION="ieee",
        num_warps=4,
        num_stages=3,
    )
    return grad_windows, _sum_weight(grad_weight, weight)


def _fold(grad_windows: Tensor, children: Tensor, sizes: Geometry) -> Tensor:
    parts = grad_windows.shape[0]
    if parts == 1 and sizes.k == 1 and sizes.stride == 1:
        return grad_windows.view(children.shape)  # every child is seen once
    channels = sizes.n_in * sizes.rows * sizes.a
    pixels = sizes.batch * sizes.height * sizes.width
    block_c = min(1024, power_of_two(channels))
    block_p = max(1, 2048 // block_c)
    grad_children = torch.empty_like(children)
    addressing = sizes.addressing()
    geometry.launch(
        fold_kernel,
        (ceil_div(pixels, block_p), ceil_div(channels, block_c)),
        grad_windows=grad_windows,
        grad_children=grad_children,
        **{name: addressing[name] for name in addressing if name.islower()},
        pixels=pixels,
        K=sizes.k,
        CHANNELS=channels,
        PARTS=parts,
        BLOCK_P=block_p,
        BLOCK_C=block_c,
        num_warps=4,
    )
    return grad_children
