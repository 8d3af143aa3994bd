"""The step as two operators that `torch.compile` and CUDA graphs see through.

The weight comes as (k, k, in, out, a, b) or, for small poses, packed (`Tile.pack`), so its sizes
travel beside it: `kernel` is k, `inner` is a.
"""

from typing import Any

import torch
from torch import Tensor

from capsroute.ops.inverted.double_backward import refuse_double_backward
from capsroute.ops.inverted.triton.backward import gradients
from capsroute.ops.inverted.triton.forward import weighted_votes
from capsroute.ops.inverted.triton.geometry import Geometry, coefficient_dtype


@torch.library.custom_op("capsroute::inverted_forward", mutates_args=())
def inverted_forward(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    kernel: int,
    inner: int,
    stride: int,
    scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Poses, and the coefficients as (window, positions, out), empty unless `keep`."""
    sizes = Geometry.of(children, parents, kernel, inner, stride)
    return weighted_votes(
        children.contiguous(), weight.contiguous(), parents.contiguous(), sizes, scale, keep
    )


@inverted_forward.register_fake
def _(
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    kernel: int,
    inner: int,
    stride: int,
    scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    poses = torch.empty_like(parents, memory_format=torch.contiguous_format)
    dtype = coefficient_dtype(children.dtype)
    if not keep:
        return poses, children.new_empty(0, dtype=dtype)
    batch, height, width, n_out, _ = parents.shape
    window = kernel * kernel * children.shape[3]
    return poses, children.new_empty((window, batch * height * width, n_out), dtype=dtype)


@torch.library.custom_op("capsroute::inverted_backward", mutates_args=())
def inverted_backward(
    grad_poses: Tensor,
    children: Tensor,
    weight: Tensor,
    parents: Tensor,
    kernel: int,
    inner: int,
    stride: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = Geometry.of(children, parents, kernel, inner, stride)
    return gradients(
        grad_poses.to(children.dtype).contiguous(),
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
    kernel: int,
    inner: int,
    stride: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    like = torch.contiguous_format
    return (
        torch.empty_like(children, memory_format=like),
        torch.empty_like(weight, memory_format=like),
        torch.empty_like(parents, memory_format=like),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    children, weight, parents, *ctx.sizes, _ = inputs
    ctx.save_for_backward(children, weight, parents)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_poses: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = inverted_backward(grad_poses, *ctx.saved_tensors, *ctx.sizes)
    return *grads, None, None, None, None, None


inverted_forward.register_autograd(_backward, setup_context=_setup_context)
inverted_backward.register_autograd(refuse_double_backward)
