"""Kernels that form votes: coefficients, and sums of votes weighted by them.

Small poses (`route_kernel`): a lane is a parent, a row is a position, and every component of a
pose is a tensor of its own; one pass over the children does everything. Large poses
(`coefficients_kernel`, `aggregate_kernel`): a vote is a product for the tensor cores, and the
coefficients pass through memory. Both serve the backward pass too, whose ∂L/∂q is a sum of votes
weighted by slopes (README.md).
"""

# Kernel arguments have no Python types, constants are in capitals, tuples grow by addition.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"
# ruff: noqa: N803, RUF005

import torch
import triton
import triton.language as tl
from torch import Tensor

from capsroute.ops.inverted.triton import geometry
from capsroute.ops.inverted.triton.geometry import Geometry, ceil_div, power_of_two


@triton.jit
def _window_corner(
    position, height, width, out_height, out_width, stride, N_IN: tl.constexpr, D: tl.constexpr
):
    """Offset of the first child that an output position sees."""
    x = position % out_width
    y = position // out_width % out_height
    image = position // (out_width * out_height)
    return ((image * height + y * stride) * width + x * stride) * (N_IN * D)


@triton.jit
def _child_offset(child, width, N_IN: tl.constexpr, K: tl.constexpr, D: tl.constexpr):
    """Offset of a window's child from the window's corner."""
    tap = child // N_IN
    return ((tap // K * width + tap % K) * N_IN + child % N_IN) * D


@triton.jit
def _load_words(pointer, offset, COUNT: tl.constexpr, PACK: tl.constexpr):
    """COUNT consecutive elements as a tuple of words of PACK elements each."""
    out = ()
    for w in tl.static_range(COUNT // PACK):
        out = out + (tl.load(pointer + offset // PACK + w),)
    return out


@triton.jit
def _unpack(words, COUNT: tl.constexpr, PACK: tl.constexpr, TYPE: tl.constexpr):
    """The elements of `words` as a tuple of fp32 tensors."""
    out = ()
    for w in tl.static_range(COUNT // PACK):
        word = words[w]
        if PACK == 1:
            out = out + (word.to(tl.float32),)
        else:
            for half in tl.static_range(PACK * TYPE.primitive_bitwidth // 32):
                bits = (word >> (32 * half)).to(tl.int32)
                if tl.float32 == TYPE:
                    out = out + (bits.to(tl.float32, bitcast=True),)
                elif tl.bfloat16 == TYPE:
                    out = out + ((bits << 16).to(tl.float32, bitcast=True),)
                    out = out + ((bits & -65536).to(tl.float32, bitcast=True),)
                else:
                    low, high = bits.to(tl.int16), (bits >> 16).to(tl.int16)
                    out = out + (low.to(TYPE, bitcast=True).to(tl.float32),)
                    out = out + (high.to(TYPE, bitcast=True).to(tl.float32),)
    return out


@triton.jit
def _load_transform(
    weight,
    child,
    lane,
    N_OUT: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    PACK: tl.constexpr,
):
    words = ()
    for c in tl.static_range(A):
        at = ((child * A + c) * N_OUT + lane)[None, :] * B
        words = words + _load_words(weight, at, B, PACK)
    return words


@triton.jit
def _dot(xs, ys, COUNT: tl.constexpr):
    """Four sums side by side: a shorter chain, and less rounding."""
    first = xs[0] * ys[0]
    for e in tl.static_range(4, COUNT, 4):
        first += xs[e] * ys[e]
    for lane in tl.static_range(1, 4):
        if lane < COUNT:
            other = xs[lane] * ys[lane]
            for e in tl.static_range(lane + 4, COUNT, 4):
                other += xs[e] * ys[e]
            first += other
    return first


@triton.jit
def _softmax(x, TYPE: tl.constexpr):
    """Over the last axis. The hardware's exponential rounds x · log₂e: for fp32, put that back."""
    x = x - tl.max(x, axis=1)[:, None]
    if tl.float32 == TYPE:
        x = tl.maximum(x, -200.0)  # e⁻²⁰⁰ is zero, and infinity has no remainder
        y = x * 1.4426950408889634
        rest = tl.fma(x, 1.4426950216293335, -y) + x * 1.9259629911266175e-8
        x = tl.exp2(y) * (1.0 + rest * 0.6931471805599453)
        return x / tl.sum(x, axis=1)[:, None]
    x = tl.exp(x)
    return x * (1.0 / tl.sum(x, axis=1))[:, None]


@triton.jit
def _votes(p, w, R: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    v = ()
    for r in tl.static_range(R):
        for d in tl.static_range(B):
            total = p[r * A] * w[d]
            for c in tl.static_range(1, A):
                total += p[r * A + c] * w[c * B + d]
            v = v + (total,)
    return v


@triton.jit
def route_kernel(
    children,
    weight,
    parents,
    grad_poses,
    out,
    shares,
    slopes,
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
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
    TYPE: tl.constexpr,
    PACK_P: tl.constexpr,
    PACK_W: tl.constexpr,
    PACK_Q: tl.constexpr,
    BACKWARD: tl.constexpr,
    KEEP: tl.constexpr,
    UNROLL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Σ_i r_ij v_ij over `split` children; backward, scale · Σ_i ∂L/∂a_ij v_ij (and both kept).

    weight is (window, A, N_OUT, B), shares and slopes (window, positions, N_OUT), out
    (splits, positions, N_OUT, R·B).
    """
    position = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_J)
    # clamped rather than masked: what lies outside is computed and not stored
    n = tl.minimum(position, positions - 1)
    inside = (position < positions)[:, None] & (j < N_OUT)[None, :]
    lane = j if N_OUT == BLOCK_J else tl.minimum(j, N_OUT - 1)
    corner = _window_corner(n, height, width, out_height, out_width, stride, N_IN, R * A)[:, None]
    own = (n[:, None] * N_OUT + lane[None, :]) * (R * B)
    q = _unpack(_load_words(parents, own, R * B, PACK_Q), R * B, PACK_Q, TYPE)
    g = q
    if BACKWARD:
        g = _unpack(_load_words(grad_poses, own, R * B, PACK_Q), R * B, PACK_Q, TYPE)
    total = ()
    for _ in tl.static_range(R * B):
        total = total + (tl.zeros((BLOCK_N, BLOCK_J), tl.float32),)
    first = tl.program_id(1) * split
    last = tl.minimum(first + split, K * K * N_IN)
    if PREFETCH:
        p_at = corner + _child_offset(first, width, N_IN, K, R * A)
        p_words = _load_words(children, p_at, R * A, PACK_P)
        w_words = _load_transform(weight, first, lane, N_OUT, A, B, PACK_W)
    for child in tl.range(first, last, loop_unroll_factor=UNROLL):
        if PREFETCH:  # the next child's loads travel while this one is computed
            p = _unpack(p_words, R * A, PACK_P, TYPE)
            w = _unpack(w_words, A * B, PACK_W, TYPE)
            after = tl.minimum(child + 1, last - 1)
            p_at = corner + _child_offset(after, width, N_IN, K, R * A)
            p_words = _load_words(children, p_at, R * A, PACK_P)
            w_words = _load_transform(weight, after, lane, N_OUT, A, B, PACK_W)
        else:
            at = corner + _child_offset(child, width, N_IN, K, R * A)
            p = _unpack(_load_words(children, at, R * A, PACK_P), R * A, PACK_P, TYPE)
            w = _load_transform(weight, child, lane, N_OUT, A, B, PACK_W)
            w = _unpack(w, A * B, PACK_W, TYPE)
        v = _votes(p, w, R, A, B)
        agreement = scale * _dot(v, q, R * B)
        if N_OUT != BLOCK_J:
            agreement = tl.where((j < N_OUT)[None, :], agreement, float("-inf"))
        share = _softmax(agreement, TYPE)
        at = tl.cast(child, tl.int64) * positions * N_OUT + n[:, None] * N_OUT + lane[None, :]
        if KEEP:
            tl.store(shares + at, share.to(shares.dtype.element_ty), mask=inside)
        if BACKWARD:
            u = _dot(v, g, R * B)
            share = scale * share * (u - tl.sum(share * u, axis=1)[:, None])
            tl.store(slopes + at, share.to(slopes.dtype.element_ty), mask=inside)
        new = ()
        for e in tl.static_range(R * B):
            new = new + (total[e] + share * v[e],)
        total = new
    to = out + tl.cast(tl.program_id(1), tl.int64) * positions * (N_OUT * R * B) + own
    for e in tl.static_range(R * B):
        tl.store(to + e, total[e].to(out.dtype.element_ty), mask=inside)


@triton.jit
def _pose_rows(first, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
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
    n, r = _pose_rows(tl.program_id(0) * BLOCK_N, BLOCK_N, BLOCK_R)
    c, d, j = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_J)
    inside = (n < positions) & (r < R)
    corner = _window_corner(n, height, width, out_height, out_width, stride, N_IN, R * A)
    at = corner + _child_offset(child, width, N_IN, K, R * A) + r * A
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
    share = _softmax(agreement * scale, children.dtype.element_ty)
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
    n, r = _pose_rows(tl.program_id(0) * BLOCK_N, BLOCK_N, BLOCK_R)
    c, d = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_B)
    inside = (n < positions) & (r < R)
    corner = _window_corner(n, height, width, out_height, out_width, stride, N_IN, R * A) + r * A
    p_at = corner[:, None] + c[None, :]
    p_in = inside[:, None] & (c < A)[None, :]
    w_at = parent * (A * B) + c[:, None] * B + d[None, :]
    w_in = (c < A)[:, None] & (d < B)[None, :]
    total = tl.zeros((BLOCK_N * BLOCK_R, BLOCK_B), tl.float32)
    first = tl.program_id(2) * split
    for child in range(first, tl.minimum(first + split, K * K * N_IN)):
        offset = _child_offset(child, width, N_IN, K, R * A)
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


def triton_dtype(tensor: Tensor) -> tl.dtype:
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[
        tensor.dtype
    ]


def split_evenly(programs: int, children: int, wanted: int) -> tuple[int, int]:
    """Into how many runs the children go so that `wanted` programs run, and how long a run is."""
    run = max(min(children, 8), ceil_div(children, max(1, wanted // programs)))
    return ceil_div(children, run), run


def _add_splits(partial: Tensor, dtype: torch.dtype) -> Tensor:
    return partial[0] if partial.shape[0] == 1 else partial.sum(0).to(dtype)


def weighted_votes(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    grad_poses: Tensor | None,
    sizes: Geometry,
    scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of votes weighted by r, or backward by scale · ∂L/∂a; then r and those slopes.

    r and the slopes, (window, positions, out), are empty unless kept; backward always keeps them.
    """
    backward = grad_poses is not None
    device, dtype = children.device, children.dtype
    kept = (sizes.window, sizes.positions, sizes.n_out)
    nothing = children.new_empty(0)
    keep = keep or backward or not sizes.small
    shares = (
        torch.empty(kept, device=device, dtype=geometry.coefficient_dtype(dtype))
        if keep
        else nothing
    )
    slopes = torch.empty_like(shares) if backward else nothing
    run = _route_small if sizes.small else _route_large
    partial = run(children, weight, parents, grad_poses, shares, slopes, sizes, scale)
    return _add_splits(partial, dtype).view(sizes.parents_shape()), shares, slopes


def _partial(sizes: Geometry, splits: int, like: Tensor) -> Tensor:
    """One buffer a split; they are added afterwards, always in the same order."""
    dtype = like.dtype if splits == 1 else torch.float32
    shape = (splits, sizes.positions, sizes.n_out, sizes.rows * sizes.b)
    return torch.empty(shape, device=like.device, dtype=dtype)


def _route_small(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    grad_poses: Tensor | None,
    shares: Tensor,
    slopes: Tensor,
    sizes: Geometry,
    scale: float,
) -> Tensor:
    block_j = max(2, power_of_two(sizes.n_out))
    tuning = route_tuning(sizes, grad_poses is not None)
    warps = max(tuning["num_warps"], min(16, block_j // 32))
    block_n = max(1, tuning["pairs"] * 32 * warps // block_j)
    block_n = min(block_n, power_of_two(sizes.positions))
    tiles = ceil_div(sizes.positions, block_n)
    wanted = tuning["programs"] * geometry.multiprocessors(children.device)
    splits, split = split_evenly(tiles, sizes.window, wanted)
    out = _partial(sizes, splits, children)
    d = sizes.rows * sizes.b
    type_ = triton_dtype(children)
    p, pack_p = geometry.words(children, sizes.rows * sizes.a)
    w, pack_w = geometry.words(weight, sizes.b)
    q, pack_q = geometry.words(parents, d)
    g = q if grad_poses is None else geometry.words(grad_poses, d)[0]
    geometry.launch(
        route_kernel,
        (tiles, splits),
        children=p,
        weight=w,
        parents=q,
        grad_poses=g,
        out=out,
        shares=shares,
        slopes=slopes,
        scale=scale,
        split=split,
        **sizes.addressing(),
        BLOCK_N=block_n,
        BLOCK_J=block_j,
        TYPE=type_,
        PACK_P=pack_p,
        PACK_W=pack_w,
        PACK_Q=pack_q,
        BACKWARD=grad_poses is not None,
        KEEP=shares.numel() > 0,
        UNROLL=tuning["unroll"],
        PREFETCH=tuning["prefetch"],
        num_warps=warps,
    )
    return out


def route_tuning(sizes: Geometry, backward: bool) -> dict[str, int]:
    """Pairs of a position and a parent that a thread holds, warps, programs a multiprocessor.

    Measured on an H200. Prefetching the next child pays for 4×4 (748 → 621 µs forward) and costs
    for 6×6 (1767 → 2807 µs), whose registers are full without it.
    """
    few = sizes.rows * sizes.b <= 16
    return {
        "pairs": 2 if few else 1,
        "num_warps": 4,
        "programs": 16,
        "unroll": 1,
        "prefetch": int(few),
    }


def large_blocks(sizes: Geometry, rows: int) -> dict[str, int]:
    """Tile sizes of the tensor-core kernels: `rows` pose rows, or few more."""
    block_r = power_of_two(sizes.rows)
    return {
        "BLOCK_N": max(1, rows // block_r),
        "BLOCK_R": block_r,
        "BLOCK_A": max(16, power_of_two(sizes.a)),
        "BLOCK_B": max(16, power_of_two(sizes.b)),
    }


def _route_large(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    grad_poses: Tensor | None,
    shares: Tensor,
    slopes: Tensor,
    sizes: Geometry,
    scale: float,
) -> Tensor:
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
        BACKWARD=grad_poses is not None,
        PRECISION="ieee",
        num_warps=4,
        num_stages=3,
    )
    wanted = 8 * geometry.multiprocessors(children.device)
    splits, split = split_evenly(tiles * sizes.n_out, sizes.window, wanted)
    out = _partial(sizes, splits, children)
    geometry.launch(
        aggregate_kernel,
        (tiles, sizes.n_out, splits),
        children=children,
        weight=weight,
        coefficients=shares if grad_poses is None else slopes,
        out=out,
        split=split,
        **sizes.addressing(),
        **blocks,
        PRECISION="ieee",
        num_warps=4,
        num_stages=3,
    )
    return out
