"""What the kernels for moments of votes share: the operands, and how they are launched."""

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from capsroute.ops.inverted.triton import geometry, tuning
from capsroute.ops.inverted.triton.forward import vote_precision
from capsroute.ops.inverted.triton.geometry import Geometry, ceil_div, coefficient_dtype
from capsroute.ops.inverted.triton.tile import STACK, Tile
from capsroute.ops.inverted.triton.tuning import SCRATCH, SHARED_MEMORY, Settings

PART = 64  # columns that a program sums up: centre, votes and two sums are 32 registers each
# Of ∂L/∂v held at a time. It is more than caches hold anyway, and launches of a few stacks are
# mostly prologue: with 128 MiB, EM's first layer would need eight for each of its parts.
VOTE_BYTES = 512 << 20

# by kernel ("shares", "moments", "slopes", "children", "weight"): fields to replace
OVERRIDES: dict[str, dict[str, Any]] = {}


def settings(kernel: str, tile: Tile, part: int, dtype: torch.dtype) -> Settings:
    """Counted, not measured: as few spilled registers as was found (README.md), and as many stages
    as have room.

    What parents compete with, or are given gradients by, leaves none for loading ahead.
    """
    if kernel in ("shares", "slopes"):
        chosen = tuning.settings("coefficients", tile, dtype)
    elif kernel == "weight":
        rows = 16 if dtype == torch.float32 else 32
        rows = max(16, min(64, rows * 128 // tile.columns))
        stage = rows * (STACK + tile.members * tile.columns) * dtype.itemsize
        chosen = Settings(rows, 4 if tile.columns <= 512 else 8, 2, _stages(stage))
    else:
        rows = 64 if part <= PART else 16  # more columns than that have all of the registers
        pairs = rows // tile.r_pad * (part // tile.b_pad) * coefficient_dtype(dtype).itemsize
        stage = STACK * (rows + 2 * tile.members * part) * dtype.itemsize + 2 * tile.members * pairs
        chosen = Settings(rows, 4, 2, _stages(stage))
    if kernel in ("shares", "children") and dtype != torch.float32:
        chosen = dataclasses.replace(chosen, num_stages=1)
    return dataclasses.replace(chosen, **OVERRIDES.get(kernel, {}))


def _stages(stage: int) -> int:
    """One is computed with, the others are loaded ahead."""
    return max(1, min(3, (SHARED_MEMORY - SCRATCH) // stage))


@dataclasses.dataclass(frozen=True)
class Operands:
    """Children (B, H, W, in, d), their activations (B, H, W, in), packed transforms, and a centre.

    The centre is (B, H', W', out, d'), in fp32 as everything that belongs to parents.
    """

    sizes: Geometry
    children: Tensor
    activations: Tensor
    weight: Tensor
    centre: Tensor

    @property
    def tile(self) -> Tile:
        return Tile.of(self.sizes)

    @property
    def part(self) -> int:
        """Columns of a part: a multiple of HIGH parents."""
        return min(self.tile.columns, max(PART, self.tile.high * self.tile.b_pad))

    def chunks(self, pair_bytes: int, room: int, stacks: range) -> list[range]:
        """Runs of stacks, as even as can be, of so many bytes a pair and position, in `room`."""
        tile = self.tile
        pairs = tile.members * self.sizes.positions * tile.parents
        count = ceil_div(len(stacks), max(1, room // (pairs * pair_bytes)))
        ends = [stacks.start + len(stacks) * n // count for n in range(count + 1)]
        return [range(*both) for both in itertools.pairwise(ends)]

    def share_chunks(self, coefficients: int) -> list[range]:
        """Of all stacks, runs of which so many coefficients a pair may be held."""
        each = coefficients * coefficient_dtype(self.children.dtype).itemsize
        return self.chunks(each, tuning.COEFFICIENT_BYTES, range(self.tile.stacks))

    def vote_chunks(self, stacks: range) -> list[range]:
        """Runs of stacks of which ∂L/∂v may be held."""
        each = self.tile.r_pad * self.tile.b_pad * self.children.dtype.itemsize
        return self.chunks(each, VOTE_BYTES, stacks)

    def coefficients(self, stacks: int) -> Tensor:
        """A buffer for one number for each child, position and parent."""
        tile = self.tile
        return torch.empty(
            (stacks * tile.members, self.sizes.positions, tile.parents),
            device=self.children.device,
            dtype=geometry.coefficient_dtype(self.children.dtype),
        )

    def settings(self, kernel: str) -> tuning.Settings:
        return settings(kernel, self.tile, self.part, self.children.dtype)

    def runs(self, kernel: str, stacks: int, parts: int = 1) -> tuple[int, int, int]:
        """Tiles of positions, runs of stacks, and how long a run is."""
        chosen = self.settings(kernel)
        tiles = ceil_div(self.sizes.positions, chosen.rows // self.tile.r_pad)
        slots = chosen.resident * geometry.multiprocessors(self.children.device)
        return tiles, *geometry.split_evenly(tiles * parts, stacks, slots)

    def launch(self, kernel: Any, name: str, grid: tuple[int, ...], **arguments: Any) -> None:
        """Run a kernel with the arguments that all of them take."""
        wanted = set(kernel.arg_names)
        chosen = self.settings(name)
        common = {
            "children": self.children,
            "activations": self.activations,
            "weight": self.weight,
            "centre": self.centre,
            "ROWS": chosen.rows,
            "PRECISION": vote_precision(self.children.dtype),
            **self.sizes.addressing(),
            **self.tile.constants(),
        }
        common = {name: value for name, value in common.items() if name in wanted}
        geometry.launch(kernel, grid, **common, **arguments, **chosen.options())
