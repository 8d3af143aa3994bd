"""Signals that ask a run to end, and a deadline that sends one: it finishes its step and saves."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):  # noqa: N818  # not an error, an answer to a signal
    """A signal ended the run after a checkpoint; the same command resumes it."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"stopped by signal {signum} after step {step}")
        self.signum, self.step = signum, step


@contextmanager
def stop_signals(tell: Callable[[int], None] = lambda signum: None) -> Iterator[list[int]]:
    """Signals that ask for an end are noted; the loop finishes its step. A second one kills.

    `tell` is called with the first.
    """
    received: list[int] = []

    def note(signum: int, _: FrameType | None) -> None:
        received.append(signum)
        if len(received) == 1:
            tell(signum)
        if signum != signal.SIGALRM:  # which repeats
            signal.signal(signum, signal.SIG_DFL)

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    before = {s: signal.signal(s, note) for s in signals}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def stop_after(seconds: float) -> Iterator[None]:
    """SIGALRM once the time is up: a run under way then ends as after any other signal.

    Between runs nothing happens; whoever starts them looks at the clock. The alarm repeats, so a
    run that was just starting when it first rang ends too.
    """
    before = signal.signal(signal.SIGALRM, lambda signum, frame: None)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
