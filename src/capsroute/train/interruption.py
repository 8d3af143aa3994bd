"""Signals that ask a run to end, and a deadline that sends one: it finishes its step and saves."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType


class Interrupted(BaseException):
    """A signal ended the run, which the same command resumes from its last checkpoint.

    Like KeyboardInterrupt it may come in the middle of anything, and nothing that catches errors
    may mistake it for one.
    """

    def __init__(self, signum: int, step: int) -> None:
        when = f"after step {step}" if step else "before the first step was done"
        cause = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        super().__init__(f"stopped by {cause} {when}")
        self.signum, self.step = signum, step


@dataclass
class Stop:
    """What signals asked for so far."""

    received: list[int] = field(default_factory=list)
    idle_since: int | None = None
    """The step that a run began or resumed with, while there is nothing after it to save."""

    def interrupted(self, step: int) -> Interrupted:
        """By the first signal; if none came here, then to another process of the job."""
        return Interrupted(self.received[0] if self.received else signal.SIGTERM, step)


@contextmanager
def stop_signals(tell: Callable[[int], None] = lambda signum: None) -> Iterator[Stop]:
    """Signals that ask for an end are noted; the loop finishes its step. A second one kills.

    `tell` is called with the first. While the run is idle, the first raises `Interrupted` at once:
    a first step may take very long. A deadline leaves time for a step, and waits for it.
    """
    stop = Stop()

    def note(signum: int, _: FrameType | None) -> None:
        stop.received.append(signum)
        if signum != signal.SIGALRM:  # which repeats
            signal.signal(signum, signal.SIG_DFL)
            step, stop.idle_since = stop.idle_since, None  # once: another must not end the end
            if step is not None:
                raise Interrupted(signum, step)
        if len(stop.received) == 1:
            tell(signum)

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    before = {s: signal.signal(s, note) for s in signals}
    try:
        yield stop
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
