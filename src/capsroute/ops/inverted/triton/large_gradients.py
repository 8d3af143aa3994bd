"""∂L/∂children and ∂L/∂weight of large poses: both form ∂L/∂v_ij = r_ij g_j + slope_ij q_j.

r and the slopes come from `large.py`, which says how they lie.
"""

# Kernel arguments have no Python types, constants are in capitals, tuples grow by addition.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment,var-annotated"
# ruff: noqa: N803, N806, RUF005

import torch
import triton
import triton.language as tl
from torch import Tensor

from capsroute.ops.inverted.triton import geometry
from capsroute.ops.inverted.triton.common import child_offset, window_corner
from capsroute.ops.inverted.triton.geometry import Geometry, ceil_div
from capsroute.ops.inverted.triton.large import (
    large_coefficients,
    large_splits,
    large_sums,
    pose_rows,
)
from capsroute.ops.inverted.triton.splits import add_splits, partial
from capsroute.ops.inverted.triton.tuning import LargeTile, large_settings


@triton.jit
def unstack(x, COUNT: tl.constexpr):
    """(rows, COUNT) -> COUNT times (rows,); COUNT is a power of two."""
    if COUNT == 1:
        return (tl.reshape(x, (x.shape[0],)),)
    else:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], COUNT // 2, 2)))
        even, odd = unstack(even, COUNT // 2), unstack(odd, COUNT // 2)
        columns = ()
        for i in tl.static_range(COUNT // 2):
            columns = columns + (even[i], odd[i])
        return columns


@triton.jit
def load_pairs(
    coefficients,
    n,
    first,
    parent,
    padded,
    N_OUT: tl.constexpr,
    WINDOW: tl.constexpr,
    CHILDREN: tl.constexpr,
):
    """r and slopes of one parent and CHILDREN children, (rows,) each: r, slope, r, slope, ...

    Those of all children are one load, wide enough to be under way while others are multiplied.
    """
    k = tl.arange(0, 2 * CHILDREN)
    child = tl.minimum(first + k // 2, WINDOW - 1)
    at = tl.cast((child * N_OUT + parent) * 2 + k % 2, tl.int64) * padded
    pairs = tl.load(coefficients + at[:, None] + n[None, :])
    return unstack(tl.trans(pairs), 2 * CHILDREN)


@triton.jit
def large_children_kernel(
    weight,
    parents,
    grad_poses,
    coefficients,
    grad_windows,
    positions,
    padded,
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
    CHILDREN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Σ_j ∂L/∂v_ij W_ijᵀ of CHILDREN children, from each window: (k², positions, N_IN, R·A)."""
    WINDOW: tl.constexpr = K * K * N_IN
    n, r = pose_rows(tl.program_id(0) * BLOCK_N, BLOCK_N, BLOCK_R)
    first = tl.program_id(1) * CHILDREN
    c, d = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_B)
    inside = (n < positions) & (r < R)
    w_at = c[None, :] * B + d[:, None]
    w_in = (c < A)[None, :] & (d < B)[:, None]
    q_at = (n * (N_OUT * R) + r)[:, None] * B + d[None, :]
    q_in = inside[:, None] & (d < B)[None, :]
    total = ()
    for _ in tl.static_range(CHILDREN):
        total = total + (tl.zeros((BLOCK_N * BLOCK_R, BLOCK_A), tl.float32),)
    for parent in range(N_OUT):
        g = tl.load(grad_poses + q_at + parent * (R * B), mask=q_in, other=0.0)
        q = tl.load(parents + q_at + parent * (R * B), mask=q_in, other=0.0)
        pairs = load_pairs(coefficients, n, first, parent, padded, N_OUT, WINDOW, CHILDREN)
        new = ()
        for s in tl.static_range(CHILDREN):
            child = tl.minimum(first + s, WINDOW - 1)
            at = weight + (child * N_OUT + parent) * (A * B)
            w = tl.load(at + w_at, mask=w_in, other=0.0)
            # bf16 stays bf16: two elements an instruction, rounded where plain PyTorch rounds
            grad_v = (pairs[2 * s][:, None] * g + pairs[2 * s + 1][:, None] * q).to(w.dtype)
            new = new + (tl.dot(grad_v, w, total[s], input_precision=PRECISION),)
        total = new
    for s in tl.static_range(CHILDREN):
        child = first + s
        to = tl.cast(child // N_IN, tl.int64) * positions + n
        to = ((to * N_IN + child % N_IN) * R + r) * A
        tl.store(
            grad_windows + to[:, None] + c[None, :],
            total[s].to(grad_windows.dtype.element_ty),
            mask=(inside & (child < WINDOW))[:, None] & (c < A)[None, :],
        )


@triton.jit
def large_weight_kernel(
    children,
    parents,
    grad_poses,
    coefficients,
    grad_weight,
    positions,
    padded,
    height: tl.constexpr,
    width: tl.constexpr,
    out_height: tl.constexpr,
    out_width: tl.constexpr,
    stride: tl.constexpr,
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
    CHILDREN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Σ pᵀ ∂L/∂v of a parent and CHILDREN children, over `split` positions.

    (splits, window, N_OUT, A, B). The product is transposed, (∂L/∂v)ᵀ p: its first operand may be
    formed in registers, its second is read in shared memory. The image's sizes are constants,
    because every turn divides by them.
    """
    WINDOW: tl.constexpr = K * K * N_IN
    parent, first_child = tl.program_id(0) % N_OUT, tl.program_id(0) // N_OUT * CHILDREN
    c, d = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_B)
    total = ()
    for _ in tl.static_range(CHILDREN):
        total = total + (tl.zeros((BLOCK_B, BLOCK_A), tl.float32),)
    first = tl.program_id(1) * split
    last = tl.minimum(first + split, positions)
    tl.assume(first < last)  # for a loop that may not run at all, no product would be asynchronous
    for start in range(first, last, BLOCK_N):
        n, r = pose_rows(start, BLOCK_N, BLOCK_R)
        inside = (n < positions) & (r < R)
        corner = window_corner(n, height, width, out_height, out_width, stride, N_IN, R * A) + r * A
        q_at = ((n * N_OUT + parent) * R + r)[None, :] * B + d[:, None]
        q_in = inside[None, :] & (d < B)[:, None]
        g = tl.load(grad_poses + q_at, mask=q_in, other=0.0)
        q = tl.load(parents + q_at, mask=q_in, other=0.0)
        pairs = load_pairs(coefficients, n, first_child, parent, padded, N_OUT, WINDOW, CHILDREN)
        new = ()
        for s in tl.static_range(CHILDREN):
            child = tl.minimum(first_child + s, WINDOW - 1)
            at = (corner + child_offset(child, width, N_IN, K, R * A))[:, None] + c[None, :]
            p = tl.load(children + at, mask=inside[:, None] & (c < A)[None, :], other=0.0)
            grad_v = (pairs[2 * s][None, :] * g + pairs[2 * s + 1][None, :] * q).to(p.dtype)
            new = new + (tl.dot(grad_v, p, total[s], input_precision=PRECISION),)
        total = new
    for s in tl.static_range(CHILDREN):
        child = first_child + s
        to = (tl.cast(tl.program_id(1), tl.int64) * WINDOW + child) * N_OUT + parent
        tl.store(
            grad_weight + to * (A * B) + (c[None, :] * B + d[:, None]),
            total[s].to(grad_weight.dtype.element_ty),
            mask=(c < A)[None, :] & (d < B)[:, None] & (child < WINDOW),
        )


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
    coefficients = large_coefficients(children, weight, parents, grad_poses, sizes, scale)
    shared = {
        "parents": parents,
        "grad_poses": grad_poses,
        "coefficients": coefficients,
        "padded": coefficients.shape[3],
        "PRECISION": "ieee",
        **sizes.addressing(),
    }
    chosen = large_settings("large_children", sizes, children.dtype)
    tile = LargeTile.of(sizes, chosen.rows)
    geometry.launch(
        large_children_kernel,
        (ceil_div(sizes.positions, tile.block_n), ceil_div(sizes.window, chosen.group)),
        weight=weight,
        grad_windows=grad_windows,
        **shared,
        **tile.constants(),
        CHILDREN=chosen.group,
        **chosen.options(),
    )
    chosen = large_settings("large_weight", sizes, children.dtype)
    tile = LargeTile.of(sizes, chosen.rows)
    grad_weight = torch.empty_like(weight)
    programs = ceil_div(sizes.window, chosen.group) * sizes.n_out
    blocks = ceil_div(sizes.positions, tile.block_n)
    splits, run = large_splits(programs, blocks, chosen, grad_weight)
    sums = partial(splits, grad_weight)
    geometry.launch(
        large_weight_kernel,
        (programs, splits),
        children=children,
        grad_weight=sums,
        split=run * tile.block_n,
        **shared,
        **tile.constants(),
        CHILDREN=chosen.group,
        **chosen.options(),
    )
    return add_splits(sums, grad_weight), large_sums(children, weight, coefficients, sizes)
