"""How the votes for small poses lie in the tensor cores' accumulator.

A child's votes at several positions are one product: rows are (position, row of the pose), columns
(parent, column of the pose), the inner axis is the child's row. That axis is short, so a *stack* of
children shares it: 16 // A_PAD of them side by side, of which a transform that is zero outside its
child's part picks one.

A thread of the accumulator owns rows l and l + 8 of every 16, and the columns 2m, 2m + 1 of every 8
(l and m from its lane). Rows and columns are therefore ordered so that a thread holds as much of a
pose as it can, and then reducing over a pose needs no other lane, or one or three of them:

    row    = (position high, row of the pose, position low), 16 // R_PAD low positions
    column = (parent low, column high, parent high, column low), HIGH high parents

where the parent is `high · low's size + low`: a thread's parents follow each other in memory.
`as_poses` turns an accumulator into (positions, LANES, parents, OWN): a pose is LANES × OWN, its
row `own // B_PAD · LANES + lane`. This costs no instruction.
"""

# Kernel arguments have no Python types, constants are in capitals.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803, N806

import dataclasses

import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from capsroute.ops.inverted.triton.common import child_offset
from capsroute.ops.inverted.triton.geometry import (
    Geometry,
    ceil_div,
    fits_accumulator,
    padded_columns,
    power_of_two,
)

STACK = 16  # the least inner size of a product
HALF = 8  # its least number of columns
WARP_COLUMNS = 128  # of an accumulator with 16 rows, 64 registers of every thread


def is_small(sizes: Geometry) -> bool:
    """Whether every parent's votes for some positions fit into one accumulator."""
    return fits_accumulator(sizes.rows, sizes.a, sizes.b, sizes.n_out)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes of an accumulator; a pose's sides are padded to powers of two.

    16 rows instead of 64 make room for many columns, on tensor cores of the kind before Hopper's.
    """

    rows: int
    columns: int
    r_pad: int
    a_pad: int
    b_pad: int
    window: int

    @classmethod
    def of(cls, sizes: Geometry) -> "Tile":
        r_pad, a_pad, b_pad = (power_of_two(n) for n in (sizes.rows, sizes.a, sizes.b))
        columns = padded_columns(sizes.n_out, sizes.b)
        rows = 64 if columns <= 2 * WARP_COLUMNS else 16
        return cls(rows, columns, r_pad, a_pad, b_pad, sizes.window)

    @property
    def parents(self) -> int:
        return self.columns // self.b_pad

    @property
    def members(self) -> int:
        """Children of a stack."""
        return STACK // self.a_pad

    @property
    def stacks(self) -> int:
        return ceil_div(self.window, self.members)

    @property
    def high(self) -> int:
        """Parents that lie in different lanes, or warps: those interleave below 64 rows."""
        lanes = 8 // min(2, self.b_pad)
        return lanes if self.rows >= 64 else lanes * (self.columns // WARP_COLUMNS)

    @property
    def part(self) -> int:
        """Columns of which ∂L/∂children takes g and q at a time: a multiple of HIGH parents."""
        return min(self.columns, max(WARP_COLUMNS, self.high * self.b_pad))

    @property
    def parts(self) -> int:
        return self.columns // self.part

    def constants(self) -> dict[str, int]:
        return {
            "COLUMNS": self.columns,
            "R_PAD": self.r_pad,
            "A_PAD": self.a_pad,
            "B_PAD": self.b_pad,
            "HIGH": self.high,
        }

    def pack(self, weight: Tensor) -> Tensor:
        """(k, k, in, out, a, b) -> (stacks · 16, columns), zero where padded."""
        weight = weight.flatten(0, 2)
        wanted = (self.stacks * self.members, self.parents, self.a_pad, self.b_pad)
        missing = [(0, want - have) for want, have in zip(wanted, weight.shape, strict=True)]
        if any(after for _, after in missing):
            # from the last axis to the first, as `pad` counts them
            weight = pad(weight, [n for pair in reversed(missing) for n in pair])
        split = weight.unflatten(3, (-1, min(2, self.b_pad))).unflatten(1, (self.high, -1))
        # child, parent high, parent low, row, column high, column low
        return split.permute(0, 3, 2, 4, 1, 5).reshape(self.stacks * STACK, self.columns)


@triton.jit
def tile_rows(start, ROWS: tl.constexpr, R_PAD: tl.constexpr):
    """The position and the pose's row of each row of an accumulator."""
    LOW: tl.constexpr = 16 // R_PAD
    row = tl.arange(0, ROWS)
    return start + row // 16 * LOW + row % LOW, row // LOW % R_PAD


@triton.jit
def as_poses(x, R_PAD: tl.constexpr, B_PAD: tl.constexpr, HIGH: tl.constexpr):
    """(rows, columns) of an accumulator -> (positions, LANES, parents, OWN)."""
    RH: tl.constexpr = 2 if R_PAD > 1 else 1
    LANES: tl.constexpr = R_PAD // RH
    NL: tl.constexpr = 16 // R_PAD
    BL: tl.constexpr = 2 if B_PAD > 1 else 1
    BH: tl.constexpr = B_PAD // BL
    NH: tl.constexpr = x.shape[0] // 16
    LOW: tl.constexpr = x.shape[1] // (HIGH * B_PAD)
    x = tl.reshape(x, (NH, RH, LANES, NL, LOW, BH, HIGH, BL))
    x = tl.permute(x, (0, 3, 2, 6, 4, 1, 5, 7))
    return tl.reshape(x, (NH * NL, LANES, HIGH * LOW, RH * B_PAD))


@triton.jit
def as_matrix(x, R_PAD: tl.constexpr, B_PAD: tl.constexpr, HIGH: tl.constexpr):
    """(positions, LANES, parents, OWN) -> (rows, columns): what `as_poses` undoes."""
    RH: tl.constexpr = 2 if R_PAD > 1 else 1
    LANES: tl.constexpr = R_PAD // RH
    NL: tl.constexpr = 16 // R_PAD
    BL: tl.constexpr = 2 if B_PAD > 1 else 1
    BH: tl.constexpr = B_PAD // BL
    NH: tl.constexpr = x.shape[0] // NL
    LOW: tl.constexpr = x.shape[2] // HIGH
    x = tl.reshape(x, (NH, NL, LANES, HIGH, LOW, RH, BH, BL))
    x = tl.permute(x, (0, 5, 2, 1, 4, 6, 3, 7))
    return tl.reshape(x, (NH * 16, LOW * HIGH * B_PAD))


@triton.jit
def in_accumulator(x, R_PAD: tl.constexpr, B_PAD: tl.constexpr, HIGH: tl.constexpr):
    """x itself, moved by a product with nothing to the threads that hold it in an accumulator.

    Without it the compiler computes with x where it was loaded, and moves every result instead.
    """
    matrix = as_matrix(x.to(tl.float32), R_PAD, B_PAD, HIGH)
    rows = tl.zeros((matrix.shape[0], 16), tl.bfloat16)
    columns = tl.zeros((16, matrix.shape[1]), tl.bfloat16)
    return as_poses(tl.dot(rows, columns, matrix), R_PAD, B_PAD, HIGH).to(x.dtype)


@triton.jit
def pose_elements(
    j,
    N_OUT: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    R_PAD: tl.constexpr,
    B_PAD: tl.constexpr,
):
    """(1, LANES, parents, OWN): offsets from a position's first pose, and which are not padding."""
    RH: tl.constexpr = 2 if R_PAD > 1 else 1
    LANES: tl.constexpr = R_PAD // RH
    lane = tl.arange(0, LANES)[None, :, None, None]
    own = tl.arange(0, RH * B_PAD)[None, None, None, :]
    j = j[None, None, :, None]
    r, b = own // B_PAD * LANES + lane, own % B_PAD
    return (j * R + r) * B + b, (j < N_OUT) & (r < R) & (b < B)


@triton.jit
def column_elements(j, R_PAD: tl.constexpr, B_PAD: tl.constexpr):
    """(1, LANES, parents, OWN): offsets from a position's first pose, by columns and padded."""
    RH: tl.constexpr = 2 if R_PAD > 1 else 1
    LANES: tl.constexpr = R_PAD // RH
    lane = tl.arange(0, LANES)[None, :, None, None]
    own = tl.arange(0, RH * B_PAD)[None, None, None, :]
    r, b = own // B_PAD * LANES + lane, own % B_PAD
    return (j[None, None, :, None] * B_PAD + b) * R_PAD + r


@triton.jit
def load_stack(
    children,
    corner,
    r,
    stack,
    width,
    N_IN: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    A: tl.constexpr,
    R_PAD: tl.constexpr,
    A_PAD: tl.constexpr,
    WIDTH: tl.constexpr = 16,
):
    """(rows, WIDTH): row `r` of the poses of a stack's children, side by side, zero if padded.

    Whole stacks decide what is masked, since the last one may end in a half without a child.
    """
    k = tl.arange(0, WIDTH)
    child = stack * (WIDTH // A_PAD) + k // A_PAD
    column = child_offset(child, width, N_IN, K, R * A) + k % A_PAD
    at = children + (corner + r * A)[:, None] + column[None, :]
    if R == R_PAD and A == A_PAD and (K * K * N_IN) % (16 // A_PAD) == 0:
        return tl.load(at)
    real = (k % A_PAD < A) & (child < K * K * N_IN)
    return tl.load(at, mask=(r < R)[:, None] & real[None, :], other=0.0)


@triton.jit
def load_transform(
    weight,
    stack,
    column,
    MEMBER: tl.constexpr,
    COLUMNS: tl.constexpr,
    A_PAD: tl.constexpr,
    WIDTH: tl.constexpr = 16,
):
    """(WIDTH, columns): a stack's transforms, zero but for one member's."""
    k = tl.arange(0, WIDTH)
    at = weight + tl.cast(stack, tl.int64) * (WIDTH * COLUMNS)
    at += k[:, None] * COLUMNS + column[None, :]
    if A_PAD == WIDTH:
        return tl.load(at)
    return tl.load(at, mask=(k // A_PAD == MEMBER)[:, None], other=0.0)


@triton.jit
def from_stack(coefficients, begin, SIZE: tl.constexpr, positions):
    """Where stack 0 would lie, if the buffer, with SIZE · positions for each, starts at `begin`."""
    return coefficients - tl.cast(begin, tl.int64) * positions * SIZE


@triton.jit
def pose_dot(x, y):
    """⟨x, y⟩ of poses: (positions, parents)."""
    return tl.sum(tl.sum(x * y, axis=3), axis=1)
