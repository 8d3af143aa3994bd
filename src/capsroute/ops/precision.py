"""Precision, for operations that choose their own."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def widened(tensor: Tensor) -> Tensor:
    """In float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """What autocast would have the tensor be; None where it is off, or leaves it alone."""
    device = tensor.device.type
    if device == "meta" or tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def own_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """No autocast inside."""
    device = tensor.device.type
    if device == "meta":  # shapes without numbers, which autocast does not know
        return nullcontext()
    return torch.autocast(device, enabled=False)
