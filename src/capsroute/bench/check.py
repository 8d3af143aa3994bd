"""Whether a fast implementation computes what the formula does: else no speed-up is claimed."""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from capsroute.bench.cases import Case, build_model
from capsroute.models import model_info

BATCH = 8
FORWARD, BACKWARD = 2.0, 3.0  # times the error of the formula in the same precision
NOISE = 1e-6  # of the norm: below that two errors are both none


def agrees_with_reference(case: Case, device: torch.device) -> bool:
    """Compare errors against float64: scores and all gradients of one training batch."""
    if "impl" not in model_info(case.model).options or case.part != "model":
        return True
    return _agrees(replace(case, mode="train", batch=BATCH), device)


@cache
def _agrees(case: Case, device: torch.device) -> bool:
    truth = _scores_and_gradients(case.reference, device, torch.float64)
    ours = _scores_and_gradients(case, device, _dtype(case))
    formula = _scores_and_gradients(case.reference, device, _dtype(case))
    return all(
        _error(got, true) <= allowed * _error(plain, true) + NOISE
        for got, plain, true, allowed in zip(ours, formula, truth, (FORWARD, BACKWARD), strict=True)
    )


def _dtype(case: Case) -> torch.dtype:
    return torch.bfloat16 if case.dtype == "bfloat16" else torch.float32


def _scores_and_gradients(
    case: Case, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    model = build_model(case, device)
    exact = dtype == torch.float64
    if exact:
        model.double()
    torch.manual_seed(1)
    images = torch.rand(BATCH, model.in_channels, *model.image_size, device=device)
    with torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
        scores = model(images.double() if exact else images)
    cotangent = torch.linspace(-1, 1, scores.numel(), device=device).view(scores.shape)
    scores.backward(cotangent.to(scores.dtype))
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return scores.detach().double(), torch.cat(gradients)


def _error(value: Tensor, truth: Tensor) -> float:
    return float((value - truth).norm() / truth.norm())
