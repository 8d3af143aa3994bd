"""Weights on disk: safetensors, with everything needed to build the model again."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from capsroute.files import write_whole
from capsroute.models.base import ImageClassifier, class_names_of, unwrapped

METADATA_KEY = "capsroute"
SUFFIX = ".safetensors"


def save_model(
    model: ImageClassifier, path: str | Path, *, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Save weights and metadata (name, options, class names), atomically.

    `weights`, such as an average, are saved in place of the model's own. Weights with two names are
    saved under both. A compiled model is saved as if it had not been compiled. `load_model`
    rebuilds a registered model; see `register` for models of your own.
    """
    model = unwrapped(model)
    class_names_of(model)  # raises where they are too few or too many
    weights = model.state_dict() if weights is None else weights
    tensors = _on_their_own(weights)
    config = model.config
    if model.iterations != model.task.iterations:  # changed after it was built
        config = {**config, "iterations": model.iterations}
    description = {
        "model": model.name,
        "config": config,
        "class_names": model.class_names,
        "image_size": model.image_size,
        "resize": model.resize,
        "iterations": model.iterations,
        "sha256": _digest(tensors),
    }
    # one entry: safetensors writes several in no fixed order, and equal models shall be equal files
    metadata = {METADATA_KEY: json.dumps(description)}
    write_whole(Path(path), safetensors.torch.save(tensors, metadata))


def _on_their_own(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors takes them: on the CPU, and none in the memory of another."""
    tensors: dict[str, Tensor] = {}
    taken = set()
    for key, value in weights.items():
        tensor = value.detach().cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in taken:  # tied to another
            tensor = tensor.clone()
        taken.add(tensor.untyped_storage().data_ptr())
        tensors[key.replace("_orig_mod.", "")] = tensor  # what `torch.compile` calls a part
    return tensors


def read_metadata(path: str | Path) -> dict[str, Any]:
    """What `save_model` wrote beside the weights, or a one-line ValueError."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"`path` must be a safetensors file, got {path}: no such file")
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise ValueError(f"`path` must be a whole safetensors file, got {path}: {error}") from None
    if METADATA_KEY not in metadata:
        raise ValueError(
            f"`path` must be a file that capsroute wrote, got {path}: it names no model"
        )
    return json.loads(metadata[METADATA_KEY])


def is_safetensors(path: Path) -> bool:
    """Whether a file has the format, whatever it is called."""
    try:
        with safetensors.safe_open(path, "pt"):
            return True
    except safetensors.SafetensorError:
        return False


def load_tensors(path: str | Path) -> dict[str, Tensor]:
    """The weights of a file as they are stored, or a one-line ValueError."""
    digest = read_metadata(path).get("sha256")
    tensors = safetensors.torch.load_file(path)
    if digest not in (None, _digest(tensors)):
        raise ValueError(f"{path} is damaged: its weights do not match their digest")
    return tensors


def _digest(tensors: dict[str, Tensor]) -> str:
    """Of every byte of the weights; safetensors itself notices no flipped bit."""
    digest = hashlib.sha256()
    for key in sorted(tensors):
        digest.update(tensors[key].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
