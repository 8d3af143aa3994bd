"""∂L/∂children, added up from the windows that see a child."""

# Kernel arguments have no Python types, constants are in capitals.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from capsroute.ops.inverted.triton import geometry
from capsroute.ops.inverted.triton.geometry import Geometry, ceil_div, power_of_two


@triton.jit
def fold_kernel(
    grad_windows,
    grad_children,
    positions,
    height,
    width,
    out_height,
    out_width,
    stride,
    pixels,
    K: tl.constexpr,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Each child gathers its gradient from the windows that see it, and from the parts of those."""
    pixel = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    x = pixel % width
    y = pixel // width % height
    image = pixel // (width * height)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = (pixel < pixels)[:, None] & (channel < CHANNELS)[None, :]
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for tap in tl.static_range(K * K):
        up, left = y - tap // K, x - tap % K
        row, column = up // stride, left // stride
        seen = (up >= 0) & (left >= 0) & (row * stride == up) & (column * stride == left)
        seen = seen & (row < out_height) & (column < out_width)
        n = tl.cast((image * out_height + row) * out_width + column, tl.int64)
        for part in tl.static_range(PARTS):
            slot = tl.cast(part * (K * K) + tap, tl.int64) * positions + n
            at = (slot * CHANNELS)[:, None] + channel[None, :]
            mask = real & seen[:, None]
            total += tl.load(grad_windows + at, mask=mask, other=0.0).to(tl.float32)
    to = (tl.cast(pixel, tl.int64) * CHANNELS)[:, None] + channel[None, :]
    tl.store(grad_children + to, total.to(grad_children.dtype.element_ty), mask=real)


def least_padding(size: int, largest: int) -> int:
    """The power of two in whose multiples `size` fits best, down to what a warp loads at once."""
    blocks = [largest >> shift for shift in range(4) if largest >> shift >= 128] or [largest]
    return min(blocks, key=lambda block: ceil_div(size, block) * block)


def fold(grad_windows: Tensor, children: Tensor, sizes: Geometry) -> Tensor:
    """∂L/∂children from (parts, k², positions, in, R·A)."""
    parts = grad_windows.shape[0]
    if parts == 1 and sizes.k == 1 and sizes.stride == 1:
        return grad_windows.view(children.shape)  # every child is seen once
    channels = sizes.n_in * sizes.rows * sizes.a
    pixels = sizes.batch * sizes.height * sizes.width
    block_c = least_padding(channels, min(1024, power_of_two(channels)))
    block_p = max(1, 2048 // block_c)
    grad_children = torch.empty_like(children)
    addressing = sizes.addressing()
    geometry.launch(
        fold_kernel,
        (ceil_div(pixels, block_p), ceil_div(channels, block_c)),
        grad_windows=grad_windows,
        grad_children=grad_children,
        **{name: addressing[name] for name in addressing if name.islower()},
        pixels=pixels,
        K=sizes.k,
        CHANNELS=channels,
        PARTS=parts,
        BLOCK_P=block_p,
        BLOCK_C=block_c,
        num_warps=4,
    )
    return grad_children
