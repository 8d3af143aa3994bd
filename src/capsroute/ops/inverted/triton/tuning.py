"""How the kernels for small poses are launched. A benchmark may override what is set here."""

import dataclasses
from typing import Any

import torch

from capsroute.ops.inverted.triton.geometry import ceil_div, coefficient_dtype
from capsroute.ops.inverted.triton.tile import HALF, STACK, WARP_COLUMNS, Tile

SHARED_MEMORY = 99 << 10  # of a program on consumer cards; Hopper has 227 KiB
SCRATCH = 2 << 10  # exchanges between warps, beside what is loaded ahead
# Of r and slopes held at a time: with half as many, a launch has too few programs (README.md).
COEFFICIENT_BYTES = 128 << 20


@dataclasses.dataclass(frozen=True)
class Settings:
    """`rows` of a tile, which `halves` of stacks share; `resident` programs of a multiprocessor."""

    rows: int
    num_warps: int
    resident: int
    num_stages: int
    halves: int = 1

    def options(self) -> dict[str, int]:
        """What the compiler is told."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


# by kernel ("route", "slopes", "coefficients", "children", "weight"): fields to replace
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


def _pairs(rows: int, columns: int, tile: Tile, dtype: torch.dtype) -> int:
    """Bytes of a child's coefficients and slopes."""
    pairs = rows // tile.r_pad * (columns // tile.b_pad)
    return 2 * pairs * coefficient_dtype(dtype).itemsize


def _stages(wanted: int, ahead: int) -> int:
    """One is computed with, the others are loaded ahead."""
    return max(1, min(wanted, 1 + ahead))


def large_stages(dtype: torch.dtype) -> int:
    """Of the kernels for large poses, within the shared memory of consumer cards."""
    return 2 if dtype == torch.float32 else 3
