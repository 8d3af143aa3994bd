"""Long work on the screen: a training run as a live bar or plain lines, other work as bars."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from capsroute.progress import Progress as Listener
from capsroute.train.reporting import Reporter


class ScreenReporter(Reporter):
    """A reporter that holds the screen while it is entered."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the screen back."""


def make_reporter() -> ScreenReporter:
    """By the terminal; only the first of several processes speaks."""
    if int(os.environ.get("RANK", "0")) > 0:
        return ScreenReporter()
    return LiveReporter() if sys.stdout.isatty() else LineReporter()


def _evaluation(record: dict[str, Any]) -> str:
    parts = [f"step {record['step']}", f"epoch {record['epoch']:.2f}"]
    parts += [f"loss {record['train_loss']:.4f}", f"train {record['train_accuracy']:.2f} %"]
    if record["val_accuracy"] is not None:
        parts.append(f"validation {record['val_accuracy']:.2f} %")
    parts += [f"test {record['test_accuracy']:.2f} %"]
    parts += [f"{record['images_per_second']:,.0f} images/s", f"{record['seconds']:.0f} s"]
    return "  ".join(parts)


class SpeakingReporter(ScreenReporter):
    """Says what is alike on a terminal and in a log."""

    def evaluated(self, record: dict[str, Any]) -> None:
        self.message(_evaluation(record))

    def stopping(self, signum: int) -> None:
        if signum == signal.SIGALRM:  # a deadline that the user set
            return
        again = "Ctrl-C again" if signum == signal.SIGINT else "the same signal again"
        text = f"\nstopping: a checkpoint is saved first; {again} to stop at once, without it\n"
        with contextlib.suppress(OSError):  # nobody reads
            os.write(2, text.encode())  # past all buffers, which a handler must not touch


class LineReporter(SpeakingReporter):
    """A line now and then, for logs."""

    EVERY = 15.0  # seconds between lines of progress

    def start(self, done: int, steps: int, steps_per_epoch: int) -> None:
        self.steps, self.epoch, self.last = steps, steps_per_epoch, time.monotonic()
        if done:
            self.message(f"resuming after step {done} of {steps}")

    def progress(self, done: int, loss: float, accuracy: float, images_per_second: float) -> None:
        if time.monotonic() - self.last < self.EVERY:
            return
        self.last = time.monotonic()
        self.message(
            f"step {done}/{self.steps}  epoch {done / self.epoch:.2f}  loss {loss:.4f}  "
            f"train {accuracy:.2f} %  {images_per_second:,.0f} images/s"
        )

    def message(self, text: str) -> None:
        try:
            print(text, flush=True)
        except BrokenPipeError:  # whoever read the lines has gone; the run goes on
            sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  (for the rest of the process)


class LiveReporter(SpeakingReporter):
    """A bar with epoch, loss, accuracy, images per second and the time left."""

    def __init__(self) -> None:
        self.bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(),
        )

    def start(self, done: int, steps: int, steps_per_epoch: int) -> None:
        self.epoch = steps_per_epoch
        self.task = self.bar.add_task(
            "", total=steps, completed=done, epoch=f"{done / self.epoch:.1f}", state=""
        )
        self.bar.start()
        if done:
            self.message(f"resuming after step {done} of {steps}")

    def step(self, done: int) -> None:
        self.bar.update(self.task, completed=done, epoch=f"{done / self.epoch:.1f}")

    def progress(self, done: int, loss: float, accuracy: float, images_per_second: float) -> None:
        state = f"loss {loss:.3f}  {accuracy:.1f} %  {images_per_second:,.0f} images/s"
        self.bar.update(self.task, completed=done, epoch=f"{done / self.epoch:.1f}", state=state)

    def message(self, text: str) -> None:
        self.bar.console.print(text, highlight=False)

    def close(self) -> None:
        self.bar.stop()


@contextlib.contextmanager
def progress_bars() -> Iterator[Callable[[str], Listener]]:
    """What begins a bar of some name, and gives what to tell the progress to.

    On stderr, so that stdout holds results alone; nothing where that is not a terminal.
    """
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    hidden = not console.is_terminal
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=hidden
    ) as bars:

        def begin(name: str) -> Listener:
            task = bars.add_task(name, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield begin
