"""What `torch.compile` needs to be told while it traces."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

P = ParamSpec("P")
T = TypeVar("T")


def constant_while_tracing(function: Callable[P, T]) -> Callable[P, T]:
    """`torch.compiler.assume_constant_result`, which would import the compiler, and triton."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_while_tracing
def is_exporting() -> bool:
    """Whether the graph that is traced will be exported.

    `torch.compiler.is_exporting` itself, asked within a graph, is true for PyTorch 2.11 whenever
    anything is compiled.
    """
    return torch.compiler.is_exporting()


@constant_while_tracing
def is_transformed() -> bool:
    """Whether `torch.func` (grad, jacrev, jvp, vmap) or forward-mode differentiation is at work.

    `Function.apply` asks for the first; a custom operator asks for neither, and tangents are lost.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, left out where it changes nothing.

    For results of an `autograd.Function`: compiled by PyTorch 2.11, a `to` that changes nothing
    cuts them off, and every gradient below is zero.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
