"""The nearest valid choice, for error messages."""

import difflib
from collections.abc import Iterable
from pathlib import Path

CLOSE = 0.6  # difflib's ratio of a typo, at least
CLOSE_WORD = 0.5  # and of each of its words, which are short: r3 for r2
FEW = 12  # choices that an error may list


def nearest(given: str, choices: Iterable[str]) -> str:
    """'; did you mean …?' for the closest choice, or a list of them when nothing is close."""
    known = sorted(choices)
    alike = [choice for choice in known if _words_agree(given, choice)]
    if close := difflib.get_close_matches(given, alike, n=1, cutoff=CLOSE):
        return f"; did you mean {close[0]!r}?"
    if len(known) <= FEW:
        return f"; choose from {', '.join(known)}"
    likely = difflib.get_close_matches(given, known, n=3, cutoff=0.0)
    return f"; choose from {', '.join(likely)} and {len(known) - len(likely)} more"


def nearest_path(path: Path) -> Path | None:
    """What lies beside a path that does not exist, if its name is close."""
    beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, beside, n=1, cutoff=CLOSE)
    return path.parent / close[0] if close else None


def _words_agree(given: str, choice: str) -> bool:
    """Our names share long words: one word alike does not make the others a typo."""
    words = choice.split("_")
    return all(
        word in choice or difflib.get_close_matches(word, words, n=1, cutoff=CLOSE_WORD)
        for word in given.split("_")
    )
