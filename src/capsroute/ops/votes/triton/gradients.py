"""Kernels of the gradients of routed moments; `backward.py` derives and launches them."""

# Kernel arguments have no Python types, constants are in capitals.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803, N806

import triton
import triton.language as tl

from capsroute.ops.inverted.triton.common import window_corner
from capsroute.ops.inverted.triton.tile import (
    as_matrix,
    as_poses,
    from_stack,
    load_stack,
    load_transform,
    pose_dot,
    pose_elements,
    tile_rows,
)
from capsroute.ops.votes.triton.forward import child_activation, part_parents


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
