"""Sizes of a routing step, and the one place that launches kernels."""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

# Sizes up to which every component of a pose is a register of its own (8×8 matrices).
SMALL_SIDE = 8
SMALL_POSE = 64


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def ceil_div(n: int, by: int) -> int:
    return -(-n // by)


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
    def of(cls, children: Tensor, weight: Tensor, stride: int, rows_first: bool) -> "Geometry":
        """`rows_first`: the weight comes as (k, k, in, a, out, b), not (k, k, in, out, a, b)."""
        batch, height, width, n_in, d = children.shape
        k = weight.shape[0]
        a, n_out = weight.shape[3:5] if rows_first else (weight.shape[4], weight.shape[3])
        return cls(batch, height, width, n_in, n_out, k, stride, d // a, a, weight.shape[5])

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

    @property
    def small(self) -> bool:
        """Whether a pose fits into registers, component by component."""
        return max(self.a, self.b) <= SMALL_SIDE and self.rows * self.b <= SMALL_POSE

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
    """Run a kernel. Tests replace this with a compiler, which needs no GPU."""
    kernel[grid](**arguments)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def coefficient_dtype(storage: torch.dtype) -> torch.dtype:
    """In which coefficients are kept between kernels: fp16 would not hold the range of slopes."""
    return torch.bfloat16 if storage == torch.bfloat16 else torch.float32


def words(tensor: Tensor, run: int) -> tuple[Tensor, int]:
    """The tensor as words of up to 8 bytes, and the elements in a word.

    A word must not straddle runs of `run` elements. A lane then loads four bf16 at once.
    """
    for word in (torch.int64, torch.int32):
        pack = word.itemsize // tensor.element_size()
        if pack > 1 and run % pack == 0:
            if tensor.data_ptr() % word.itemsize:
                tensor = tensor.clone()
            return tensor.view(word), pack
    return tensor, 1
