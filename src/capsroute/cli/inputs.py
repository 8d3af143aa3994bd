"""MODEL and IMAGE as several commands take them, with the same words for what is wrong."""

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torch import Tensor

from capsroute.cli.errors import as_typed
from capsroute.data.decoding import open_image, why_unreadable
from capsroute.inference import Predictor

STDIN = "-"


def load_predictor(model: str, *, iterations: int | None, device: str = "auto") -> Predictor:
    with as_typed(path="MODEL", iterations="--iterations", device="--device"):
        return Predictor.load(model, iterations=iterations, device=device)


@dataclass(frozen=True)
class Source:
    """An image to be read, and what to call it."""

    name: str
    open: Callable[[], Image.Image]


@dataclass(frozen=True)
class Broken:
    """Why a file could not be read."""

    reason: str


def from_stdin() -> Source:
    data = sys.stdin.buffer.read()
    return Source("stdin", lambda: open_image(io.BytesIO(data)))


def from_file(path: Path) -> Source:
    return Source(str(path), lambda: open_image(path))


def read_image(predictor: Predictor, source: Source) -> Tensor | Broken:
    """The model's input, or why there is none."""
    try:
        with source.open() as image:
            return predictor.prepare(image)
    except Exception as error:  # Pillow's decoders raise nearly anything on a broken file
        return Broken(why_unreadable(error))
