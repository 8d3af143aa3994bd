"""The kernels of backward.py for small poses: coefficients, then one kernel for each gradient.

∂L/∂v_ij = r_ij g_j + slope_ij q_j, with slope = scale · ∂L/∂a, is formed in registers and goes
straight into products of the tensor cores.
"""

# Kernel arguments have no Python types, constants are in capitals, tuples grow by addition.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment,var-annotated"
# ruff: noqa: N803, N806, RUF005

import triton
import triton.language as tl

from capsroute.ops.inverted.triton.common import softmax, softmax_gradient, window_corner
from capsroute.ops.inverted.triton.tile import (
    as_matrix,
    as_poses,
    column_elements,
    from_stack,
    in_accumulator,
    load_stack,
    load_transform,
    pose_dot,
    pose_elements,
    tile_rows,
)


@triton.jit(do_not_specialize=["begin", "end", "split"])
def small_coefficients_kernel(
    children,
    weight,
    parents,
    grad_poses,
    coefficients,
    columns,
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
    PRECISION: tl.constexpr,
):
    """r and the slopes of `split` stacks: (children, positions, parents, [r, slope]), padded.

    This and the next two take the stacks from `begin` to `end`, and only their coefficients exist.
    The first program of a tile leaves q and g for ∂L/∂weight, as it multiplies them: by columns,
    ([q, g], positions, parents, B_PAD, R_PAD), zero where padded.
    """
    MEMBERS: tl.constexpr = 16 // A_PAD
    POSITIONS: tl.constexpr = ROWS // R_PAD
    PARENTS: tl.constexpr = COLUMNS // B_PAD
    start = tl.program_id(0) * POSITIONS
    row, r = tile_rows(start, ROWS, R_PAD)
    row = tl.minimum(row, positions - 1)
    corner = window_corner(row, height, width, out_height, out_width, stride, N_IN, R * A)
    n = start + tl.arange(0, POSITIONS)
    inside = (n < positions)[:, None, None]
    n = tl.minimum(n, positions - 1)
    j = tl.arange(0, PARENTS)
    pair = (n[:, None] * PARENTS + j[None, :])[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    element, real = pose_elements(j, N_OUT, R, B, R_PAD, B_PAD)
    own = (n * (N_OUT * R * B))[:, None, None, None] + element
    q = tl.load(parents + own, mask=real, other=0.0)
    g = tl.load(grad_poses + own, mask=real, other=0.0)
    coefficients = from_stack(coefficients, begin, MEMBERS * 2 * PARENTS, positions)
    first = begin + tl.program_id(1) * split
    if first == 0:
        each = PARENTS * R_PAD * B_PAD
        to = columns + (n * each)[:, None, None, None] + column_elements(j, R_PAD, B_PAD)
        tl.store(to, q, mask=inside[:, :, :, None])
        tl.store(to + tl.cast(positions, tl.int64) * each, g, mask=inside[:, :, :, None])
    q = q.to(tl.float32) * scale
    g = g.to(tl.float32)
    last = tl.minimum(first + split, end)
    for stack in tl.range(first, last):
        p = load_stack(children, corner, r, stack, width, N_IN, K, R, A, R_PAD, A_PAD)
        for member in tl.static_range(MEMBERS):
            w = load_transform(weight, stack, tl.arange(0, COLUMNS), member, COLUMNS, A_PAD)
            v = as_poses(tl.dot(p, w, input_precision=PRECISION), R_PAD, B_PAD, HIGH)
            agreement = pose_dot(v, q)
            if N_OUT != PARENTS:
                agreement = tl.where((j < N_OUT)[None, :], agreement, float("-inf"))
            share = softmax(agreement, children.dtype.element_ty)
            u = pose_dot(v, g)
            slope = scale * softmax_gradient(share, u, children.dtype.element_ty)
            both = tl.join(share, slope).to(coefficients.dtype.element_ty)
            at = (tl.cast(stack, tl.int64) * MEMBERS + member) * positions * (2 * PARENTS)
            tl.store(coefficients + at + pair, both, mask=inside)


@triton.jit(do_not_specialize=["begin", "end", "split", "first_part"])
def small_children_kernel(
    weight,
    parents,
    grad_poses,
    coefficients,
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
    first_part,
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
    ADD: tl.constexpr,
):
    """∂L/∂p of `split` stacks, seen from each window: (parts, k², positions, N_IN, R·A).

    A part has PART columns: g and q of that many stay in registers while the children pass, half a
    stack at a time, since a product needs 8 columns and no more. Here are those from `first_part`
    on; they start the sums in `grad_windows`, or ADD to what launches before have left there.
    """
    MEMBERS: tl.constexpr = 8 // A_PAD
    POSITIONS: tl.constexpr = ROWS // R_PAD
    PARENTS: tl.constexpr = COLUMNS // B_PAD
    LOW: tl.constexpr = PARENTS // HIGH
    LOW_PART: tl.constexpr = PART // (HIGH * B_PAD)
    part = first_part + tl.program_id(2)
    start = tl.program_id(0) * POSITIONS
    row, r = tile_rows(start, ROWS, R_PAD)
    n = tl.minimum(start + tl.arange(0, POSITIONS), positions - 1)
    index = tl.arange(0, PART // B_PAD)
    j = index // LOW_PART * LOW + part * LOW_PART + index % LOW_PART
    two = tl.arange(0, 2 * PART // B_PAD)
    two = (two // (2 * LOW_PART) * LOW + part * LOW_PART) * 2 + two % (2 * LOW_PART)
    pair = n[:, None] * (2 * PARENTS) + two[None, :]
    element, real = pose_elements(j, N_OUT, R, B, R_PAD, B_PAD)
    own = (n * (N_OUT * R * B))[:, None, None, None] + element
    g = tl.load(grad_poses + own, mask=real, other=0.0)
    q = tl.load(parents + own, mask=real, other=0.0)
    g = in_accumulator(g, R_PAD, B_PAD, HIGH)
    q = in_accumulator(q, R_PAD, B_PAD, HIGH)
    column = part * PART + tl.arange(0, PART)
    k = tl.arange(0, 8)
    coefficients = from_stack(coefficients, begin, 2 * MEMBERS * 2 * PARENTS, positions)
    slot = tl.cast(tl.program_id(2), tl.int64) * (K * K)
    windows = grad_windows + slot * positions * (N_IN * R * A)
    first = begin + tl.program_id(1) * split
    last = tl.minimum(first + split, end)
    for stack in tl.range(first, last):
        for s in tl.static_range(2):
            half = stack * 2 + s
            grad_p = tl.zeros((ROWS, 8), tl.float32)
            for member in tl.static_range(MEMBERS):
                at = (tl.cast(half, tl.int64) * MEMBERS + member) * positions * (2 * PARENTS)
                both = tl.load(coefficients + at + pair)
                share, slope = tl.split(tl.reshape(both, (POSITIONS, PART // B_PAD, 2)))
                # bf16 stays bf16: two elements an instruction, rounded where plain PyTorch rounds
                grad_v = share[:, None, :, None] * g + slope[:, None, :, None] * q
                grad_v = as_matrix(grad_v.to(g.dtype), R_PAD, B_PAD, HIGH)
                w = load_transform(weight, half, column, member, COLUMNS, A_PAD, 8)
                grad_p = tl.dot(grad_v, tl.trans(w), grad_p, input_precision="ieee")
            child = half * MEMBERS + k // A_PAD
            tap = tl.cast(child // N_IN, tl.int64) * positions * (N_IN * R * A)
            to = windows + (tap + child % N_IN * (R * A) + k % A_PAD)[None, :]
            to += ((row * N_IN * R + r) * A)[:, None]
            real_column = (child < K * K * N_IN) & (k % A_PAD < A)
            inside = ((row < positions) & (r < R))[:, None] & real_column[None, :]
            if ADD:
                grad_p += tl.load(to, mask=inside, other=0.0).to(tl.float32)
            tl.store(to, grad_p.to(windows.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["begin", "end", "split"])
def small_weight_kernel(
    children,
    columns,
    coefficients,
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
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    R_PAD: tl.constexpr,
    A_PAD: tl.constexpr,
    B_PAD: tl.constexpr,
    HIGH: tl.constexpr,
    PART: tl.constexpr,
    HALVES: tl.constexpr,
):
    """∂L/∂W of HALVES half stacks over `split` positions: (splits, (end − begin) · 16, COLUMNS).

    A tile of q and g (`columns`, from the kernel of the coefficients), PART columns wide, serves
    all the children. The product is (parent and column) × (half a stack), its inner axis
    (position, row), both ordered so that a thread needs few coefficients: as an operand it owns
    inner elements 2m, 2m + 1 of every 8 and rows l, l + 8 of every 16.
    """
    MEMBERS: tl.constexpr = 8 // A_PAD
    STACKS: tl.constexpr = (K * K * N_IN + 2 * MEMBERS - 1) // (2 * MEMBERS)
    PARENTS: tl.constexpr = COLUMNS // B_PAD
    OWN: tl.constexpr = PART // B_PAD
    RL: tl.constexpr = 2 if R_PAD > 1 else 1
    BL: tl.constexpr = 2 if B_PAD > 1 else 1
    JL: tl.constexpr = 8 if OWN >= 8 else OWN
    row = tl.arange(0, BLOCK_N * R_PAD)
    row_n, row_r = row // (4 * R_PAD) * 4 + row // RL % 4, row // (4 * RL) * RL % R_PAD + row % RL
    j = tl.program_id(2) * OWN + tl.arange(0, OWN)
    two = tl.program_id(2) * (2 * OWN) + tl.arange(0, 2 * OWN)
    pose = tl.arange(0, B_PAD * R_PAD)[None, None, :]
    element = (j * (B_PAD * R_PAD))[None, :, None] + pose
    coefficients = from_stack(coefficients, begin, 2 * MEMBERS * 2 * PARENTS, positions)
    # a last program with too few of them repeats some, and writes the same twice
    first_half = tl.minimum(begin * 2 + tl.program_id(0) * HALVES, end * 2 - HALVES)
    # true anyway, but a bound that the compiler knows saves registers
    first_half = tl.minimum(first_half, STACKS * 2 - HALVES)
    total = ()
    for _ in tl.static_range(HALVES):
        total = total + (tl.zeros((PART, 8), tl.float32),)
    first = tl.program_id(1) * split
    last = tl.minimum(first + split, positions)
    for start in tl.range(first, last, BLOCK_N):
        # rows past the end are read from the last position and meet coefficients of zero
        n = start + tl.arange(0, BLOCK_N)
        inside = (n < last)[:, None]
        n = tl.minimum(n, last - 1)
        own = columns + (n * (COLUMNS * R_PAD))[:, None, None] + element
        q, g = tl.load(own), tl.load(own + tl.cast(positions, tl.int64) * (COLUMNS * R_PAD))
        q = tl.reshape(q, (BLOCK_N, OWN, B_PAD, R_PAD))
        g = tl.reshape(g, (BLOCK_N, OWN, B_PAD, R_PAD))
        pair = n[:, None] * (2 * PARENTS) + two[None, :]
        seen = tl.minimum(start + row_n, last - 1)
        corner = window_corner(seen, height, width, out_height, out_width, stride, N_IN, R * A)
        new = ()
        for s in tl.static_range(HALVES):
            half = first_half + s
            p = load_stack(children, corner, row_r, half, width, N_IN, K, R, A, R_PAD, A_PAD, 8)
            product = total[s]
            for member in tl.static_range(MEMBERS):
                at = (tl.cast(half, tl.int64) * MEMBERS + member) * positions * (2 * PARENTS)
                both = tl.load(coefficients + at + pair, mask=inside, other=0.0)
                share, slope = tl.split(tl.reshape(both, (BLOCK_N, OWN, 2)))
                # bf16 stays bf16: two elements an instruction, rounded where plain PyTorch rounds
                grad_v = share[:, :, None, None] * g + slope[:, :, None, None] * q
                grad_v = tl.reshape(
                    grad_v.to(g.dtype),
                    (BLOCK_N // 4, 4, OWN // JL, JL, B_PAD // BL, BL, R_PAD // RL, RL),
                )
                grad_v = tl.permute(grad_v, (4, 2, 5, 3, 0, 6, 1, 7))
                grad_v = tl.reshape(grad_v, (PART, BLOCK_N * R_PAD))
                one = p
                if MEMBERS > 1:
                    one = tl.where((tl.arange(0, 8) // A_PAD == member)[None, :], p, 0.0)
                product = tl.dot(grad_v, one, product, input_precision="ieee")
            new = new + (product,)
        total = new
    column = tl.arange(0, PART)
    b = column // (OWN * BL) * BL + column // JL % BL
    j = tl.program_id(2) * OWN + column // (JL * BL) * JL % OWN + column % JL
    # the column of the packed weight (tile.py) that holds this parent and column
    low, high = j % (PARENTS // HIGH), j // (PARENTS // HIGH)
    packed = ((low * (B_PAD // BL) + b // BL) * HIGH + high) * BL + b % BL
    for s in tl.static_range(HALVES):
        to = tl.cast(tl.program_id(1), tl.int64) * (2 * (end - begin))
        to += first_half + s - 2 * begin
        to = to * (8 * COLUMNS) + tl.arange(0, 8)[None, :] * COLUMNS + packed[:, None]
        tl.store(grad_weight + to, total[s].to(grad_weight.dtype.element_ty))
