"""Long work on the screen: a training run as a live bar or plain lines, other work as bars."""

import contextlib
import logging
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

STEADY = 300.0  # seconds that a bar's time left is worked out from; a step may take many


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
    """What is said alike on a terminal and in a log."""

    def evaluated(self, record: dict[str, Any]) -> None:
        self.message(_evaluation(record))

    def stopping(self, signum: int) -> None:
        if signum == signal.SIGALRM:  # a deadline that the user set
            return
        again = "Ctrl-C again" if signum == signal.SIGINT else "the same signal again"
        text = f"\nstopping: a checkpoint is saved first; {again} to stop at once, without it\n"
        with contextlib.suppress(OSError):  # nobody reads
            os.write(2, text.encode())  # past all buffers, which a handler must not touch


def duration(seconds: float) -> str:
    """As one would say it: `40 s`, `12 min`, `3 h 5 min`, `2 days 4 h`."""
    if seconds < 99.5:
        return f"{max(seconds, 1):.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} days {hours % 24} h"


class TimeLeft:
    """How long a run still takes at its pace so far, evaluations included.

    The first step here does not count: it may compile.
    """

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0
        self.first: tuple[int, float] | None = None  # which step it was, and when it was done

    def step(self, done: int) -> None:
        self.done = done
        if self.first is None:
            self.first = done, time.monotonic()

    def measured(self) -> float:
        """Seconds that the estimate is made from."""
        return 0.0 if self.first is None else time.monotonic() - self.first[1]

    def __str__(self) -> str:
        """Two blanks and the estimate, or nothing where there is none to make."""
        if self.first is None or not self.first[0] < self.done < self.steps:
            return ""
        pace = self.measured() / (self.done - self.first[0])
        return f"  about {duration(pace * (self.steps - self.done))} left"


class LineReporter(SpeakingReporter):
    """A line now and then, for logs."""

    EVERY = 15.0  # seconds between lines of progress
    SOON = 5.0  # seconds of training after which a user can know how long it will take

    def start(self, done: int, steps: int, steps_per_epoch: int) -> None:
        self.steps, self.epoch, self.last = steps, steps_per_epoch, time.monotonic()
        self.left, self.told = TimeLeft(steps), False
        if done:
            self.message(f"resuming after step {done} of {steps}")

    def step(self, done: int) -> None:
        self.left.step(done)
        if not self.told and self.left.measured() > self.SOON and str(self.left):
            self._tell(f"step {done}/{self.steps}")

    def progress(self, done: int, loss: float, accuracy: float, images_per_second: float) -> None:
        if time.monotonic() - self.last < self.EVERY:
            return
        self.last = time.monotonic()
        self._tell(
            f"step {done}/{self.steps}  epoch {done / self.epoch:.2f}  loss {loss:.4f}  "
            f"train {accuracy:.2f} %  {images_per_second:,.0f} images/s"
        )

    def evaluated(self, record: dict[str, Any]) -> None:
        self._tell(_evaluation(record))

    def _tell(self, text: str) -> None:
        """With the time left, once it is known."""
        left = str(self.left)
        self.told = self.told or bool(left)
        self.message(text + left)

    def message(self, text: str) -> None:
        try:
            print(text, flush=True)
        except BrokenPipeError:  # whoever read the lines has gone; the run goes on
            sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  (for the rest of the process)


class _Notes(logging.Handler):
    """What the package logs, as a reporter's messages."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(logging.INFO)
        self.reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        self.reporter.message(record.getMessage())


@contextlib.contextmanager
def notes_to(reporter: Reporter) -> Iterator[None]:
    """Inside, what the package logs for its users is told: weights made to fit, for one."""
    logger, notes = logging.getLogger("capsroute"), _Notes(reporter)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # told once, whatever handlers a user's module has set up
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.removeHandler(notes)


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
            speed_estimate_period=STEADY,
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
        # as it is: a class may be named [red], and a long path shall stay in one piece
        self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

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
