"""`capsroute export`"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from capsroute.cli.data import FLAGS, optional
from capsroute.cli.parsing import UsageError, parse
from capsroute.export import FORMATS, export_model
from capsroute.inference import Predictor


@dataclass(frozen=True)
class Options:
    """Write a trained model as a file to take away.

    The file is compared with the model on random images, at batch 1, 7 and 64, before it appears;
    one that differs is an error and leaves nothing behind. Class names, image size and all else
    that `capsroute predict` needs travel inside it.

    For example `capsroute export runs/pets --to onnx`,
    `capsroute export inverted_small_multimnist --to torch-export --out digits.pt2`.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run's folder, a checkpoint or a pretrained model's name."""
    to: Literal["onnx", "torch-export", "safetensors"]
    """ONNX (extra `export`), a torch.export program (.pt2), or the weights with their metadata."""
    out: Annotated[Path | None, optional("FILE")] = None
    """The file to write; the model's name with the format's ending unless given."""
    batch: Annotated[int | None, optional("N")] = None
    """Fix the number of images a call takes; any number unless given."""
    iterations: Annotated[int | None, optional("N")] = None
    """Routing iterations; the model's own unless given."""


def main(arguments: list[str]) -> None:
    options = parse(Options, "export", arguments, config=FLAGS)
    predictor = Predictor.load(options.model, iterations=options.iterations, device="cpu")
    if predictor.model is None:
        raise UsageError(f"`MODEL` must be a model's weights, got {options.model}: it is exported")
    out = _out_file(options.out, predictor.name + FORMATS[options.to], FORMATS[options.to])
    difference = export_model(predictor.model, options.to, out, batch=options.batch)
    print(f"wrote {out} ({out.stat().st_size / 2**20:.1f} MiB)")
    print(f"its scores differ from the model's by at most {difference:.1e}")


def _out_file(given: Path | None, default: str, suffix: str) -> Path:
    out = Path(default) if given is None else given.expanduser()
    if out.is_dir():
        return out / default
    if out.suffix != suffix:
        raise UsageError(f"`--out` must end in {suffix}, got {out}")
    if not out.parent.is_dir():
        raise UsageError(f"`--out` must lie in a folder that exists, got {out}")
    return out
