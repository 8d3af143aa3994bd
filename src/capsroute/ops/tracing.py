"""Questions to the machine that `torch.compile` answers while it traces."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

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
