"""Write a model in another form, once the file has been shown to agree with the model."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import capsroute
from capsroute.export.graph import onnx_bytes, pt2_bytes
from capsroute.export.loading import load_scores
from capsroute.files import write_whole
from capsroute.models.base import ImageClassifier, class_names_of, evaluating, unwrapped
from capsroute.models.description import Run
from capsroute.models.factory import load_model
from capsroute.models.weights import save_model

FORMATS = {"onnx": ".onnx", "torch-export": ".pt2", "safetensors": ".safetensors"}
CHECKED_BATCHES = (1, 7, 64)
TOLERANCE = 1e-4  # of the scores, in units of the largest where that is above 1


def export_model(
    model: ImageClassifier,
    to: str,
    path: str | Path,
    *,
    batch: int | None = None,
    tell: Callable[[str], None] = lambda stage: None,
) -> float:
    """Export a model to a file; returns the largest difference of its scores from the model's.

    Before the file appears under its name, it is loaded and compared with the model on random
    images, at several batch sizes unless `batch` is given. If they differ, a ValueError is raised
    and no file is left behind.

    Args:
        model: in float32 or float64, in any mode and on any device; left as it is.
        to: `onnx`, `torch-export` or `safetensors`.
        path: file to write.
        batch: fixes the number of images per call of the graph; any number by default.
        tell: called with a description of each stage as it begins; large models take minutes.
    """
    if to not in FORMATS:
        raise ValueError(f"`to` must be one of {', '.join(FORMATS)}, got {to!r}")
    if batch is not None and (batch < 1 or to == "safetensors"):
        raise ValueError(f"`batch` must be at least 1, and goes with a graph only, got {batch}")
    model = unwrapped(model)
    _check_precision(model)
    tell(f"making {Path(path).name}")
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / f"model{FORMATS[to]}"
        if to == "safetensors":
            save_model(model, draft)
        else:
            write = onnx_bytes if to == "onnx" else pt2_bytes
            draft.write_bytes(write(model, describe(model, batch), batch))
        difference = check(model, draft, batch, tell)
        write_whole(Path(path), draft.read_bytes())
    return difference


def _check_precision(model: ImageClassifier) -> None:
    """In half precision two ways to compute the same scores differ by more than a check allows."""
    dtype = next(model.parameters()).dtype
    if dtype.itemsize < torch.float32.itemsize:
        raise ValueError(f"`model` must be in float32 or float64, got {dtype}: `model.float()`")


def describe(model: ImageClassifier, batch: int | None) -> dict[str, Any]:
    """What travels inside an exported file, so that it needs nothing beside it."""
    if model.scores_are_probabilities:
        probabilities = "identity"
    else:
        probabilities = "sigmoid" if model.task.multilabel else "softmax"
    return {
        "model": model.name,
        "config": model.config,
        "class_names": class_names_of(model),
        "image_size": list(model.image_size),
        "in_channels": model.in_channels,
        "multilabel": model.task.multilabel,
        "iterations": model.iterations,
        "probabilities": probabilities,
        "resize": None if model.resize is None else list(model.resize),
        "batch": batch,
        "capsroute": capsroute.__version__,
    }


@torch.no_grad()
def check(
    model: ImageClassifier, path: Path, batch: int | None, tell: Callable[[str], None]
) -> float:
    """The largest difference between a file's scores and the model's, or a ValueError."""
    run = _scores_of(path)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    with evaluating(model):
        for count in CHECKED_BATCHES if batch is None else (batch,):
            tell(f"comparing it with the model, {count} image{'s' * (count > 1)} at a time")
            shape = (count, model.in_channels, *model.image_size)
            images = torch.rand(shape, generator=generator)
            expected, got = model(images.to(device)).cpu(), run(images)
            difference = (got - expected).abs().max().item()
            allowed = TOLERANCE * max(1.0, expected.abs().max().item())
            if not difference <= allowed:
                raise ValueError(
                    f"the exported {model.name} differs from the model by {difference:.2g} at "
                    f"batch {count}, more than {allowed:.2g}; nothing was written"
                )
            worst = max(worst, difference)
    return worst


def _scores_of(path: Path) -> Run:
    if path.suffix == FORMATS["safetensors"]:
        return load_model(path).eval()
    return load_scores(path)[1]
