"""The command line: parse, call, print. Nothing below this file prints or parses arguments."""

import contextlib
import io
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import tyro
from rich.console import Console
from rich.table import Table

import capsroute
from capsroute.models.registry import nearest

Parsed = TypeVar("Parsed")


class UsageError(ValueError):
    """A user's mistake on the command line: one line, exit status 2."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `capsroute` and `python -m capsroute`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        _dispatch(arguments)
    except BrokenPipeError:  # `capsroute models | head`
        sys.stderr.close()
        sys.exit(0)
    except (ValueError, TypeError, OSError) as error:
        if debug:
            traceback.print_exc()
        print(f"error: {_one_line(str(error))}", file=sys.stderr)
        sys.exit(2)


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return
    if arguments[0] == "--version":
        print(f"capsroute {capsroute.__version__}")
        return
    name, *rest = arguments
    if name not in COMMANDS:
        raise UsageError(f"no command {name!r}{nearest(name, COMMANDS)}")
    COMMANDS[name](rest)


def _overview() -> str:
    lines = [f"capsroute {capsroute.__version__}: capsule networks that route by attention", ""]
    lines += ["usage: capsroute COMMAND [OPTIONS]", ""]
    lines += [
        f"  {name:<10}{(run.__doc__ or '').splitlines()[0]}" for name, run in COMMANDS.items()
    ]
    lines += [
        "",
        "`capsroute COMMAND --help` explains a command; `--debug` adds tracebacks to errors.",
    ]
    return "\n".join(lines)


def _parse(
    target: Callable[..., Parsed], command: str, arguments: list[str], **more: Any
) -> Parsed:
    """tyro's parser, with its boxed errors turned into our one line."""
    boxed = io.StringIO()
    try:
        with contextlib.redirect_stderr(boxed):
            return tyro.cli(target, prog=f"capsroute {command}", args=arguments, **more)
    except SystemExit as stop:
        if not stop.code:
            raise  # --help
        raise UsageError(
            f"{_unboxed(boxed.getvalue())} (see `capsroute {command} --help`)"
        ) from None


def _unboxed(text: str) -> str:
    """First paragraph of tyro's box, and the option that it suggests."""
    content = re.sub(r"[╭╰].*", "", text.replace("│", " "))
    first, *others = [part.strip() for part in re.split(r"─{3,}", content) if part.strip()]
    suggestion = re.search(
        r"(?:Perhaps you meant|Similar arguments)[^-]*(--[\w.-]+)", " ".join(others)
    )
    return _one_line(first) + (f"; did you mean {suggestion[1]}?" if suggestion else "")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _models(arguments: list[str]) -> None:
    """List the models, or show one model's layers."""
    _parse(show_models, "models", arguments)


def show_models(pattern: Annotated[str, tyro.conf.Positional] = "*") -> None:
    """List the models, or show one model's layers as the paper's appendix does.

    For example `capsroute models 'inverted_*'`, `capsroute models inverted_resnet_cifar10`.

    Args:
        pattern: a model's name, or a shell pattern that names several.
    """
    names = capsroute.list_models(pattern)
    if not names:
        raise UsageError(f"no model matches {pattern!r}{nearest(pattern, capsroute.list_models())}")
    console = Console()
    console.print(_layer_table(names[0]) if names == [pattern] else _model_table(names))


def _model_table(names: list[str]) -> Table:
    from capsroute.models import model_info
    from capsroute.models.base import as_size

    table = Table("model", title="models", title_justify="left")
    for heading in ("parameters", "paper %", "iterations", "input"):
        table.add_column(heading, justify="right")
    table.add_column("dataset")
    for name in names:
        info = model_info(name)
        height, width = as_size(info.task.image_size)
        table.add_row(
            name,
            f"{info.parameters:,}",
            "–" if info.paper_accuracy is None else f"{info.paper_accuracy:.2f}",
            str(info.task.iterations or "–"),
            f"{height}x{width}x{info.task.in_channels}",
            info.dataset,
        )
    return table


def _layer_table(name: str) -> Table:
    from capsroute.models import model_info
    from capsroute.models.describe import describe

    table = Table("operation", title=f"{name}: {model_info(name).summary}", title_justify="left")
    table.add_column("output size", justify="right")
    table.add_column("parameters", justify="right")
    rows = describe(capsroute.create_model(name))
    for row in rows:
        table.add_row(row.operation, row.output, f"{row.parameters:,}", end_section=True)
    table.add_row("total", "", f"{sum(row.parameters for row in rows):,}")
    return table


COMMANDS: dict[str, Callable[[list[str]], None]] = {"models": _models}
