"""Counting what is right, and the file that a run's numbers are written to."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capsroute.files import write_whole
from capsroute.models.base import ImageClassifier


def correct(model: ImageClassifier, scores: Tensor, targets: Tensor) -> Tensor:
    """Which images are right, as booleans: the class, or for multi-label the whole set.

    Of a mixed image the class with the largest share.
    """
    if model.task.multilabel:
        return (model.decide(scores) == targets.bool()).all(dim=-1)
    wanted = targets.argmax(dim=-1) if targets.shape == scores.shape else targets
    return scores.argmax(dim=-1) == wanted


def averages(loss: float, right: float, count: float) -> tuple[float, float]:
    """(mean loss, accuracy in percent) from sums; NaN before the first image."""
    return (loss / count, 100.0 * right / count) if count else (float("nan"), float("nan"))


class Totals:
    """Sums of loss, right answers and images, on the device; read rarely, since reading waits."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, loss: Tensor, right: Tensor, count: int) -> None:
        """`loss` is a mean over `count` images."""
        now = torch.stack([loss.detach() * count, right.sum(), torch.full_like(loss, count)])
        self.sums.add_(now)


class Glance:
    """Numbers on their way from the device: each call gets those that were sent before.

    On a CPU nothing travels, and a call gets its own.
    """

    def __init__(self) -> None:
        self.sent: tuple[Tensor, torch.cuda.Event] | None = None

    def __call__(self, numbers: Tensor) -> list[float] | None:
        """None while nothing has arrived."""
        if numbers.device.type != "cuda":
            return numbers.tolist()
        arrived = None
        if self.sent is not None:
            copy, event = self.sent
            if not event.query():
                return None
            arrived = copy.tolist()
        copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        copy.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.sent = copy, event
        return arrived


class Pace:
    """Keeps the host one call ahead of the device: close enough to be stopped, never in its way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before: torch.cuda.Event | None = None

    def __call__(self) -> None:
        """Wait until the device has done what was sent before the last call."""
        if self.device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record()
        if self.before is not None:
            self.before.synchronize()
        self.before = event


class MetricsFile:
    """metrics.jsonl: one object for each evaluation, in the order of the steps, none twice."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        records = []
        for line in self.path.read_text().splitlines():
            with suppress(json.JSONDecodeError):  # killed while it wrote the last line
                records.append(json.loads(line))
        return records

    def append(self, record: dict[str, Any]) -> None:
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # a full disk names no file
            raise OSError(f"could not write {self.path}: {error}") from error

    def forget_after(self, step: int) -> list[dict[str, Any]]:
        """Drop what was written after the checkpoint at `step`; it will be measured again."""
        kept = [record for record in self.read() if record["step"] <= step]
        write_whole(self.path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        return kept
