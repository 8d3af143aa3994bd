"""Whether a fast implementation computes what the formula does: else no speed-up is claimed."""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from capsroute.bench.cases import Case, build_model
from capsroute.models import model_info
from capsroute.models.base import ImageClassifier

BATCH = 8
# times the error of the formula in the same precision
SCORES = 2.0
GRADIENTS = 3.0
NOISE = 1e-6  # of the norm: below that two errors are both none


def agrees_with_reference(case: Case, device: torch.device) -> bool:
    """Compare errors against float64: scores, and of a training step every module's gradients.

    Eagerly, with a few images. True where there is no other implementation to compare with.
    """
    if "impl" not in model_info(case.model).options or case.part != "model":
        return True
    return _agrees(replace(case, batch=BATCH), device)


@cache
def _agrees(case: Case, device: torch.device) -> bool:
    compute = _scores_and_gradients if case.mode == "train" else _scores
    truth = compute(case.reference, device, torch.float64)
    ours = compute(case, device, _dtype(case))
    formula = compute(case.reference, device, _dtype(case))
    return all(_is_close(part, ours[part], formula[part], truth[part]) for part in truth)


def _is_close(part: str, ours: Tensor, formula: Tensor, truth: Tensor) -> bool:
    times = SCORES if part == "scores" else GRADIENTS
    return _error(ours, truth) <= times * _error(formula, truth) + NOISE


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
    return {"scores": scores.detach().double()} | _gradients(model)


def _gradients(model: ImageClassifier) -> dict[str, Tensor]:
    """Module by module: together, what a backbone loses to rounding would hide a routing's.

    A gradient that does not arrive is one of zero.
    """
    found = {}
    for name, module in model.named_modules():
        own = [
            torch.zeros_like(p) if p.grad is None else p.grad
            for p in module.parameters(recurse=False)
        ]
        if own:
            found[f"gradients of {name}"] = torch.cat([grad.double().flatten() for grad in own])
    return found


def _forward(model: ImageClassifier, device: torch.device, dtype: torch.dtype) -> Tensor:
    exact = dtype == torch.float64
    if exact:
        model.double()
    torch.manual_seed(1)
    images = torch.rand(BATCH, model.in_channels, *model.image_size, device=device)
    with torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
        return model(images.double() if exact else images)


def _error(value: Tensor, truth: Tensor) -> float:
    smallest = torch.finfo(truth.dtype).tiny  # where both are zero, there is no error
    return float((value - truth).norm() / truth.norm().clamp_min(smallest))
