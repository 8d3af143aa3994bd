"""Moments of routed votes: Σ R, Σ R (v − c) and Σ R (v − c)² of every parent.

A tile of positions is one product of the tensor cores for each child, as in inverted routing
(`ops/inverted/triton/tile.py`). Operands, centre, what parents compete with and three sums are more
than a thread has registers for, so shares go through memory, those of some children at a time: one
kernel makes them of all parents, the next sums up the votes of some parents (a part).
"""

# Kernel arguments have no Python types, constants are in capitals.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803, N806

import triton
import triton.language as tl
from torch import Tensor

from capsroute.ops.inverted.triton.common import child_offset, softmax, window_corner
from capsroute.ops.inverted.triton.geometry import ceil_div
from capsroute.ops.inverted.triton.splits import add_splits, partial
from capsroute.ops.inverted.triton.tile import (
    as_poses,
    from_stack,
    load_stack,
    load_transform,
    pose_dot,
    pose_elements,
    tile_rows,
)
from capsroute.ops.votes.moments import Contest, Moments
from capsroute.ops.votes.triton.launch import Operands


@triton.jit
def part_parents(
    part, PART: tl.constexpr, PARENTS: tl.constexpr, HIGH: tl.constexpr, B_PAD: tl.constexpr
):
    """Which parents a part of an accumulator's columns has (tile.py)."""
    LOW: tl.constexpr = PARENTS // HIGH
    LOW_PART: tl.constexpr = PART // (HIGH * B_PAD)
    index = tl.arange(0, PART // B_PAD)
    return index // LOW_PART * LOW + part * LOW_PART + index % LOW_PART


@triton.jit
def child_activation(activations, corner, child, width, N_IN: tl.constexpr, K: tl.constexpr):
    """Of one child of every window; zero for what fills up the last stack."""
    at = activations + corner + child_offset(child, width, N_IN, K, 1)
    return tl.load(at, mask=child < K * K * N_IN, other=0.0)


@triton.jit(do_not_specialize=["begin", "end", "split"])
def shares_kernel(
    children,
    weight,
    centre,
    query,
    prior,
    shares,
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
    GAUSSIAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """r of `split` stacks: (children, positions, parents), from stack `begin` to `end` alone."""
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
    element, real = pose_elements(j, N_OUT, R, B, R_PAD, B_PAD)
    own = (n * (N_OUT * R * B))[:, None, None, None] + element
    q = tl.load(query + own, mask=real, other=0.0)
    at = n[:, None] * N_OUT + j[None, :]
    bias = tl.load(prior + at, mask=(j < N_OUT)[None, :], other=float("-inf"))
    if GAUSSIAN:  # q (v − c)² is (√q v − √q c)²
        q = tl.sqrt(q)
        c = q * tl.load(centre + own, mask=real, other=0.0)
    pair = n[:, None] * PARENTS + j[None, :]
    shares = from_stack(shares, begin, MEMBERS * PARENTS, positions)
    first = begin + tl.program_id(1) * split
    for stack in tl.range(first, tl.minimum(first + split, end)):
        p = load_stack(children, corner, r, stack, width, N_IN, K, R, A, R_PAD, A_PAD)
        for member in tl.static_range(MEMBERS):
            w = load_transform(weight, stack, tl.arange(0, COLUMNS), member, COLUMNS, A_PAD)
            v = as_poses(tl.dot(p, w, input_precision=PRECISION), R_PAD, B_PAD, HIGH)
            if GAUSSIAN:
                apart = v * q - c
                logit = bias - pose_dot(apart, apart)
            else:
                logit = bias + pose_dot(v, q)
            if children.dtype.element_ty == tl.float32:
                share = softmax(logit, tl.float32)
            else:  # the difference first: where nobody is active, logits are the least there is
                share = tl.exp2((logit - tl.max(logit, axis=1)[:, None]) * 1.4426950408889634)
                share *= (1.0 / tl.sum(share, axis=1))[:, None]
            to = (tl.cast(stack, tl.int64) * MEMBERS + member) * positions * PARENTS + pair
            tl.store(shares + to, share.to(shares.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["begin", "end", "split"])
def moments_kernel(
    children,
    activations,
    weight,
    centre,
    coefficients,
    mass,
    first_moment,
    second_moment,
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
    ACTIVE: tl.constexpr,
    CARRY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Σ w, Σ w (v − c) and Σ w (v − c)² over `split` stacks, for the parents of a part.

    w is what `coefficients` holds, (children, positions, parents), times the child's activation if
    `ACTIVE`; or 1/M times that if `EVEN`. `CARRY` adds to what is there.
    """
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
    part = tl.program_id(2)
    column = part * PART + tl.arange(0, PART)
    j = part_parents(part, PART, PARENTS, HIGH, B_PAD)
    element, real = pose_elements(j, N_OUT, R, B, R_PAD, B_PAD)
    own = (n * (N_OUT * R * B))[:, None, None, None] + element
    c = tl.load(centre + own, mask=real, other=0.0)
    one = tl.zeros_like(c)
    two = tl.zeros_like(c)
    zero = tl.zeros((POSITIONS, PART // B_PAD), tl.float32)
    pair = n[:, None] * PARENTS + j[None, :]
    coefficients = from_stack(coefficients, begin, MEMBERS * PARENTS, positions)
    first = begin + tl.program_id(1) * split
    for stack in tl.range(first, tl.minimum(first + split, end)):
        p = load_stack(children, corner, r, stack, width, N_IN, K, R, A, R_PAD, A_PAD)
        for member in tl.static_range(MEMBERS):
            w = load_transform(weight, stack, column, member, COLUMNS, A_PAD)
            v = as_poses(tl.dot(p, w, input_precision=PRECISION), R_PAD, B_PAD, HIGH)
            child = stack * MEMBERS + member
            share = tl.zeros((POSITIONS, PART // B_PAD), tl.float32) + 1.0 / N_OUT
            if not EVEN:
                at = tl.cast(child, tl.int64) * positions * PARENTS + pair
                share = tl.load(coefficients + at).to(tl.float32)
            if ACTIVE:
                share *= child_activation(activations, seen, child, width, N_IN, K)[:, None]
            apart = v - c
            spread = share[:, None, :, None] * apart
            zero += share
            one += spread
            two += spread * apart
    run = tl.cast(tl.program_id(1), tl.int64) * positions
    of_pose = run * (N_OUT * R * B) + own
    of_pair = run * N_OUT + n[:, None] * N_OUT + j[None, :]
    is_pose = real & inside[:, None, None, None]
    is_pair = (j < N_OUT)[None, :] & inside[:, None]
    if CARRY:
        zero += tl.load(mass + of_pair, mask=is_pair, other=0.0)
        one += tl.load(first_moment + of_pose, mask=is_pose, other=0.0)
        two += tl.load(second_moment + of_pose, mask=is_pose, other=0.0)
    tl.store(mass + of_pair, zero, mask=is_pair)
    tl.store(first_moment + of_pose, one, mask=is_pose)
    tl.store(second_moment + of_pose, two, mask=is_pose)


def moments(given: Operands, contest: Contest | None) -> Moments:
    """Of all votes; without a contest every child is shared out evenly."""
    stacks = given.tile.stacks
    if contest is None:
        sums = Sums(given, stacks, carried=False)
        sums.add(given.activations, range(stacks), even=True, active=True)
        return sums.total()
    chunks = given.share_chunks(1)
    longest = max(map(len, chunks))
    shares = given.coefficients(longest)
    sums = Sums(given, longest, carried=len(chunks) > 1)
    for chunk in chunks:
        fill_shares(given, contest, shares, chunk)
        sums.add(shares, chunk, active=True)
    return sums.total()


def fill_shares(given: Operands, contest: Contest, shares: Tensor, stacks: range) -> None:
    tiles, runs, split = given.runs("shares", len(stacks))
    given.launch(
        shares_kernel,
        "shares",
        (tiles, runs),
        query=contest.query,
        prior=contest.prior,
        shares=shares,
        begin=stacks.start,
        end=stacks.stop,
        split=split,
        GAUSSIAN=contest.gaussian,
    )


class Sums:
    """Moments that are summed up chunk by chunk, each in several runs, and added at the end."""

    def __init__(self, given: Operands, stacks: int, *, carried: bool) -> None:
        self.given, self.carried = given, carried
        self.parts = given.tile.columns // given.part
        _, runs, _ = given.runs("moments", stacks, self.parts)
        like = given.centre
        self.out = (
            like.new_empty(like.shape[:-1]),
            *(like.new_empty(like.shape) for _ in range(2)),
        )
        self.buffers = [partial(runs, out, carried) for out in self.out]

    def add(
        self, coefficients: Tensor, stacks: range, *, even: bool = False, active: bool = False
    ) -> None:
        chosen, runs = self.given.settings("moments"), len(self.buffers[0])
        tiles = ceil_div(self.given.sizes.positions, chosen.rows // self.given.tile.r_pad)
        mass, first_moment, second_moment = self.buffers
        self.given.launch(
            moments_kernel,
            "moments",
            (tiles, runs, self.parts),
            coefficients=coefficients,
            mass=mass,
            first_moment=first_moment,
            second_moment=second_moment,
            begin=stacks.start,
            end=stacks.stop,
            split=ceil_div(len(stacks), runs),
            PART=self.given.part,
            EVEN=even,
            ACTIVE=active,
            CARRY=self.carried,
        )

    def total(self) -> Moments:
        return Moments(*map(add_splits, self.buffers, self.out))
