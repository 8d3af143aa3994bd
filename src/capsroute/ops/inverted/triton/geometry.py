"""Sizes of a routing step, and the one place that launches kernels."""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

SMALL_SIDE = 8  # of a pose
MOST_COLUMNS = 1024  # of an accumulator: eight warps side by side


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def ceil_div(n: int, by: int) -> int:
    return -(-n // by)


def padded_columns(n_out: int, b: int) -> int:
    """Columns of an accumulator that holds the votes for every parent (tile.py)."""
    return max(16, power_of_two(b) * max(4, power_of_two(n_out)))


def fits_accumulator(rows: int, a: int, b: int, n_out: int) -> bool:
    """Whether the poses are small: tile.py has their kernels, large.py those of all others."""
    return max(rows, a, b) <= SMALL_SIDE and padded_columns(n_out, b) <= MOST_COLUMNS


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A step's sizes. A pose has `rows` rows: of `a` elements for children, `b` for parents."""

    batch: int
    height: int
    width: int
    n_in: int
    n_out: int
    k: int
    stride: int
    rows: int
    a: int
    b: int

    @classmethod
    def of(cls, children: Tensor, parents: Tensor, k: int, a: int, stride: int) -> "Geometry":
        """`a` is the inner size of a transform, `k` the kernel of the convolution."""
        batch, height, width, n_in, d = children.shape
        n_out, d_out = parents.shape[3:]
        rows = d // a
        return cls(batch, height, width, n_in, n_out, k, stride, rows, a, d_out // rows)

    @property
    def out_height(self) -> int:
        return (self.height - self.k) // self.stride + 1

    @property
    def out_width(self) -> int:
        return (self.width - self.k) // self.stride + 1

    @property
    def positions(self) -> int:
        """Output positions of the whole batch."""
        return self.batch * self.out_height * self.out_width

    @property
    def window(self) -> int:
        """Children that one position sees."""
        return self.k * self.k * self.n_in

    def addressing(self) -> dict[str, int]:
        """Arguments that every kernel takes to find a window's children."""
        return {
            "positions": self.positions,
            "height": self.height,
            "width": self.width,
            "out_height": self.out_height,
            "out_width": self.out_width,
            "stride": self.stride,
            "N_IN": self.n_in,
            "N_OUT": self.n_out,
            "K": self.k,
            "R": self.rows,
            "A": self.a,
            "B": self.b,
        }

    def parents_shape(self) -> tuple[int, ...]:
        return (self.batch, self.out_height, self.out_width, self.n_out, self.rows * self.b)


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Run a kernel where its tensors are: triton alone would take the current device.

    Tests replace this with a compiler, which needs no GPU.
    """
    with torch.cuda.device_of(next(x for x in arguments.values() if isinstance(x, Tensor))):
        kernel[grid](**arguments)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter, where several runs should be tried too
    return torch.cuda.get_device_properties(device).multi_processor_count


def coefficient_dtype(storage: torch.dtype) -> torch.dtype:
    """In which coefficients are kept between kernels: fp16 would not hold the range of slopes."""
    return torch.bfloat16 if storage == torch.bfloat16 else torch.float32


@functools.cache
def split_evenly(tiles: int, items: int, slots: int, price: float = 0.0) -> tuple[int, int]:
    """Into how many runs the items of every tile go, and how long a run is.

    `slots` programs run at a time; their rounds are counted. A run's start costs about an item,
    adding the buffers of several runs `price` items each.
    """

    def cost(runs: int) -> float:
        rounds = ceil_div(tiles * runs, slots)
        return rounds * (ceil_div(items, runs) + 1) + (price * runs if runs > 1 else 0.0)

    run = ceil_div(items, min(range(1, min(items, 64) + 1), key=cost))
    return ceil_div(items, run), run
