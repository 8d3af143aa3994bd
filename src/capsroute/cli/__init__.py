"""The command line: parse, call, print. Nothing below this package prints or parses arguments.

One module a command, imported when the command is run. This one imports nothing heavy: help is
there at once, and Ctrl-C is caught while PyTorch loads.
"""

import importlib
import io
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import capsroute
from capsroute.cli.errors import UsageError, one_line
from capsroute.nearest import nearest

COMMANDS = {
    "train": "Train a model; without arguments, the default preset on bundled data.",
    "eval": "Measure how accurate a trained model is.",
    "predict": "Classify images.",
    "explain": "Show how an image was routed: heat maps, parse tree, entropy.",
    "export": "Export a model as ONNX, torch.export or safetensors.",
    "serve": "Serve a model as a web page and a JSON API.",
    "models": "List the models, or show one model's layers.",
    "data": "List, show, download or verify datasets.",
    "reproduce": "Run the paper's experiments and our own, or resume them.",
    "report": "Make tables and figures of the results, or check them.",
    "bench": "Time training steps and forward passes of models.",
}
_MODULES = {"eval": "evaluate"}  # `eval` is a builtin; its module is named in full
_imported: list[str] = []  # by `--import` of this call


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `capsroute` and `python -m capsroute`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        _prepare_streams()
        # what Pillow warns of, if it concerns a user, we say in a line of our own
        warnings.filterwarnings("ignore", module=r"PIL\.")
        _dispatch(arguments)
        sys.stdout.flush()  # while what goes wrong with it can still be told
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `capsroute models | head`
        sys.exit(0)
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich makes a 1 of it
            sys.exit(0)
        raise
    except (ValueError, TypeError, OSError) as error:
        if debug:
            traceback.print_exc()
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        sys.exit(2)
    finally:
        _drop_what_nobody_takes()


def _prepare_streams() -> None:
    """A terminal without × or – gets a ? instead; `2>&-` is nowhere, `>&-` an error."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  (until the process ends)
    if sys.stdout is None:
        raise OSError("stdout is closed, there is nowhere to print to; /dev/null takes everything")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_what_nobody_takes() -> None:
    """Python would try to print it once more at exit, and end with a traceback of its own."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> None:
    arguments = _import_modules(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return
    if arguments[0] == "--version":
        print(f"capsroute {capsroute.__version__}")
        return
    name, *rest = arguments
    if name not in COMMANDS:
        raise UsageError(f"no command {name!r}{nearest(name, COMMANDS)}")
    if any(_is_import(argument) for argument in rest):
        raise UsageError(f"`--import` comes before the command: capsroute --import MODULE {name} …")
    module = importlib.import_module(f"capsroute.cli.{_MODULES.get(name, name)}")
    module.main(rest)


def _import_modules(arguments: list[str]) -> list[str]:
    """Import what `--import` names before the command, which registers models; returns the rest."""
    _imported.clear()
    while arguments and _is_import(arguments[0]):
        option, *rest = arguments
        _, given, module = option.partition("=")
        if not given:
            module, rest = (rest[0], rest[1:]) if rest else ("", [])
        _import_module(module)
        _imported.append(module)
        arguments = rest
    return arguments


def to_type(*words: object) -> str:
    """A command for the user's next step, which needs the modules that this one imported."""
    modules = [word for module in _imported for word in ("--import", module)]
    return shlex.join(["capsroute", *modules, *map(str, words)])


def _is_import(argument: str) -> bool:
    return argument.split("=")[0] == "--import"


def _import_module(name: str) -> None:
    if not name or name.startswith("-"):
        raise UsageError("`--import` must be followed by a module's name")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # `python -m capsroute` has it, the script has not
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever a user's module raises
        raise UsageError(f"`--import` {name}: {type(error).__name__}: {error}") from error


def _overview() -> str:
    lines = [f"capsroute {capsroute.__version__}: capsule networks that route by attention", ""]
    lines += ["usage: capsroute [--import MODULE] COMMAND [OPTIONS]", ""]
    lines += [f"  {name:<11}{summary}" for name, summary in COMMANDS.items()]
    lines += [
        "",
        "Start with `capsroute train` (four minutes on a CPU), or",
        "`capsroute serve inverted_small_multimnist`.",
        "",
        "`capsroute COMMAND --help` explains a command; `--debug` adds tracebacks to errors.",
        "`--import MODULE` first imports a module of your own, such as one that registers a model.",
    ]
    return "\n".join(lines)
