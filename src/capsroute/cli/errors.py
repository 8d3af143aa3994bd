"""A user's mistakes, in one line and in the user's words; imports nothing heavy."""

from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(ValueError):
    """A user's mistake on the command line: one line, exit status 2."""


@contextmanager
def as_typed(**options: str) -> Iterator[None]:
    """Inside, errors name what was typed, such as `--batch`, not the function's own argument."""
    try:
        yield
    except ValueError as error:
        from capsroute.data.errors import DataError  # late: with it comes PyTorch

        if isinstance(error, DataError):  # what it quotes is a name of the user's, such as `data`
            raise
        raise UsageError(_in_options(str(error), options)) from error
    except OSError as error:
        if (text := _in_options(str(error), options)) == str(error):
            raise
        raise OSError(text) from error


def _in_options(text: str, options: dict[str, str]) -> str:
    for argument, option in options.items():
        text = text.replace(f"`{argument}`", f"`{option}`")
    return text


def one_line(text: str) -> str:
    return " ".join(text.split())
