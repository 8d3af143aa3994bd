"""`capsroute export`"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from capsroute.cli.errors import UsageError, as_typed
from capsroute.cli.inputs import load_predictor
from capsroute.cli.outputs import file_to_write
from capsroute.cli.parsing import FLAGS, optional, parse
from capsroute.export import FORMATS, export_model
from capsroute.train.checkpoint import RunFolder


@dataclass(frozen=True)
class Options:
    """Export a trained model to a single file.

    Before the file is written, it is compared with the model on random images, in batches of 1, 7
    and 64 (or of --batch); if they differ, that is an error and no file is left behind. It holds
    the class names, the image size and everything else that `capsroute predict` needs.

    For example `capsroute export runs/pets --to onnx`,
    `capsroute export inverted_small_multimnist --to torch-export --out digits.pt2`.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run's folder, a checkpoint or a pretrained model's name."""
    to: Literal["onnx", "torch-export", "safetensors"]
    """ONNX (needs the extra `export`), a torch.export program (.pt2), or weights and metadata."""
    out: Annotated[Path | None, optional("FILE")] = None
    """File to write or replace, or a folder for it. (default: named after MODEL, in this folder)"""
    batch: Annotated[int | None, optional("N")] = None
    """Fix the number of images per call. (default: any number)"""
    iterations: Annotated[int | None, optional("N")] = None
    """Routing iterations. (default: the model's own)"""


def main(arguments: list[str]) -> None:
    options = parse(Options, "export", arguments, config=FLAGS)
    predictor = load_predictor(options.model, iterations=options.iterations, device="cpu")
    if predictor.model is None or predictor.checkpoint is None:
        raise UsageError(f"`MODEL` must be a model's weights, got {options.model}: it is exported")
    out = _out_file(options.out, default_name(options.model), FORMATS[options.to])
    replaced = out.exists()
    if replaced and out.samefile(predictor.checkpoint):
        raise UsageError(f"`--out` must be another file than MODEL's own, got {out}")
    with as_typed(batch="--batch"), _stages() as tell:
        difference = export_model(predictor.model, options.to, out, batch=options.batch, tell=tell)
    verb = "replaced" if replaced else "wrote"
    print(f"{verb} {out} ({out.stat().st_size / 2**20:.1f} MiB)")
    print(f"its scores differ from the model's by at most {difference:.1e}")


@contextmanager
def _stages() -> Iterator[Callable[[str], None]]:
    """What to tell the work's stages to: a spinner with the time on a terminal, lines elsewhere.

    On stderr, so that stdout holds the outcome alone.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: print(stage, file=sys.stderr, flush=True)
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("", total=None)
        yield lambda stage: shown.update(task, description=stage)


def default_name(model: str) -> str:
    """Of a run its folder's name, of a checkpoint its own, of a pretrained model the model's."""
    path = Path(model).expanduser()
    if not path.exists():
        return model
    path = path.resolve()
    if path.is_dir():
        return path.name
    of_a_run = path.name == RunFolder(path.parent).model.name
    return path.parent.name if of_a_run else path.stem


def _out_file(given: Path | None, name: str, suffix: str) -> Path:
    out = Path() if given is None else given.expanduser()
    if out.is_dir():
        out /= name + suffix
    if out.suffix != suffix:
        raise UsageError(f"`--out` must end in {suffix}, got {out}")
    return file_to_write(out)
