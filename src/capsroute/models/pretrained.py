"""Weights that ship inside the package: one file for each model and number of iterations.

`files/<model>_r<iterations>.safetensors` (`<model>.safetensors` where nothing routes), with a model
card beside it. Matrices are stored in half precision; biases, norms and running statistics, which
weigh next to nothing, as they are.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from capsroute.models.base import ImageClassifier
from capsroute.models.weights import save_model

FILES = Path(__file__).parent / "files"


def list_pretrained() -> list[str]:
    """Names of the models whose weights ship with the package, sorted."""
    return sorted({name for name, _ in shipped()})


def shipped() -> dict[tuple[str, int | None], Path]:
    """(model, iterations) -> file, in the order of their names."""
    found: dict[tuple[str, int | None], Path] = {}
    for path in sorted(FILES.glob("*.safetensors")):
        routed = re.search(r"_r(\d+)$", path.stem)
        name = path.stem[: routed.start()] if routed else path.stem
        found[name, int(routed[1]) if routed else None] = path
    return found


def pack(model: ImageClassifier, folder: Path = FILES) -> Path:
    """Write a trained model as the package ships it; returns the file."""
    routed = "" if model.iterations is None else f"_r{model.iterations}"
    path = folder / f"{model.name}{routed}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, path, weights=_halved(model.state_dict()))
    return path


def _halved(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    packed = {}
    for key, value in weights.items():
        matrix = value.is_floating_point() and value.ndim > 1
        packed[key] = value.half() if matrix else value
        if not torch.isfinite(packed[key]).all():
            raise ValueError(f"{key!r} must be finite in half precision, and is not")
    return packed
