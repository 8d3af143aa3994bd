"""Sums that cross programs: a buffer for each run of them, added in a fixed order by one kernel."""

# Kernel arguments have no Python types, constants are in capitals.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from capsroute.ops.inverted.triton import geometry
from capsroute.ops.inverted.triton.geometry import ceil_div, power_of_two

TILE = 4096  # elements that a program adds: few enough to be loaded all at once


@triton.jit
def add_kernel(buffers, out, size, SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(SPLITS, size) -> (size,), in the dtype of `out`."""
    row = tl.arange(0, ROWS)[:, None]
    # a packed weight may have 2³¹ elements where the weight itself has fewer
    column = (tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
    at = tl.cast(row, tl.int64) * size + column
    terms = tl.load(buffers + at, mask=(row < SPLITS) & (column < size), other=0.0)
    total = tl.sum(terms, axis=0)[None, :]
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < size)


def partial(splits: int, out: Tensor, carried: bool = False) -> Tensor:
    """A buffer for each split, to be added by `add_splits`; `out` itself if there is but one.

    Launches that add to what those before have left (`carried`) start from zero, in fp32.
    """
    if splits == 1 and not carried:
        return out[None]
    make = torch.zeros if carried else torch.empty
    return make((splits, *out.shape), device=out.device, dtype=torch.float32)


def add_splits(buffers: Tensor, out: Tensor) -> Tensor:
    if buffers.data_ptr() == out.data_ptr():
        return out
    splits = buffers.shape[0]
    rows = power_of_two(splits)
    block = max(16, TILE // rows)
    geometry.launch(
        add_kernel,
        (ceil_div(out.numel(), block),),
        buffers=buffers,
        out=out,
        size=out.numel(),
        SPLITS=splits,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
    )
    return out
