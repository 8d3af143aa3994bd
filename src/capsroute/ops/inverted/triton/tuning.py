"""How the kernels are launched. A benchmark may override what is set here."""

import dataclasses
from typing import Any

import torch

from capsroute.ops.inverted.triton.geometry import (
    Geometry,
    ceil_div,
    coefficient_dtype,
    power_of_two,
)
from capsroute.ops.inverted.triton.tile import HALF, STACK, WARP_COLUMNS, Tile

SHARED_MEMORY = 99 << 10  # of a program on consumer cards; Hopper has 227 KiB
SCRATCH = 2 << 10  # exchanges between warps, beside what is loaded ahead
# Of r and slopes held at a time: with half as many, a launch has too few programs (README.md).
COEFFICIENT_BYTES = 128 << 20
# Of ∂L/∂children in every window, from parts of the parents: more than one only if they are small
WINDOW_BYTES = 128 << 20


@dataclasses.dataclass(frozen=True)
class Settings:
    """`rows` of a tile, which `halves` of stacks share; `resident` programs of a multiprocessor.

    Of large poses a `group` of children, or of parents for the votes' sum, shares a tile.
    """

    rows: int
    num_warps: int
    resident: int
    num_stages: int
    halves: int = 1
    group: int = 1

    def options(self) -> dict[str, int]:
        """What the compiler is told."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


# by kernel ("route", "slopes", "coefficients", "children", "weight", and "large_" "shares",
# "slopes", "votes", "children", "weight"): fields to replace
OVERRIDES: dict[str, dict[str, Any]] = {}


def settings(kernel: str, tile: Tile, dtype: torch.dtype) -> Settings:
    """From a sweep in bf16 on an H200, and from counting since; as many stages as have room."""
    choose = {"children": _children, "weight": _weight}.get(kernel, _accumulator)
    return dataclasses.replace(choose(tile, dtype), **OVERRIDES.get(kernel, {}))


def _accumulator(tile: Tile, dtype: torch.dtype) -> Settings:
    """Of votes: a stage is a stack of children and the transforms of each."""
    stage = STACK * (tile.rows + tile.members * tile.columns) * dtype.itemsize
    # Hopper's product reads its operands in shared memory, while the next are on their way
    ahead = (SHARED_MEMORY - SCRATCH) // stage - (1 if tile.rows >= 64 else 0)
    warps = max(4, tile.rows // 16 * tile.columns // WARP_COLUMNS)
    resident = 1 if warps > 4 else 2 if tile.columns >= WARP_COLUMNS else 3
    return Settings(tile.rows, warps, resident, _stages(3, ahead))


def _children(tile: Tile, dtype: torch.dtype, rows: int = 64) -> Settings:
    """A stage is the transforms and the coefficients of a stack; products pass through scratch."""
    transform = HALF * tile.part * dtype.itemsize
    stage = tile.members * (transform + _pairs(rows, tile.part, tile, dtype))
    scratch = SCRATCH + rows * tile.part * dtype.itemsize
    ahead = (SHARED_MEMORY - scratch) // stage
    return Settings(rows, 4, 3, _stages(3, ahead))


def _weight(tile: Tile, dtype: torch.dtype) -> Settings:
    """A stage is the parents' poses and gradients, and coefficients and poses of half stacks."""
    wide = dtype == torch.float32  # no tensor cores, so the tile lives in registers
    many = tile.members >= 4
    rows = 32 if wide or many else 64
    halves = 2 if wide else 8 if many else 12
    part = min(tile.columns, WARP_COLUMNS)
    half = HALF * rows * dtype.itemsize
    half += tile.members // 2 * _pairs(rows, part, tile, dtype)
    stage = 2 * rows * part * dtype.itemsize + halves * half
    scratch = SCRATCH + part * HALF * 4
    ahead = (SHARED_MEMORY - scratch) // stage
    return Settings(rows, 4, 3 if many else 2, _stages(2, ahead), halves)


def chunks(tile: Tile, positions: int, dtype: torch.dtype) -> list[range]:
    """The stacks that go backward together: as many as COEFFICIENT_BYTES hold, evenly, or one."""
    stack = tile.members * _pairs(positions * tile.r_pad, tile.columns, tile, dtype)
    most = max(1, COEFFICIENT_BYTES // stack)
    each = ceil_div(tile.stacks, ceil_div(tile.stacks, most))
    firsts = range(0, tile.stacks, each)
    return [range(first, min(first + each, tile.stacks)) for first in firsts]


def parts_at_once(parts: int, size: int) -> int:
    """How many of `parts`, a power of two, with a buffer of `size` bytes for each."""
    while parts > 1 and parts * size > WINDOW_BYTES:
        parts //= 2
    return parts


def _pairs(rows: int, columns: int, tile: Tile, dtype: torch.dtype) -> int:
    """Bytes of a child's coefficients and slopes."""
    pairs = rows // tile.r_pad * (columns // tile.b_pad)
    return 2 * pairs * coefficient_dtype(dtype).itemsize


def _stages(wanted: int, ahead: int) -> int:
    """One is computed with, the others are loaded ahead."""
    return max(1, min(wanted, 1 + ahead))


@dataclasses.dataclass(frozen=True)
class LargeTile:
    """What a program for large poses holds: poses as rows, sides padded to powers of two."""

    block_n: int
    block_r: int
    block_a: int
    block_b: int
    block_j: int

    @classmethod
    def of(cls, sizes: Geometry, rows: int) -> "LargeTile":
        """Of `rows` rows, or of the few more that one pose may have."""
        block_r = power_of_two(sizes.rows)
        block_a, block_b, block_j = (
            max(16, power_of_two(n)) for n in (sizes.a, sizes.b, sizes.n_out)
        )
        return cls(max(1, rows // block_r), block_r, block_a, block_b, block_j)

    def constants(self) -> dict[str, int]:
        return {
            "BLOCK_N": self.block_n,
            "BLOCK_R": self.block_r,
            "BLOCK_A": self.block_a,
            "BLOCK_B": self.block_b,
        }


def large_settings(kernel: str, sizes: Geometry, dtype: torch.dtype) -> Settings:
    """Counted, not measured (README.md): no spilled registers, as many stages as have room.

    Agreements with all parents stay in registers, and so do poses that cannot be copied 16 bytes at
    a time, or that the tensor cores do not take.
    """
    tile = LargeTile.of(sizes, 64)
    wide, side = dtype == torch.float32, max(tile.block_a, tile.block_b)
    parents = tile.block_j if kernel in ("large_shares", "large_slopes") else 1
    lean = not wide and side <= 64 and sizes.a % 8 == sizes.b % 8 == 0
    rows = 16 if parents > 128 or (wide and side > 64) else 32 if wide else 64
    rows = max(rows, tile.block_r)
    group = 2 if lean and parents <= 16 else 1
    warps = 4 if lean and parents <= 128 else 8
    child, parent = rows * tile.block_a, rows * tile.block_b
    transforms = group * tile.block_a * tile.block_b
    stage = {
        "large_shares": transforms + parent,
        "large_slopes": transforms + 2 * parent,
        "large_votes": transforms + child,
        "large_children": transforms + 2 * parent,
        "large_weight": group * child + 2 * parent,
    }[kernel]
    ahead = (SHARED_MEMORY - SCRATCH) // (stage * dtype.itemsize) - 1
    resident = 3 if kernel == "large_votes" else 2
    chosen = Settings(rows, warps, resident, _stages(3, ahead), group=group)
    return dataclasses.replace(chosen, **OVERRIDES.get(kernel, {}))
