"""LayerNorm of the poses on their way into a first iteration, which wants them by rows.

A first iteration is a convolution with the rows of a pose in the batch. LayerNorm reads and writes
every pose anyway, so here it also moves them: (B, H, W, in, d) -> (B, rows, H, W, in, d / rows).
Backward, statistics are taken again from the poses, in one pass for all gradients.

A tile holds S elements of every pose, whole rows; a pose is a tuple of D / S such slices.
"""

# Kernel arguments have no Python types, constants are in capitals. Tuples grow slice by slice.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code=assignment
# ruff: noqa: N803

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from capsroute.ops.inverted.double_backward import refuse_double_backward
from capsroute.ops.inverted.triton import geometry
from capsroute.ops.inverted.triton.geometry import ceil_div, power_of_two
from capsroute.ops.inverted.triton.splits import add_splits

ELEMENTS = 1024  # of a program's tile, at least: of 16 a thread, half would be loaded too late
# Of the tiles of a multiprocessor's programs. Backward what it holds at once (60 a thread, and four
# registers for each), since every program leaves sums to be added; forward several rounds.
FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 32768, 7680


@triton.jit
def as_they_lie(m, d, D: tl.constexpr):
    """Where element d of capsule m lies."""
    return m[:, None] * D + d[None, :]


@triton.jit
def by_rows(m, d, D: tl.constexpr, R: tl.constexpr, PLANE: tl.constexpr):
    """The same by rows; PLANE capsules are an image."""
    columns: tl.constexpr = D // R
    first = m // PLANE * (PLANE * D) + m % PLANE * columns
    return first[:, None] + (d // columns * (PLANE * columns) + d % columns)[None, :]


@triton.jit
def load_vector(vector, d, D: tl.constexpr, S: tl.constexpr):
    slices = ()
    for s in tl.static_range(D // S):
        slices += (tl.load(vector + s * S + d, mask=d < S, other=0.0).to(tl.float32)[None, :],)
    return slices


@triton.jit
def load_poses(poses, m, d, inside, D: tl.constexpr, S: tl.constexpr):
    slices = ()
    for s in tl.static_range(D // S):
        at = poses + as_they_lie(m, s * S + d, D)
        slices += (tl.load(at, mask=inside, other=0.0).to(tl.float32),)
    return slices


@triton.jit
def add(a, b):
    slices = ()
    for s in tl.static_range(len(a)):
        slices += (a[s] + b[s],)
    return slices


@triton.jit
def multiply(a, b):
    slices = ()
    for s in tl.static_range(len(a)):
        slices += (a[s] * b[s],)
    return slices


@triton.jit
def mean(slices, inside, D: tl.constexpr):
    total = slices[0]
    for s in tl.static_range(1, len(slices)):
        total += slices[s]
    return tl.sum(tl.where(inside, total, 0.0), axis=1)[:, None] * (1.0 / D)


@triton.jit
def normed(x, inside, eps, D: tl.constexpr):
    """Poses of zero mean and unit variance, and one over their standard deviation."""
    centre = mean(x, inside, D)
    centred = [y - centre for y in x]
    rate = tl.rsqrt(mean(multiply(centred, centred), inside, D) + eps)
    return [y * rate for y in centred], rate


@triton.jit
def norm_kernel(
    poses,
    weight,
    bias,
    out,
    capsules,
    eps,
    run,
    D: tl.constexpr,
    R: tl.constexpr,
    PLANE: tl.constexpr,
    S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """LayerNorm of `run` capsules, BLOCK_M at a time."""
    d = tl.arange(0, BLOCK_S)
    w, b = load_vector(weight, d, D, S), load_vector(bias, d, D, S)
    program = tl.program_id(0)
    first = program * run
    last = tl.minimum(first + run, capsules)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        inside = (m < last)[:, None] & (d < S)[None, :]
        x, _ = normed(load_poses(poses, m, d, inside, D, S), inside, eps, D)
        y = add(multiply(x, w), b)
        for s in tl.static_range(D // S):
            to = out + by_rows(m, s * S + d, D, R, PLANE)
            tl.store(to, y[s].to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_gradient_kernel(
    grad_out,
    poses,
    weight,
    grad_poses,
    grad_affine,
    capsules,
    eps,
    run,
    D: tl.constexpr,
    R: tl.constexpr,
    PLANE: tl.constexpr,
    S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """∂L/∂poses, and of `run` capsules ∂L/∂weight and ∂L/∂bias: (programs, 2, D)."""
    d = tl.arange(0, BLOCK_S)
    w = load_vector(weight, d, D, S)
    grad_weight = (tl.zeros((BLOCK_M, BLOCK_S), tl.float32),) * (D // S)
    grad_bias = grad_weight
    program = tl.program_id(0)
    first = program * run
    last = tl.minimum(first + run, capsules)
    for start in range(first, last, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        inside = (m < last)[:, None] & (d < S)[None, :]
        g = ()
        for s in tl.static_range(D // S):
            at = grad_out + by_rows(m, s * S + d, D, R, PLANE)
            g += (tl.load(at, mask=inside, other=0.0).to(tl.float32),)
        x, rate = normed(load_poses(poses, m, d, inside, D, S), inside, eps, D)
        grad_weight = add(grad_weight, multiply(g, x))
        grad_bias = add(grad_bias, g)
        g = multiply(g, w)
        along, centre = mean(multiply(g, x), inside, D), mean(g, inside, D)
        for s in tl.static_range(D // S):
            to = grad_poses + as_they_lie(m, s * S + d, D)
            slope = (g[s] - centre - x[s] * along) * rate
            tl.store(to, slope.to(grad_poses.dtype.element_ty), mask=inside)
    for s in tl.static_range(D // S):
        to = grad_affine + program * (2 * D) + s * S + d
        tl.store(to, tl.sum(grad_weight[s], axis=0), mask=d < S)
        tl.store(to + D, tl.sum(grad_bias[s], axis=0), mask=d < S)


def _slice(d: int, rows: int, at_once: int) -> int:
    """How many elements of a pose a tile holds: all if a power of two, else `at_once` rows.

    6×6 in 64 lanes leave 28 of them idle, rows of 6 in 8 only two, and sums over rows need no
    other lane.
    """
    return d if d == power_of_two(d) else d // rows * math.gcd(rows, at_once)


def _sizes(poses: Tensor, rows: int, at_once: int, elements: int) -> dict[str, int]:
    batch, *_, d = poses.shape
    capsules = poses.numel() // d
    of_a_pose = _slice(d, rows, at_once)
    block_s, block_m = power_of_two(of_a_pose), power_of_two(ceil_div(ELEMENTS, d))
    programs_each = max(1, elements // (block_m * block_s * (d // of_a_pose)))
    programs = programs_each * geometry.multiprocessors(poses.device)
    return {
        "capsules": capsules,
        "run": ceil_div(ceil_div(capsules, block_m), programs) * block_m,
        "D": d,
        "R": rows,
        "PLANE": capsules // batch,
        "S": of_a_pose,
        "BLOCK_M": block_m,
        "BLOCK_S": block_s,
    }


@torch.library.custom_op("capsroute::norm_by_rows", mutates_args=())
def norm_by_rows(poses: Tensor, weight: Tensor, bias: Tensor, eps: float, rows: int) -> Tensor:
    """(B, H, W, in, d) -> (B, rows, H, W, in, d / rows), in the dtype of the poses."""
    # one row: stores of neighbouring capsules then touch
    sizes = _sizes(poses, rows, at_once=1, elements=FORWARD_ELEMENTS)
    out = torch.empty(_by_rows_shape(poses, rows), device=poses.device, dtype=poses.dtype)
    geometry.launch(
        norm_kernel,
        (ceil_div(sizes["capsules"], sizes["run"]),),
        poses=poses.contiguous(),
        weight=weight.contiguous(),
        bias=bias.contiguous(),
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
    # two rows: a pose is written in fewer pieces
    sizes = _sizes(poses, grad_out.shape[1], at_once=2, elements=BACKWARD_ELEMENTS)
    programs = ceil_div(sizes["capsules"], sizes["run"])
    poses = poses.contiguous()
    grad_poses = torch.empty_like(poses)
    sums = torch.empty((programs, 2, sizes["D"]), device=poses.device, dtype=torch.float32)
    geometry.launch(
        norm_gradient_kernel,
        (programs,),
        grad_out=grad_out.contiguous(),
        poses=poses,
        weight=weight.contiguous(),
        grad_poses=grad_poses,
        grad_affine=sums,
        eps=eps,
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
norm_by_rows_backward.register_autograd(refuse_double_backward)
