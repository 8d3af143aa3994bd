"""How long-running work tells its caller how far it has got."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with the parts done, such as batches, and how many there are."""
