"""Whether a fast implementation computes what the formula does: else no speed-up is claimed."""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from capsroute.bench.cases import Case, build_model
from capsroute.models import model_info
from capsroute.models.base import ImageClassifier

BATCH = 8
TIMES = {"scores": 2.0, "gradients": 3.0}  # the error of the formula in the same precision
NOISE = 1e-6  # of the norm: below that two errors are both none


def agrees_with_reference(case: Case, device: torch.device) -> bool:
    """Compare errors against float64: scores, and of a training step all gradients."""
    if "impl" not in model_info(case.model).options or case.part != "model":
        return True
    return _agrees(replace(case, batch=BATCH), device)


@cache
def _agrees(case: Case, device: torch.device) -> bool:
    compute = _scores_and_gradients if case.mode == "train" else _scores
    truth = compute(case.reference, device, torch.float64)
    ours = compute(case, device, _dtype(case))
    formula = compute(case.reference, device, _dtype(case))
    return all(
        _error(ours[part], truth[part]) <= TIMES[part] * _error(formula[part], truth[part]) + NOISE
        for part in truth
    )


def _dtype(case: Case) -> torch.dtype:
    return torch.bfloat16 if case.dtype == "bfloat16" else torch.float32


def _scores(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """As they are computed without gradients, which may take other kernels."""
    model = build_model(case, device).eval()
    with torch.no_grad():
        return {"scores": _forward(model, device, dtype).double()}


def _scores_and_gradients(
    case: Case, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    model = build_model(case, device)
    scores = _forward(model, device, dtype)
    cotangent = torch.linspace(-1, 1, scores.numel(), device=device).view(scores.shape)
    scores.backward(cotangent.to(scores.dtype))
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return {"scores": scores.detach().double(), "gradients": torch.cat(gradients)}


def _forward(model: ImageClassifier, device: torch.device, dtype: torch.dtype) -> Tensor:
    exact = dtype == torch.float64
    if exact:
        model.double()
    torch.manual_seed(1)
    images = torch.rand(BATCH, model.in_channels, *model.image_size, device=device)
    with torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
        return model(images.double() if exact else images)


def _error(value: Tensor, truth: Tensor) -> float:
    return float((value - truth).norm() / truth.norm())
