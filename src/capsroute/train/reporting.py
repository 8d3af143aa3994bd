"""What a run reports as it goes. The engine calls; the command line prints."""

from typing import Any


class Reporter:
    """Listens to a run and says nothing; a subclass shows what it likes."""

    def start(self, done: int, steps: int, steps_per_epoch: int) -> None:
        """The loop begins after `done` of `steps` steps."""

    def step(self, done: int) -> None:
        """One more step has been sent to the device."""

    def progress(self, done: int, loss: float, accuracy: float, images_per_second: float) -> None:
        """Averages since the last evaluation."""

    def evaluated(self, record: dict[str, Any]) -> None:
        """A line of metrics."""

    def stopping(self, signum: int) -> None:
        """The first signal that asks for an end came.

        Called by its handler, in the middle of whatever is running: no locks, no buffered printing.
        """

    def message(self, text: str) -> None:
        """Something the user should know."""
