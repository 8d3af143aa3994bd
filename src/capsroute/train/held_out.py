"""Loss and accuracy on images held out, measured again and again while a run goes on."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from capsroute.data import EvalBatches, Split
from capsroute.train.capture import Graphs
from capsroute.train.config import Config
from capsroute.train.distributed import Processes
from capsroute.train.metrics import Pace, Totals, averages, correct
from capsroute.train.step import TrainStep


class HeldOut:
    """Measures the weights that a run would keep, on this process's share of a split.

    With `graphs`, each size of batch is captured; the weights must then stay where they are.
    `compile` is applied to the forward pass.
    """

    def __init__(
        self,
        split: Split,
        step: TrainStep,
        config: Config,
        job: Processes,
        graphs: Graphs | None,
        compile: Callable[[Any], Any] = lambda function: function,
    ) -> None:
        split = split.to(job.device)
        self.model, self.weights, self.loss = step.bare, dict(step.weights()), step.loss
        self.job = job
        self._scores = compile(self._scores_plainly)
        self.low = config.dtype == "bfloat16"
        self.batches = EvalBatches(
            split,
            config.eval_batch_size,
            rank=job.rank,
            world=job.world,
            crop=config.data.crop,
        )
        self.totals = Totals(job.device)
        self.epoch = torch.zeros((), device=job.device)
        self.first = torch.zeros((), dtype=torch.int64, device=job.device)
        self.graphs = graphs if split.resident else None
        self.by_size: dict[int, Callable[[], None]] = {}
        self.rounds = max(job.gather(len(self.batches)))  # shares differ by an image

    @torch.no_grad()
    def measure(
        self, epoch: float, stopping: Callable[[int], bool] = lambda done: False
    ) -> tuple[float, float] | None:
        """(mean loss, accuracy in percent) over all processes.

        None if it was cut: `stopping` is asked before each batch, with the number done, in all
        processes alike.
        """
        self.totals.sums.zero_()
        self.epoch.fill_(epoch)
        self.model.eval()
        batches = self._run() if self.graphs is None else self._replay(self.graphs)
        cut = False
        for done in range(self.rounds):
            if cut := stopping(done):
                break
            next(batches, None)
        self.model.train()
        return None if cut else averages(*self.job.sum(self.totals.sums).tolist())

    def _run(self) -> Iterator[None]:
        for images, targets in self.batches:
            self._add(images, targets)
            yield

    def _replay(self, graphs: Graphs) -> Iterator[None]:
        self.first.fill_(self.batches.start)
        pace = Pace(self.first.device)
        for index in range(len(self.batches)):
            size = self.batches.size(index)
            if size not in self.by_size:
                self.by_size[size] = graphs.replay(partial(self._next, size))
            self.by_size[size]()
            pace()
            yield

    def _next(self, size: int) -> None:
        """The batch that begins at `first`, and on to the next."""
        rows = self.first + torch.arange(size, device=self.first.device)
        self._add(*self.batches.render(rows))
        self.first += size

    def _add(self, images: Tensor, targets: Tensor) -> None:
        scores = self._scores(images)
        loss = self.loss(scores, targets, self.epoch)
        self.totals.add(loss, correct(self.model, scores, targets), len(images))

    def _scores_plainly(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.low):
            return functional_call(self.model, self.weights, (images,))
