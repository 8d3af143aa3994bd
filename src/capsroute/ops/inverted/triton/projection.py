"""The 1×1 convolution that makes primary capsules, LayerNorm and the move by rows in one pass.

For inference: nobody needs the poses before LayerNorm, so they are neither written nor read again.
The backward pass would need them; with gradients the convolution stays PyTorch's, and norm.py
follows it.

A program keeps the transforms of BLOCK_C capsules in shared memory and goes through positions. Its
128 columns are ordered by the layout of the tensor cores' accumulator, in which a thread owns the
columns 2l and 2l + 1 of every 8:

    column = (capsule low, element high, capsule high, element low), 4 high capsules, 2 low elements

So a thread holds whole poses, of capsules that follow each other: LayerNorm needs no other thread,
and what a quad of them writes of a row is 64 bytes that lie together.
"""

# Kernel arguments have no Python types, constants are in capitals.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code=assignment
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from capsroute.ops.inverted.triton import geometry
from capsroute.ops.inverted.triton.geometry import ceil_div, power_of_two

POSITIONS, COLUMNS = 64, 128  # of a program's tile
QUAD = 4  # threads that share a row of the accumulator
CHANNELS = range(16, 129)  # the least that a product takes; the most that leaves room for two tiles
RESIDENT = 3  # programs on a multiprocessor at once


def fits(features: Tensor, projection: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel can make such capsules; fp32 products are left to PyTorch's settings."""
    capsules, d, channels = projection.shape
    belong = features.shape[-1] == channels and features.device == projection.device
    sizes = d == power_of_two(d) and channels == power_of_two(channels) and channels in CHANNELS
    whole = 2 <= d <= COLUMNS // QUAD and capsules % (COLUMNS // d) == 0
    return belong and sizes and whole and dtype in (torch.float16, torch.bfloat16)


@triton.jit
def projection_kernel(
    features,
    projection,
    weight,
    bias,
    out,
    positions,
    eps,
    run,
    CHANNELS: tl.constexpr,
    CAPSULES: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    PLANE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """BLOCK_C capsules of `run` positions, BLOCK_M at a time; PLANE positions are an image."""
    TILES: tl.constexpr = CAPSULES // BLOCK_C  # neighbouring programs share their features
    LOW: tl.constexpr = BLOCK_C // 4
    WIDTH: tl.constexpr = D // R
    tile, part = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    first = part * run
    last = tl.minimum(first + run, positions)

    column = tl.arange(0, BLOCK_C * D)
    capsule = tile * BLOCK_C + column // 2 % 4 * LOW + column // (4 * D)
    channel = capsule * D + column // 8 % (D // 2) * 2 + column % 2
    k = tl.arange(0, CHANNELS)
    transform = tl.load(projection + channel[None, :] * CHANNELS + k[:, None])
    gain = tl.load(weight + tl.arange(0, D)).to(tl.float32)[None, None, :]
    offset = tl.load(bias + tl.arange(0, D)).to(tl.float32)[None, None, :]
    row = tl.arange(0, R)[None, :, None] * (PLANE * CAPSULES * WIDTH)
    within = tile * (BLOCK_C * WIDTH) + tl.arange(0, BLOCK_C * WIDTH)[None, None, :]

    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        inside = m < last
        at = features + m[:, None] * CHANNELS + k[None, :]
        x = tl.dot(tl.load(at, mask=inside[:, None], other=0.0), transform)
        x = tl.reshape(x, (BLOCK_M, LOW, D // 2, 4, 2))
        x = tl.reshape(tl.permute(x, (0, 3, 1, 2, 4)), (BLOCK_M, BLOCK_C, D))
        x -= (tl.sum(x, axis=2) * (1.0 / D))[:, :, None]
        rate = tl.rsqrt(tl.sum(x * x, axis=2) * (1.0 / D) + eps)
        y = (x * rate[:, :, None] * gain + offset).to(out.dtype.element_ty)
        y = tl.permute(tl.reshape(y, (BLOCK_M, BLOCK_C, R, WIDTH)), (0, 2, 1, 3))
        corner = m // PLANE * (PLANE * CAPSULES * D) + m % PLANE * (CAPSULES * WIDTH)
        to = out + corner[:, None, None] + row + within
        y = tl.reshape(y, (BLOCK_M, R, BLOCK_C * WIDTH))
        tl.store(to, y, mask=inside[:, None, None])


@torch.library.custom_op("capsroute::project_by_rows", mutates_args=())
def project_by_rows(
    features: Tensor, projection: Tensor, weight: Tensor, bias: Tensor, eps: float, rows: int
) -> Tensor:
    """(B, H, W, C) and (in, d, C) -> (B, rows, H, W, in, d / rows), normalised; no gradient."""
    capsules, d, channels = projection.shape
    positions = features.numel() // channels
    block_c = COLUMNS // d
    tiles, blocks = capsules // block_c, ceil_div(positions, POSITIONS)
    programs = max(1, RESIDENT * geometry.multiprocessors(features.device) // tiles)
    run = ceil_div(blocks, programs) * POSITIONS
    out = features.new_empty(_shape(features, projection, rows))
    geometry.launch(
        projection_kernel,
        (tiles * ceil_div(positions, run),),
        features=features.contiguous(),
        projection=projection.contiguous(),
        weight=weight.contiguous(),
        bias=bias.contiguous(),
        out=out,
        positions=positions,
        eps=eps,
        run=run,
        CHANNELS=channels,
        CAPSULES=capsules,
        D=d,
        R=rows,
        PLANE=positions // features.shape[0],
        BLOCK_M=POSITIONS,
        BLOCK_C=block_c,
        num_warps=4,
        num_stages=2,
    )
    return out


@project_by_rows.register_fake
def _(
    features: Tensor, projection: Tensor, weight: Tensor, bias: Tensor, eps: float, rows: int
) -> Tensor:
    return features.new_empty(_shape(features, projection, rows))


def _shape(features: Tensor, projection: Tensor, rows: int) -> tuple[int, ...]:
    batch, *image, _ = features.shape
    capsules, d, _ = projection.shape
    return (batch, rows, *image, capsules, d // rows)
