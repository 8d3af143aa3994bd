"""The two errors a user of the data layer sees: each message is one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DataError(ValueError):
    """Data that is there but wrong: damaged, out of range, or laid out otherwise than expected."""


class MissingDataError(DataError, FileNotFoundError):
    """Data that is not there; the message says where it was looked for and how to get it."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """The end of a message about a wrong name: the closest choice, then all of them."""
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    listing = f"choose from {', '.join(choices)}"
    return f"did you mean `{close[0]}`? ({listing})" if close else listing
