"""The moments as two operators that `torch.compile` and CUDA graphs see through.

`query` and `prior` are empty where every child is shared out evenly. The weight comes packed
(`Tile.pack`), so its sizes travel beside it: `kernel` is k, `inner` is a.
"""

from typing import Any

import torch
from torch import Tensor

from capsroute.ops.inverted.double_backward import refuse_double_backward
from capsroute.ops.inverted.triton.geometry import Geometry
from capsroute.ops.votes.moments import Contest, Moments
from capsroute.ops.votes.triton import backward, forward
from capsroute.ops.votes.triton.launch import Operands


def _operands(
    children: Tensor,
    activations: Tensor,
    weight: Tensor,
    centre: Tensor,
    query: Tensor,
    prior: Tensor,
    kernel: int,
    inner: int,
    stride: int,
    gaussian: bool,
) -> tuple[Operands, Contest | None]:
    sizes = Geometry.of(children, centre, kernel, inner, stride)
    contest = None
    if query.numel() > 0:
        contest = Contest(query.contiguous(), prior.contiguous(), gaussian)
    whole = (x.contiguous() for x in (children, activations, weight, centre))
    return Operands(sizes, *whole), contest


@torch.library.custom_op("capsroute::vote_moments", mutates_args=())
def vote_moments(
    children: Tensor,
    activations: Tensor,
    weight: Tensor,
    centre: Tensor,
    query: Tensor,
    prior: Tensor,
    kernel: int,
    inner: int,
    stride: int,
    gaussian: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return forward.moments(
        *_operands(
            children, activations, weight, centre, query, prior, kernel, inner, stride, gaussian
        )
    )


@vote_moments.register_fake
def _(
    children: Tensor,
    activations: Tensor,
    weight: Tensor,
    centre: Tensor,
    query: Tensor,
    prior: Tensor,
    kernel: int,
    inner: int,
    stride: int,
    gaussian: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        centre.new_empty(centre.shape[:-1]),
        centre.new_empty(centre.shape),
        centre.new_empty(centre.shape),
    )


@torch.library.custom_op("capsroute::vote_moments_backward", mutates_args=())
def vote_moments_backward(
    grad_mass: Tensor,
    grad_first: Tensor,
    grad_second: Tensor,
    mass: Tensor,
    first: Tensor,
    children: Tensor,
    activations: Tensor,
    weight: Tensor,
    centre: Tensor,
    query: Tensor,
    prior: Tensor,
    kernel: int,
    inner: int,
    stride: int,
    gaussian: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    given, contest = _operands(
        children, activations, weight, centre, query, prior, kernel, inner, stride, gaussian
    )
    grads = Moments(grad_mass.contiguous(), grad_first.contiguous(), grad_second.contiguous())
    found = backward.gradients(given, contest, (mass, first), grads)
    return (
        found.children,
        found.activations,
        found.weight,
        found.centre,
        torch.empty_like(query) if found.query is None else found.query,
        torch.empty_like(prior) if found.prior is None else found.prior,
    )


@vote_moments_backward.register_fake
def _(
    grad_mass: Tensor,
    grad_first: Tensor,
    grad_second: Tensor,
    mass: Tensor,
    first: Tensor,
    children: Tensor,
    activations: Tensor,
    weight: Tensor,
    centre: Tensor,
    query: Tensor,
    prior: Tensor,
    kernel: int,
    inner: int,
    stride: int,
    gaussian: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    operands = (children, activations, weight, centre, query, prior)
    a, b, c, d, e, f = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in operands
    )
    return a, b, c, d, e, f


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *operands, kernel, inner, stride, gaussian = inputs
    ctx.numbers = kernel, inner, stride, gaussian
    ctx.save_for_backward(*output[:2], *operands)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    found = vote_moments_backward(*grads, *ctx.saved_tensors, *ctx.numbers)
    return *found, None, None, None, None


vote_moments.register_autograd(_backward, setup_context=_setup_context)
vote_moments_backward.register_autograd(refuse_double_backward)
