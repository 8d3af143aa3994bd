"""LayerNorm of the poses on their way into a first iteration, which wants them by rows.

A first iteration is a convolution with the rows of a pose in the batch. LayerNorm reads and writes
every pose anyway, so here it also moves them: (B, H, W, in, d) -> (B, rows, H, W, in, d / rows).
Backward, statistics are taken again from the poses, in one pass for all gradients.
"""

# Kernel arguments have no Python types, constants are in capitals.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: N803

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from capsroute.ops.inverted.triton import geometry
from capsroute.ops.inverted.triton.geometry import ceil_div, power_of_two
from capsroute.ops.inverted.triton.splits import add_splits

ELEMENTS = 2048  # of a program's tile: 16 a thread, so a pose of 16 is one thread's
# that a multiprocessor holds at once (96 registers a thread), backward: one round
PROGRAMS_EACH = 5


@triton.jit
def by_rows(m, d, plane, D: tl.constexpr, R: tl.constexpr):
    """Where element d of capsule m lies by rows; `plane` capsules are an image."""
    columns: tl.constexpr = D // R
    first = m // plane * (plane * D) + m % plane * columns
    return first[:, None] + (d // columns * (plane * columns) + d % columns)[None, :]


@triton.jit
def normed(poses, m, d, inside, eps, D: tl.constexpr):
    """Poses of zero mean and unit variance, and one over their standard deviation."""
    x = tl.load(poses + m[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    x = tl.where(inside, x - (tl.sum(x, axis=1) / D)[:, None], 0.0)
    rate = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + eps)
    return x * rate[:, None], rate


@triton.jit
def norm_kernel(
    poses,
    weight,
    bias,
    out,
    capsules,
    plane,
    eps,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    m, d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    inside = (m < capsules)[:, None] & (d < D)[None, :]
    x, _ = normed(poses, m, d, inside, eps, D)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    b = tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)
    y = x * w[None, :] + b[None, :]
    tl.store(out + by_rows(m, d, plane, D, R), y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_gradient_kernel(
    grad_out,
    poses,
    weight,
    grad_poses,
    grad_affine,
    capsules,
    plane,
    eps,
    run,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """∂L/∂poses, and of `run` capsules ∂L/∂weight and ∂L/∂bias: (programs, 2, D)."""
    d = tl.arange(0, BLOCK_D)
    w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    grad_bias = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    first = tl.program_id(0) * run
    last = tl.minimum(first + run, capsules)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        inside = (m < last)[:, None] & (d < D)[None, :]
        x, rate = normed(poses, m, d, inside, eps, D)
        at = by_rows(m, d, plane, D, R)
        g = tl.load(grad_out + at, mask=inside, other=0.0).to(tl.float32)
        grad_weight += g * x
        grad_bias += g
        g *= w[None, :]
        along = (tl.sum(g * x, axis=1) / D)[:, None]
        g = (g - (tl.sum(g, axis=1) / D)[:, None] - x * along) * rate[:, None]
        to = grad_poses + m[:, None] * D + d[None, :]
        tl.store(to, g.to(grad_poses.dtype.element_ty), mask=inside)
    to = grad_affine + tl.program_id(0) * (2 * D) + d
    tl.store(to, tl.sum(grad_weight, axis=0), mask=d < D)
    tl.store(to + D, tl.sum(grad_bias, axis=0), mask=d < D)


def _sizes(poses: Tensor, rows: int) -> dict[str, int]:
    batch, *_, d = poses.shape
    block_d = power_of_two(d)
    return {
        "capsules": poses.numel() // d,
        "plane": poses.numel() // d // batch,
        "D": d,
        "R": rows,
        "BLOCK_M": max(1, ELEMENTS // block_d),
        "BLOCK_D": block_d,
    }


@torch.library.custom_op("capsroute::norm_by_rows", mutates_args=())
def norm_by_rows(poses: Tensor, weight: Tensor, bias: Tensor, eps: float, rows: int) -> Tensor:
    """(B, H, W, in, d) -> (B, rows, H, W, in, d / rows), in the dtype of the poses."""
    sizes = _sizes(poses, rows)
    out = torch.empty(_by_rows_shape(poses, rows), device=poses.device, dtype=poses.dtype)
    geometry.launch(
        norm_kernel,
        (ceil_div(sizes["capsules"], sizes["BLOCK_M"]),),
        poses=poses.contiguous(),
        weight=weight,
        bias=bias,
        out=out,
        eps=eps,
        **sizes,
        num_warps=4,
    )
    return out


@norm_by_rows.register_fake
def _(poses: Tensor, weight: Tensor, bias: Tensor, eps: float, rows: int) -> Tensor:
    return poses.new_empty(_by_rows_shape(poses, rows))


@torch.library.custom_op("capsroute::norm_by_rows_backward", mutates_args=())
def norm_by_rows_backward(
    grad_out: Tensor, poses: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """∂L/∂poses; ∂L/∂weight and ∂L/∂bias as (2, d) in fp32."""
    sizes = _sizes(poses, grad_out.shape[1])
    tiles = ceil_div(sizes["capsules"], sizes["BLOCK_M"])
    programs = min(tiles, PROGRAMS_EACH * geometry.multiprocessors(poses.device))
    run = ceil_div(tiles, programs)
    programs = ceil_div(tiles, run)
    poses = poses.contiguous()
    grad_poses = torch.empty_like(poses)
    sums = torch.empty((programs, 2, sizes["D"]), device=poses.device, dtype=torch.float32)
    geometry.launch(
        norm_gradient_kernel,
        (programs,),
        grad_out=grad_out.contiguous(),
        poses=poses,
        weight=weight,
        grad_poses=grad_poses,
        grad_affine=sums,
        eps=eps,
        run=run * sizes["BLOCK_M"],
        **sizes,
        num_warps=4,
    )
    affine = torch.empty((2, sizes["D"]), device=poses.device, dtype=torch.float32)
    return grad_poses, add_splits(sums, affine)


@norm_by_rows_backward.register_fake
def _(grad_out: Tensor, poses: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    grad_poses = torch.empty_like(poses, memory_format=torch.contiguous_format)
    return grad_poses, poses.new_empty((2, poses.shape[-1]), dtype=torch.float32)


def _by_rows_shape(poses: Tensor, rows: int) -> tuple[int, ...]:
    batch, *image, d = poses.shape
    return (batch, rows, *image, d // rows)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    poses, weight, bias, ctx.eps, _ = inputs
    ctx.save_for_backward(poses, weight)
    ctx.bias_dtype = bias.dtype


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    poses, weight = ctx.saved_tensors
    grad_poses, affine = norm_by_rows_backward(grad_out, poses, weight, ctx.eps)
    grad_weight, grad_bias = affine.unbind()
    return grad_poses, grad_weight.to(weight.dtype), grad_bias.to(ctx.bias_dtype), None, None


norm_by_rows.register_autograd(_backward, setup_context=_setup_context)
