"""Muon: momentum whose singular values are made equal, after Jordan et al. (2024).

A matrix moves along the nearest orthogonal one to its momentum, so that directions in which
gradients are small are learned as fast as the others. That suits convolutions and the transforms
of capsules; biases, norms and classifiers move by AdamW.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim.adam import adam

# Keller Jordan's quintic: five steps take singular values into 0.7 to 1.2, which is near enough
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
# the root mean square of AdamW's updates, about: one learning rate then suits both kinds
TYPICAL_UPDATE = 0.2
BETAS = (0.9, 0.99)


def matrix_kinds(model: nn.Module) -> dict[nn.Parameter, str]:
    """Parameters that Muon moves as matrices, and how they are one: `filters` or `transforms`."""
    kinds = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter):
            continue
        if isinstance(module, _ConvNd):
            kinds[weight] = "filters"
        elif weight.ndim in (4, 6):  # of a capsule layer
            kinds[weight] = "transforms"
    return kinds


def as_matrix(weight: Tensor, kind: str) -> Tensor:
    """Filters (out, in·k·k); transforms (…, in, out, a, b) as (…·in·a, out·b).

    A row of a window's poses times the latter is a row of the sums of all votes.
    """
    if kind == "filters":
        return weight.flatten(1)
    return weight.movedim(-2, -3).flatten(-2).flatten(0, -2)


def from_matrix(matrix: Tensor, like: Tensor, kind: str) -> Tensor:
    """What `as_matrix` made of a tensor that is shaped `like` this one."""
    if kind == "filters":
        return matrix.view_as(like)
    *lead, n_out, a, b = like.shape
    return matrix.reshape(*lead, a, n_out, b).movedim(-3, -2)


def orthogonalized(matrices: Tensor) -> Tensor:
    """U Vᵀ of each U S Vᵀ (n, rows, columns), roughly, by products alone.

    On a GPU they are taken in bfloat16, which is all the precision that is needed.
    """
    x = matrices.bfloat16() if matrices.device.type == "cuda" else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):  # x becomes (a + b x xᵀ + c (x xᵀ)²) x
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Muon for groups with `kinds`, AdamW for the others; weight decay is apart from gradients.

    Args:
        groups: parameter groups. One of matrices has `kinds`, how each of its `params` is one.
        lr: peak learning rate, a number or a tensor.
        capturable: whether a CUDA graph may capture the steps.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float | Tensor,
        *,
        momentum: float,
        nesterov: bool,
        capturable: bool = False,
    ) -> None:
        settings = {"momentum": momentum, "nesterov": nesterov, "capturable": capturable}
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "kinds": None, **settings})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["kinds"] is None:
                self._step_by_adam(group)
            else:
                self._step_by_muon(group)

    def _step_by_muon(self, group: dict[str, Any]) -> None:
        alike: dict[Any, list[tuple[nn.Parameter, str, Tensor]]] = {}  # they share their products
        for parameter, kind in zip(group["params"], group["kinds"], strict=True):
            if parameter.grad is not None:
                matrix = as_matrix(self._direction(parameter, group), kind)
                alike.setdefault(matrix.shape, []).append((parameter, kind, matrix))
        for (rows, columns), members in alike.items():
            scale = TYPICAL_UPDATE * math.sqrt(max(rows, columns)) * group["lr"]
            updates = scale * orthogonalized(torch.stack([matrix for *_, matrix in members]))
            for (parameter, kind, _), update in zip(members, updates, strict=True):
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.sub_(from_matrix(update, parameter, kind))

    def _direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        assert parameter.grad is not None
        state, momentum = self.state[parameter], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average = state["momentum_buffer"].lerp_(parameter.grad, 1.0 - momentum)
        return parameter.grad.lerp(average, momentum) if group["nesterov"] else average

    def _step_by_adam(self, group: dict[str, Any]) -> None:
        moved = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in moved:
            if not self.state[parameter]:
                where = parameter.device if group["capturable"] else "cpu"
                self.state[parameter] = {
                    "step": torch.zeros((), device=where),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in moved]
        adam(
            moved,
            [parameter.grad for parameter in moved],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            capturable=group["capturable"],
            decoupled_weight_decay=True,
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=1e-8,
            maximize=False,
        )
