"""Which implementation of a routing runs, and why."""

import logging

from capsroute.ops.tracing import constant_while_tracing

IMPLEMENTATIONS = ("reference", "tiled", "triton")
_log = logging.getLogger("capsroute")
_said: set[tuple[str, str, str | None]] = set()


@constant_while_tracing  # logged while tracing, not by the graph
def say_once(routing: str, impl: str, reason: str | None) -> str:
    """At debug level, what `impl="auto"` chose and why (None: nothing is against the kernels)."""
    if (routing, impl, reason) not in _said:
        _said.add((routing, impl, reason))
        why = "the kernels can take these tensors" if reason is None else reason
        _log.debug("%s with impl=%r: %s", routing, impl, why)
    return impl


def check_impl(impl: str) -> None:
    """Raise unless it names an implementation, or leaves the choice open."""
    choices = ("auto", *IMPLEMENTATIONS)
    if impl not in choices:
        raise ValueError(f"`impl` must be one of {', '.join(map(repr, choices))}, got {impl!r}")


def check_kernels(reason: str | None) -> None:
    """Raise if there is a reason why kernels that were asked for cannot run."""
    if reason is not None:
        raise ValueError(f"`impl` must be able to run here, got 'triton': {reason}")
