"""The nearest valid choice, for error messages."""

import difflib
from collections.abc import Iterable


def nearest(given: str, choices: Iterable[str]) -> str:
    """'; did you mean …?' for the closest choice, or the list of them when nothing is close."""
    known = sorted(choices)
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.4)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; choose from {', '.join(known)}"
