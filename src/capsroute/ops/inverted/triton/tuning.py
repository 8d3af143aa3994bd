"""How the kernels for small poses are launched. A benchmark may override what is set here."""

import dataclasses
from typing import Any

import torch

from capsroute.ops.inverted.triton.tile import WARP_COLUMNS, Tile


@dataclasses.dataclass(frozen=True)
class Settings:
    """`rows` of a tile; `resident` programs fit on a multiprocessor; `stacks` share a tile.

    `pick_on_load`: a stack is loaded once for each of its children instead of being masked;
    `maxnreg`: registers of a thread, where more programs should fit than the compiler thinks.
    """

    rows: int
    num_warps: int
    resident: int
    num_stages: int = 2
    stacks: int = 1
    pick_on_load: bool = False
    maxnreg: int | None = None

    def options(self) -> dict[str, int | None]:
        """What the compiler is told."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.maxnreg,
        }


# by kernel ("route", "slopes", "coefficients", "children", "weight"): fields to replace
OVERRIDES: dict[str, dict[str, Any]] = {}


def settings(kernel: str, tile: Tile, dtype: torch.dtype) -> Settings:
    """Chosen by counting instructions (benchmarks/kernels/sass.py); not yet timed."""
    if kernel == "children":
        chosen = Settings(rows=64, num_warps=4, resident=2 if tile.members >= 4 else 3)
    elif kernel == "weight":
        wide = dtype == torch.float32  # no tensor cores, so the tile lives in registers
        stacks = 1 if wide else 2 if tile.members >= 4 else 4
        chosen = Settings(
            rows=32 if wide else 64,
            num_warps=4,
            resident=2,
            stacks=stacks,
            pick_on_load=tile.members >= 4,
        )
    else:  # an accumulator of votes
        warps = max(4, tile.rows // 16 * tile.columns // WARP_COLUMNS)
        chosen = Settings(rows=tile.rows, num_warps=warps, resident=2 if warps == 4 else 1)
    if dtype == torch.float32 and tile.columns > 2 * WARP_COLUMNS:  # 99 KiB must do
        chosen = dataclasses.replace(chosen, num_stages=1)
    return dataclasses.replace(chosen, **OVERRIDES.get(kernel, {}))


def large_stages(dtype: torch.dtype) -> int:
    """Of the kernels for large poses, within the 99 KiB of shared memory of consumer cards."""
    return 2 if dtype == torch.float32 else 3
