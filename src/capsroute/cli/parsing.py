"""tyro's parser with our errors: one line that says what to do."""

import contextlib
import io
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any, TypeVar

import tyro

from capsroute.cli.errors import UsageError, one_line

Parsed = TypeVar("Parsed")
FLAGS = (tyro.conf.FlagCreatePairsOff,)
"""For `parse`: `--strict` without a `--no-strict` beside it."""


def optional(metavar: str) -> Any:
    """An option that is None unless given; its help says what that means."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


def parse(options: type[Parsed], command: str, arguments: list[str], **more: Any) -> Parsed:
    """A dataclass of options from the command line; tyro's boxed errors become our one line."""
    boxed, help_text = io.StringIO(), io.StringIO()
    try:
        with (
            contextlib.redirect_stderr(boxed),
            contextlib.redirect_stdout(help_text),
            _at_most_columns(100),
        ):
            return tyro.cli(options, prog=f"capsroute {command}", args=arguments, **more)
    except SystemExit as stop:
        if not stop.code:
            print(_without_none(help_text.getvalue()), end="")
            raise
        raise UsageError(
            f"{_unboxed(boxed.getvalue())} (see `capsroute {command} --help`)"
        ) from None


@contextlib.contextmanager
def _at_most_columns(most: int) -> Iterator[None]:
    """tyro sets help in two columns on a wide terminal, which nobody reads with ease."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(min(most, shutil.get_terminal_size().columns))
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _without_none(text: str) -> str:
    """Help that does not speak Python: an option that is None unless given shows its value alone.

    What is taken out leaves blanks, so that the boxes stay straight.
    """
    text = re.sub(r"\{None\}\|(\S+)", lambda m: m[1] + " " * 7, text)
    text = re.sub(r"\{None,(\S+?)\}", lambda m: f"{{{m[1]}}}" + " " * 5, text)
    split = re.compile(r"\(default:([\s│]*)None\)")  # may be broken over two lines
    return split.sub(lambda m: " " * 9 + m[1] + " " * 5, text)


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
    first = re.sub(  # an option that is None unless given: what the other type says is enough
        r"no type matching .*? - <class '(?:int|float)'>: ", "", one_line(first)
    )
    first = first.replace(", 'None')", ")")
    first = re.sub(
        r"invalid literal for int\(\) with base 10: ", "expected an integer, got ", first
    )
    first = re.sub(r"could not convert string to float: ", "expected a number, got ", first)
    return one_line(first) + (f"; did you mean {suggestion[1]}?" if suggestion else "")
