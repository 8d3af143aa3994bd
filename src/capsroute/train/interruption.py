"""Signals that ask a run to end: it finishes its step and saves first."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):  # noqa: N818  # not an error, an answer to a signal
    """A signal ended the run after a checkpoint; the same command resumes it."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"stopped by signal {signum} after step {step}")
        self.signum, self.step = signum, step


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Signals that ask for an end are noted; the loop finishes its step. A second one kills."""
    received: list[int] = []

    def note(signum: int, _: FrameType | None) -> None:
        received.append(signum)
        signal.signal(signum, signal.SIG_DFL)

    before = {s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
