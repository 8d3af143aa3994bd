"""tyro's parser with our errors: one line that says what to do."""

import contextlib
import dataclasses
import difflib
import io
import math
import os
import re
import shutil
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from capsroute.cli.errors import UsageError, as_typed, one_line
from capsroute.nearest import CLOSE, nearest

Parsed = TypeVar("Parsed")
ALIASES = {
    "learning-rate": "lr",
    "epoch": "epochs",
    "batch": "batch-size",
    "bs": "batch-size",
    "wd": "weight-decay",
    "gpu": "device",
}
"""What other programs call our options."""
FLAGS = (tyro.conf.FlagCreatePairsOff,)
"""For `parse`: `--strict` without a `--no-strict` beside it, where all such are off by default."""
Flag = tyro.conf.FlagCreatePairsOff[bool]
"""Such an option beside others that are on by default, which help shows with their `--no-…`."""


def optional(metavar: str) -> Any:
    """An option that is None unless given; its help says what that means."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


def parse(options: type[Parsed], command: str, arguments: list[str], **more: Any) -> Parsed:
    """A dataclass of options from the command line; tyro's boxed errors become our one line."""
    boxed, help_text = io.StringIO(), io.StringIO()
    switches = _switches(options)
    spelled = _positionals_first(_spelled_out(arguments, switches), options)
    try:
        with (
            contextlib.redirect_stderr(boxed),
            contextlib.redirect_stdout(help_text),
            _at_most_columns(100),
        ):
            return tyro.cli(options, prog=f"capsroute {command}", args=spelled, **more)
    except SystemExit as stop:
        if not stop.code:
            print(_without_none(_as_pairs(help_text.getvalue(), switches)), end="")
            raise
        told = _unboxed(boxed.getvalue())
        hint = "" if "did you mean" in told else _alias_hint(told, _option_names(options))
        raise UsageError(f"{told}{hint} (see `capsroute {command} --help`)") from None


def as_options(options: Any, **others: str) -> contextlib.AbstractContextManager[None]:
    """Errors inside name the option, such as `--batch-size`, for a field of these options."""
    fields = {name.replace("-", "_"): f"--{name}" for name in _option_names(options)}
    return as_typed(**(fields | others))


def _switches(options: Any) -> set[str]:
    """Options that are on, off, or left to something else."""
    found = set()
    for name, kind in get_type_hints(options).items():
        if dataclasses.is_dataclass(kind):
            found |= _switches(kind)
        elif kind == bool | None:
            found.add(name.replace("_", "-"))
    return found


def _spelled_out(arguments: list[str], switches: set[str]) -> list[str]:
    """`--layer-norm` and `--no-layer-norm` as tyro wants them, with a value."""
    spelled = {f"--{name}": [f"--{name}", "True"] for name in switches}
    spelled |= {f"--no-{name}": [f"--{name}", "False"] for name in switches}
    words: list[str] = []
    for index, argument in enumerate(arguments):
        has_value = arguments[index + 1 : index + 2] in (["True"], ["False"])
        words += [argument] if has_value else spelled.get(argument, [argument])
    return words


def _positionals_first(words: list[str], options: Any) -> list[str]:
    """`a.png --strict b.png` as tyro wants it, which takes a list of names in one piece."""
    values = _words_after(options)
    if "" not in values:  # no list of names
        return words
    names: list[str] = []
    others: list[str] = []
    taken = 0.0
    for index, word in enumerate(words):
        if word == "--":
            return [*others, "--", *names, *words[index + 1 :]]
        if word.startswith("--"):
            option, given, _ = word[2:].partition("=")
            option = option.replace("_", "-")
            if option not in values:  # whatever is wrong with it, tyro tells
                return words
            taken = 0.0 if given else values[option]
            others.append(word)
        elif taken:
            taken -= 1
            others.append(word)
        else:
            names.append(word)
    return [*names, *others]


def _words_after(options: Any) -> dict[str, float]:
    """How many words each option takes; what stands for itself is named ``."""
    words: dict[str, float] = {"help": 0.0}
    for name, kind in get_type_hints(options, include_extras=True).items():
        bare, *marks = get_args(kind) if get_origin(kind) is Annotated else (kind,)
        option = name.replace("_", "-")
        several = any(get_origin(part) is tuple for part in (bare, *get_args(bare)))
        if dataclasses.is_dataclass(bare):
            words |= _words_after(bare)
        elif bare is bool:
            words |= dict.fromkeys((option, f"no-{option}"), 0.0)
        elif tyro.conf.Positional not in marks:
            words[option] = math.inf if several else 1.0
        elif several:
            words[""] = math.inf
    return words


def _as_pairs(text: str, switches: set[str]) -> str:
    """Help that shows them like `--flip, --no-flip`; what is shorter leaves blanks."""
    for name in switches:
        shown = f"--{name} {{None,True,False}}"
        text = text.replace(shown, f"--{name}, --no-{name}".ljust(len(shown)))
    return text


def _option_names(options: Any) -> set[str]:
    """Of a dataclass and those inside it, as they are typed."""
    names = set()
    for name, kind in get_type_hints(options).items():
        inside = dataclasses.is_dataclass(kind)
        names |= _option_names(kind) if inside else {name.replace("_", "-")}
    return names


def _alias_hint(told: str, known: set[str]) -> str:
    """For what another program calls one of our options, or a misspelling of that."""
    if not (given := re.match(r"Unrecognized options: --([\w-]+)", told)):
        return ""
    theirs = [alias for alias, ours in ALIASES.items() if ours in known]
    close = difflib.get_close_matches(given[1].replace("_", "-"), theirs, n=1, cutoff=CLOSE)
    return f"; did you mean --{ALIASES[close[0]]}?" if close else ""


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
    """Help that does not speak Python: no default is shown where it is None, or nothing.

    What is taken out leaves blanks, so that the boxes stay straight.
    """
    text = re.sub(r"\{None\}\|(\S+)", lambda m: m[1] + " " * 7, text)
    text = re.sub(r"\{None,(\S+?)\}", lambda m: f"{{{m[1]}}}" + " " * 5, text)
    split = re.compile(r"\(default:([\s│]*)(None|)\)")  # may be broken over two lines
    return split.sub(lambda m: " " * 9 + m[1] + " " * len(m[2]) + " ", text)


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
    first = re.sub(
        r"invalid literal for int\(\) with base 10: ", "expected an integer, got ", first
    )
    first = re.sub(r"could not convert string to float: ", "expected a number, got ", first)
    first = _missing_told(_choices_told(first))
    return first + (f"; did you mean {suggestion[1]}?" if suggestion else "")


def _missing_told(text: str) -> str:
    """The first of those that must be given, in our words, if that is the mistake."""
    told = r"Missing from .*?: (\S+) (?:\{(.*?)\} )?(.*?)\.? \(required\).*"
    if not (found := re.fullmatch(told, text)):
        return text
    name, choices, about = found.groups()
    return f"`{name}` must be given: {_either(choices.split(',')) if choices else about}"


def _choices_told(text: str) -> str:
    """A choice that there is not in our words, if that is the mistake."""
    told = r"invalid choice '(.*)' for argument '(\S+)'. Expected one of \((.*)\)\."
    if not (found := re.fullmatch(told, text)):
        return text
    given, option, listed = found.groups()
    # sorted: tyro's order of an option that may be None is another one every time
    choices = sorted(set(re.findall(r"'(.*?)'", listed)) - {"None"})
    hint = nearest(given, choices)
    close = hint if "did you mean" in hint else ""  # else it lists what is listed here
    return f"`{option}` must be {_either(choices)}, got {given!r}{close}"


def _either(choices: list[str]) -> str:
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last
