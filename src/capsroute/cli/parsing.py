"""tyro's parser with our errors: one line that says what to do."""

import contextlib
import io
import re
from typing import Any, TypeVar

import tyro

Parsed = TypeVar("Parsed")


class UsageError(ValueError):
    """A user's mistake on the command line: one line, exit status 2."""


def parse(options: type[Parsed], command: str, arguments: list[str], **more: Any) -> Parsed:
    """A dataclass of options from the command line; tyro's boxed errors become our one line."""
    boxed = io.StringIO()
    try:
        with contextlib.redirect_stderr(boxed):
            return tyro.cli(options, prog=f"capsroute {command}", args=arguments, **more)
    except SystemExit as stop:
        if not stop.code:
            raise  # --help
        raise UsageError(
            f"{_unboxed(boxed.getvalue())} (see `capsroute {command} --help`)"
        ) from None


def _unboxed(text: str) -> str:
    """First paragraph of tyro's box, and the option that it suggests."""
    content = re.sub(r"[╭╰].*", "", text.replace("│", " "))
    paragraphs = [part.strip() for part in re.split(r"[─-]{4,}", content) if part.strip()]
    if "╭" not in text:  # where the terminal is not UTF-8 the title is no part of the border
        paragraphs = paragraphs[1:]
    first, *others = paragraphs or ["the command line could not be read"]
    suggestion = re.search(
        r"(?:Perhaps you meant|Similar arguments)[^-]*(--[\w.-]+)", " ".join(others)
    )
    return one_line(first) + (f"; did you mean {suggestion[1]}?" if suggestion else "")


def one_line(text: str) -> str:
    return " ".join(text.split())
