"""One training step: forward, loss, backward, optimiser, average of the weights."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from capsroute import losses
from capsroute.data import TrainBatches
from capsroute.models.base import ImageClassifier
from capsroute.train.config import Config, OptimConfig
from capsroute.train.metrics import Totals, correct
from capsroute.train.optim import WeightAverage, make_optimizer, update_by_sgd

Number = float | Tensor  # a tensor where a CUDA graph shall read another value at every replay
Loss = Callable[[Tensor, Tensor, Number], Tensor]


@dataclass(frozen=True)
class Moment:
    """Where in a run a step is."""

    step: Number
    lr: Number
    epoch: Number


def choose_loss(config: OptimConfig, model: ImageClassifier, *, mixed: bool = False) -> Loss:
    """loss(scores, targets, epoch), by name or as the model's family was published.

    `mixed`: targets are shares of several classes.
    """
    name = loss_name(config, model)
    _check_loss(name, model)
    smoothing = config.label_smoothing
    if smoothing and name in ("margin", "spread"):
        raise ValueError(f"`label_smoothing` must be 0 with the {name} loss, got {smoothing}")
    if mixed and name in ("margin", "spread"):
        raise ValueError(f"`cutmix` must be 0 with the {name} loss, which takes whole classes")
    if name == "margin":
        return lambda scores, targets, epoch: losses.margin(scores, targets)
    if name == "spread":
        return lambda scores, targets, epoch: losses.spread(
            scores, targets, margin=losses.spread_margin(epoch)
        )
    function = getattr(losses, name)
    return lambda scores, targets, epoch: function(scores, targets, label_smoothing=smoothing)


def loss_name(config: OptimConfig, model: ImageClassifier) -> str:
    """The loss that was asked for, or that `auto` stands for."""
    return _published_loss(model) if config.loss == "auto" else config.loss


def _published_loss(model: ImageClassifier) -> str:
    """That of the model's family, or a cross entropy of its logits."""
    if model.loss is not None:
        return model.loss
    if model.scores_are_probabilities:
        raise ValueError(
            f"`loss` must be given for {model.name}, whose scores are probabilities: margin or "
            "spread, or `loss` in its class"
        )
    return "binary_cross_entropy" if model.task.multilabel else "cross_entropy"


def _check_loss(name: str, model: ImageClassifier) -> None:
    """Raise unless the loss reads scores as the model does; else it falls, and answers stay wrong.

    Logits at the 0.9 and 0.1 that a margin asks for are sigmoids above one half, all of them.
    """
    scores, fitting = "logits", ["cross_entropy", "binary_cross_entropy"]
    if model.scores_are_probabilities:
        scores, fitting = "probabilities", ["margin", "spread"]
    if several := model.task.multilabel:
        fitting = [loss for loss in fitting if loss in ("binary_cross_entropy", "margin")]
    if name not in fitting:
        images = "several classes" if several else "one class"
        raise ValueError(
            f"`loss` must be {' or '.join(fitting)} for {model.name}, whose scores are {scores} "
            f"of {images} per image, got {name!r}"
        )


class Callables(NamedTuple):
    """What a step calls with a batch."""

    model: nn.Module
    loss: Loss
    tally: Callable[[Tensor, Tensor, Tensor, Tensor, bool], None]


class TrainStep:
    """Runs training steps on a model; `bare` is the module under DDP and compilation.

    `compile` is applied to the loss, the counting and the update: many kernels for a handful of
    numbers. The short last batch of an epoch runs uncompiled: each size is compiled
    by itself, and that takes longer than such a batch could win back in a whole run.
    """

    def __init__(
        self,
        model: nn.Module,
        bare: ImageClassifier,
        config: Config,
        world: int,
        compile: Callable[[Any], Any] = lambda function: function,
    ) -> None:
        self.model, self.bare, self.config, self.world = model, bare, config, world
        self.loss = choose_loss(config.optim, bare, mixed=config.data.cutmix > 0)
        self.short_batch = Callables(getattr(model, "_orig_mod", model), self.loss, self._tally)
        self.whole_batch = Callables(model, compile(self.loss), compile(self._tally))
        self.optimizer = make_optimizer(config.optim, bare)
        self._update = self._choose_update(compile)
        decay = config.optim.ema
        self.average = WeightAverage(bare, decay) if decay else None
        device = next(bare.parameters()).device
        self.totals = Totals(device)
        # the first step whose loss was not finite, kept on the device so that nothing waits
        self.first_bad_step = torch.full((), -1, dtype=torch.float64, device=device)

    def __call__(
        self, images: Tensor, targets: Tensor, share: float, now: Moment, whole: bool = True
    ) -> None:
        """`share` is this process's part of the global batch, which is `whole` or a short one."""
        self._set_learning_rate(now.lr)
        # as tensors, or a compiler would take every step's numbers for constants
        epoch, step = torch.as_tensor(now.epoch), torch.as_tensor(now.step)
        self.optimizer.zero_grad(set_to_none=True)
        pieces = min(self.config.optim.accumulate, len(images))
        parts = list(zip(images.chunk(pieces), targets.chunk(pieces), strict=True))
        model, loss_of, tally = self.whole_batch if whole else self.short_batch
        for index, (piece, wanted) in enumerate(parts):
            with self._last_piece(index == len(parts) - 1):
                scores = self._scores(model, piece)
                loss = loss_of(scores, wanted, epoch)
                # DDP averages over processes; the loss is a mean over the whole batch
                weight = share * self.world * len(piece) / len(images)
                (loss * weight).backward()
            tally(loss.detach(), scores.detach(), wanted, step, share > 0)
        if self.config.optim.clip:
            nn.utils.clip_grad_norm_(self.bare.parameters(), self.config.optim.clip)
        self._update()
        if self.average is not None:
            self.average.update(self.bare)

    def _choose_update(self, compile: Callable[[Any], Any]) -> Callable[[], Any]:
        compiled, optimizer = compile(sgd), self.optimizer
        # a learning rate that is no tensor would be a constant, and every other one compiled anew
        on_device = isinstance(optimizer.param_groups[0]["lr"], Tensor)
        if compiled is sgd or not on_device or not isinstance(optimizer, torch.optim.SGD):
            return optimizer.step
        return partial(update_by_sgd, optimizer, compiled)

    def _set_learning_rate(self, lr: Number) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = float(lr)

    def _scores(self, model: nn.Module, images: Tensor) -> Tensor:
        low = self.config.dtype == "bfloat16"
        with torch.autocast(images.device.type, torch.bfloat16, enabled=low):
            return model(images)

    def _last_piece(self, last: bool) -> Any:
        """DDP exchanges gradients after the last piece of a batch only."""
        no_sync = getattr(self.model, "no_sync", None)
        return nullcontext() if last or no_sync is None else no_sync()

    def _tally(
        self, loss: Tensor, scores: Tensor, targets: Tensor, step: Tensor, ours: bool
    ) -> None:
        """Add to the totals, if the images are `ours`; remember the first step that went wrong."""
        if ours:
            self.totals.add(loss, correct(self.bare, scores, targets), len(scores))
        bad = ~torch.isfinite(loss) & (self.first_bad_step < 0)
        self.first_bad_step.copy_(torch.where(bad, step, self.first_bad_step))

    def tallies(self) -> Tensor:
        """Sums of loss, right answers and images so far, and the first bad step or −1."""
        return torch.cat([self.totals.sums, self.first_bad_step[None]])

    def is_finite(self) -> bool:
        """Whether every weight is; an infinite gradient shows there before it shows in a loss."""
        norms = torch._foreach_norm([p.detach() for p in self.bare.parameters()])
        return bool(torch.isfinite(torch.stack(norms)).all().item())

    def buffers(self) -> list[Tensor]:
        """What is counted, not learned: of the model, and of the average of its weights."""
        found = list(self.bare.buffers())
        if self.average is not None:
            values = self.average.values
            found += [value for key, value in values.items() if key not in self.average.learned]
        return found

    def weights(self) -> dict[str, Tensor]:
        """Those to evaluate and to keep: their average, where there is one."""
        return self.bare.state_dict() if self.average is None else self.average.values

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.bare.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.values,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bare.load_state_dict(state["model"])
        # the settings are the config's and this device's; only what was learned comes back
        own = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({**state["optimizer"], "param_groups": own})
        for parameter, kept in self.optimizer.state.items():
            for key, value in kept.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    # fused kernels want the strides of the parameter, which differ on a CPU
                    kept[key] = torch.empty_like(parameter).copy_(value)
        if self.average is not None:
            for key, value in state["average"].items():
                self.average.values[key].copy_(value)


def run_step(
    train_step: TrainStep,
    batches: TrainBatches,
    everyones: Callable[[], TrainBatches],
    moment: Callable[[int], Moment],
    step: int,
) -> None:
    """Step number `step` of a run, on this process's share of its batch."""
    images, targets = batches.batch(step)
    size = batches.global_size(step)
    share = len(images) / size
    if share == 0.0:  # a last batch smaller than the job: go along with weight zero
        images, targets = (part[:1] for part in everyones().batch(step))
    train_step(images, targets, share, moment(step), batches.is_whole(size))
