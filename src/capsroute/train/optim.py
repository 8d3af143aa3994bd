"""What moves the weights: optimiser, learning rate, average."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.sgd import sgd

from capsroute.train.config import OptimConfig
from capsroute.train.muon import Muon, matrix_kinds


def make_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """On a GPU a kernel or two update everything, and the learning rate is a tensor there."""
    parameters = list(model.parameters())
    gpu = parameters[0].device.type == "cuda"
    lr: Any = torch.tensor(config.lr, device=parameters[0].device) if gpu else config.lr
    groups = _groups(config, model)
    if config.optimizer == "adam":
        return torch.optim.Adam(groups, lr, capturable=gpu, fused=gpu or None)
    if config.optimizer == "muon":
        groups = _matrices_apart(groups, matrix_kinds(model))
        settings: dict[str, Any] = {"momentum": config.momentum, "nesterov": config.nesterov}
        return Muon(groups, lr, capturable=gpu, **settings)
    optimizer = torch.optim.SGD(
        groups, lr, momentum=config.momentum, nesterov=config.nesterov, fused=gpu or None
    )
    for parameter in parameters if config.momentum else ():
        # as the first step would leave it, so that all steps look alike to a compiler
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _groups(config: OptimConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Parameters by their weight decay."""
    if config.capsule_decay is None:
        return [{"params": list(model.parameters()), "weight_decay": config.weight_decay}]
    capsules = getattr(model, "capsules", None)
    if capsules is None:
        raise ValueError("`capsule_decay` must not be given for a model without capsules")
    routing = list(capsules.parameters())
    ours = {id(parameter) for parameter in routing}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in ours]
    return [
        {"params": rest, "weight_decay": config.weight_decay},
        {"params": routing, "weight_decay": config.capsule_decay},
    ]


def _matrices_apart(
    groups: list[dict[str, Any]], kinds: dict[nn.Parameter, str]
) -> list[dict[str, Any]]:
    """Each group as two: what Muon moves as matrices, and the rest."""
    apart = []
    for group in groups:
        matrices = [parameter for parameter in group["params"] if parameter in kinds]
        rest = [parameter for parameter in group["params"] if parameter not in kinds]
        apart.append({**group, "params": matrices, "kinds": [kinds[p] for p in matrices]})
        apart.append({**group, "params": rest})
    return [group for group in apart if group["params"]]


def update_by_sgd(optimizer: torch.optim.SGD, sgd: Callable[..., None] = sgd) -> None:
    """`optimizer.step()`, with PyTorch's function or a compiled one.

    Compiled, the work spreads over the whole card. PyTorch's own fused kernel gives each program
    65,536 elements, so for a model of this size a few dozen programs do all of it.
    """
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        with torch.no_grad():
            sgd(
                trained,
                [parameter.grad for parameter in trained],
                [optimizer.state[parameter].get("momentum_buffer") for parameter in trained],
                foreach=True,
                lr=group["lr"],
                momentum=group["momentum"],
                nesterov=group["nesterov"],
                weight_decay=group["weight_decay"],
                dampening=0.0,
                maximize=False,
            )


def learning_rate(config: OptimConfig, step: int, steps: int, steps_per_epoch: int) -> float:
    """The learning rate of a step, counted from 0."""
    warmup = config.warmup * steps
    if step < warmup:
        return config.lr * min(1.0, (step + 1) / warmup)
    if config.lr_schedule == "step":
        passed = sum(step >= milestone * steps_per_epoch for milestone in config.milestones)
        return config.lr * 0.1**passed
    if config.lr_schedule == "cosine":
        progress = (step - warmup) / max(1.0, steps - warmup)
        return config.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr


class WeightAverage:
    """An exponential average of parameters, and of BatchNorm's statistics along with them.

    The statistics of the weights of the moment are not those of their average: copied instead,
    they make the average worse than the weights it is made of.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values = {key: value.clone() for key, value in model.state_dict().items()}
        self.learned = {key for key, _ in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """In a few kernels for the whole model where the device is a GPU."""
        now = model.state_dict()
        for dtype in {value.dtype for value in now.values()}:  # mixed, they would be taken singly
            keys = [key for key in now if now[key].dtype == dtype]
            ours, theirs = [self.values[key] for key in keys], [now[key] for key in keys]
            if dtype.is_floating_point:
                torch._foreach_lerp_(ours, theirs, 1.0 - self.decay)
            else:
                torch._foreach_copy_(ours, theirs)
