"""All gradients: which kernels run, and how (small_gradients.py, large_gradients.py).

r and the slopes of some children first, then one kernel for each gradient, then the next children.
No atomics: sums over positions, parents and windows that cross programs go through buffers that are
added in a fixed order.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from capsroute.ops.inverted.triton import geometry, tuning
from capsroute.ops.inverted.triton.fold import fold
from capsroute.ops.inverted.triton.forward import sum_votes, vote_precision, vote_runs
from capsroute.ops.inverted.triton.geometry import Geometry, ceil_div
from capsroute.ops.inverted.triton.large_gradients import large_gradients
from capsroute.ops.inverted.triton.small_gradients import (
    small_children_kernel,
    small_coefficients_kernel,
    small_weight_kernel,
)
from capsroute.ops.inverted.triton.splits import add_splits, partial
from capsroute.ops.inverted.triton.tile import STACK, WARP_COLUMNS, Tile, is_small


def gradients(
    grad_poses: Tensor,
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    sizes: Geometry,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """∂L/∂children, ∂L/∂weight and ∂L/∂parents."""
    small = is_small(sizes)
    run = _small_gradients if small else large_gradients
    windows = (sizes.k**2, sizes.positions, sizes.n_in, sizes.rows * sizes.a)
    size = math.prod(windows) * children.itemsize
    parts = tuning.parts_at_once(Tile.of(sizes).parts, size) if small else 1
    grad_windows = torch.empty((parts, *windows), device=children.device, dtype=children.dtype)
    grad_weight, grad_parents = run(
        grad_poses, children, weight, parents, grad_windows, sizes, scale
    )
    return fold(grad_windows, children, sizes), grad_weight, grad_parents


def _small_gradients(
    grad_poses: Tensor,
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    grad_windows: Tensor,
    sizes: Geometry,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Fill `grad_windows`; return ∂L/∂weight and ∂L/∂parents.

    Only so many children at a time that their coefficients fit into a buffer of a fixed size.
    """
    tile = Tile.of(sizes)
    chunks = tuning.chunks(tile, sizes.positions, children.dtype)
    longest = len(chunks[0])
    step = _SmallStep(
        children=children,
        weight=weight,
        parents=parents,
        grad_poses=grad_poses,
        coefficients=torch.empty(
            (longest * tile.members, sizes.positions, tile.parents, 2),
            device=children.device,
            dtype=geometry.coefficient_dtype(children.dtype),
        ),
        columns=torch.empty(
            (2, sizes.positions, tile.parents, tile.b_pad, tile.r_pad),
            device=children.device,
            dtype=children.dtype,
        ),
        sizes=sizes,
        scale=scale,
    )
    grad_weight, grad_parents = torch.empty_like(weight), torch.empty_like(parents)
    carry = len(chunks) > 1
    sums = partial(vote_runs("slopes", children, sizes, longest), grad_parents, carry)
    for stacks in chunks:
        step.fill_coefficients(stacks)
        step.add_grad_parents(stacks, sums, carry)
        step.fill_grad_windows(stacks, grad_windows)
        step.fill_grad_weight(stacks, grad_weight)
    return grad_weight, add_splits(sums, grad_parents)


@dataclasses.dataclass(frozen=True)
class _SmallStep:
    """What the kernels for small poses share; `stacks` says whose coefficients the buffer holds."""

    children: Tensor
    weight: Tensor
    parents: Tensor
    grad_poses: Tensor
    coefficients: Tensor
    columns: Tensor
    sizes: Geometry
    scale: float

    @property
    def tile(self) -> Tile:
        return Tile.of(self.sizes)

    def fill_coefficients(self, stacks: range) -> None:
        tile, chosen = self.tile, self._settings("coefficients")
        tiles = ceil_div(self.sizes.positions, chosen.rows // tile.r_pad)
        splits, split = geometry.split_evenly(tiles, len(stacks), self._slots(chosen))
        self._launch(
            small_coefficients_kernel,
            (tiles, splits),
            stacks,
            chosen,
            children=self.children,
            weight=self.weight,
            parents=self.parents,
            grad_poses=self.grad_poses,
            columns=self.columns,
            scale=self.scale,
            split=split,
            ROWS=chosen.rows,
            PRECISION=vote_precision(self.children.dtype),
        )

    def add_grad_parents(self, stacks: range, sums: Tensor, carry: bool) -> None:
        tensors = (self.children, self.weight, self.parents, self.coefficients)
        sum_votes(sums, *tensors, self.sizes, self.scale, stacks, given=True, carry=carry)

    def fill_grad_windows(self, stacks: range, grad_windows: Tensor) -> None:
        """Of as many parts of the parents at a time as the buffer has room for."""
        tile, chosen = self.tile, self._settings("children")
        tiles, parts = ceil_div(self.sizes.positions, chosen.rows // tile.r_pad), len(grad_windows)
        splits, split = geometry.split_evenly(tiles * parts, len(stacks), self._slots(chosen))
        for first_part in range(0, tile.parts, parts):
            self._launch(
                small_children_kernel,
                (tiles, splits, parts),
                stacks,
                chosen,
                weight=self.weight,
                parents=self.parents,
                grad_poses=self.grad_poses,
                grad_windows=grad_windows,
                split=split,
                first_part=first_part,
                ROWS=chosen.rows,
                PART=tile.part,
                ADD=first_part > 0,
            )

    def fill_grad_weight(self, stacks: range, grad_weight: Tensor) -> None:
        tile, chosen = self.tile, self._settings("weight")
        block_n = max(4, chosen.rows // tile.r_pad)
        part = min(tile.columns, WARP_COLUMNS)
        halves = min(chosen.halves, 2 * len(stacks))
        programs, parts = ceil_div(2 * len(stacks), halves), tile.columns // part
        blocks = ceil_div(self.sizes.positions, block_n)
        splits, run = geometry.split_evenly(programs * parts, blocks, self._slots(chosen))
        out = grad_weight[stacks.start * STACK : stacks.stop * STACK]
        sums = partial(splits, out)
        self._launch(
            small_weight_kernel,
            (programs, splits, parts),
            stacks,
            chosen,
            children=self.children,
            columns=self.columns,
            grad_weight=sums,
            split=run * block_n,
            BLOCK_N=block_n,
            PART=part,
            HALVES=halves,
        )
        add_splits(sums, out)

    def _settings(self, kernel: str) -> tuning.Settings:
        return tuning.settings(kernel, self.tile, self.children.dtype)

    def _slots(self, chosen: tuning.Settings) -> int:
        return chosen.resident * geometry.multiprocessors(self.children.device)

    def _launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        stacks: range,
        chosen: tuning.Settings,
        **arguments: Any,
    ) -> None:
        geometry.launch(
            kernel,
            grid,
            coefficients=self.coefficients,
            begin=stacks.start,
            end=stacks.stop,
            **arguments,
            **self.sizes.addressing(),
            **self.tile.constants(),
            **chosen.options(),
        )
