"""The step as two operators that `torch.compile` and CUDA graphs see through."""

from typing import Any

import torch
from torch import Tensor

from capsroute.ops.inverted.triton.backward import gradients
from capsroute.ops.inverted.triton.forward import weighted_votes
from capsroute.ops.inverted.triton.geometry import Geometry


@torch.library.custom_op("capsroute::inverted_forward", mutates_args=())
def inverted_forward(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    stride: int,
    scale: float,
    rows_first: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Poses, and the coefficients as (window, positions, out), empty unless `keep`.

    `rows_first` says that the weight is (k, k, in, a, out, b), as the kernels for small poses
    read it.
    """
    sizes = Geometry.of(children, weight, stride, rows_first)
    poses, shares, _ = weighted_votes(
        children.contiguous(), weight.contiguous(), parents.contiguous(), None, sizes, scale, keep
    )
    return poses, shares if keep else children.new_empty(0)


@inverted_forward.register_fake
def _(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    stride: int,
    scale: float,
    rows_first: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    poses = torch.empty_like(parents, memory_format=torch.contiguous_format)
    if not keep:
        return poses, children.new_empty(0)
    batch, height, width, n_out, _ = parents.shape
    window = weight.shape[0] * weight.shape[1] * weight.shape[2]
    dtype = torch.bfloat16 if children.dtype == torch.bfloat16 else torch.float32
    return poses, children.new_empty((window, batch * height * width, n_out), dtype=dtype)


@torch.library.custom_op("capsroute::inverted_backward", mutates_args=())
def inverted_backward(
    grad_poses: Tensor,
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    stride: int,
    scale: float,
    rows_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = Geometry.of(children, weight, stride, rows_first)
    grad_poses = grad_poses.to(children.dtype).contiguous()
    return gradients(
        grad_poses,
        children.contiguous(),
        weight.contiguous(),
        parents.contiguous(),
        sizes,
        scale,
    )


@inverted_backward.register_fake
def _(
    grad_poses: Tensor,
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    stride: int,
    scale: float,
    rows_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    like = torch.contiguous_format
    return (
        torch.empty_like(children, memory_format=like),
        torch.empty_like(weight, memory_format=like),
        torch.empty_like(parents, memory_format=like),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    children, weight, parents, ctx.stride, ctx.scale, ctx.rows_first, _ = inputs
    ctx.save_for_backward(children, weight, parents)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_poses: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    children, weight, parents = ctx.saved_tensors
    grads = inverted_backward(
        grad_poses, children, weight, parents, ctx.stride, ctx.scale, ctx.rows_first
    )
    return *grads, None, None, None, None


inverted_forward.register_autograd(_backward, setup_context=_setup_context)
