"""Weights that ship inside the package: one file for each model and number of iterations.

`files/<model>_r<iterations>.safetensors` (`<model>.safetensors` where nothing routes), with a model
card beside it. Matrices are stored in half precision; biases, norms and running statistics, which
weigh next to nothing, as they are.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from capsroute.models.base import ImageClassifier, Normalize, as_size
from capsroute.models.registry import create_model, list_models, model_info
from capsroute.models.weights import load_model, load_tensors, read_metadata, save_model
from capsroute.nearest import nearest

FILES = Path(__file__).parent / "files"
_log = logging.getLogger("capsroute")


def list_pretrained() -> list[str]:
    """Names of the models whose weights ship with the package, sorted."""
    return sorted({name for name, _ in _shipped()})


def pretrained_path(name: str, iterations: int | None = None) -> Path:
    """The weights of a model, trained with so many iterations; its own number unless given."""
    shipped = {count: path for (model, count), path in _shipped().items() if model == name}
    if not shipped:
        known = list_pretrained()
        hint = (
            f"; they ship for {', '.join(known)}" if name in list_models() else nearest(name, known)
        )
        raise ValueError(f"no weights ship for {name!r}{hint}")
    wanted = model_info(name).task.iterations if iterations is None else iterations
    if wanted not in shipped:
        choices = ", ".join(map(str, shipped))
        raise ValueError(
            f"`iterations` must be one of {choices} for the weights that ship for {name}, "
            f"got {wanted}"
        )
    return shipped[wanted]


def _shipped() -> dict[tuple[str, int | None], Path]:
    """(model, iterations) -> file, in the order of their names."""
    found: dict[tuple[str, int | None], Path] = {}
    for path in sorted(FILES.glob("*.safetensors")):
        routed = re.search(r"_r(\d+)$", path.stem)
        name = path.stem[: routed.start()] if routed else path.stem
        found[name, int(routed[1]) if routed else None] = path
    return found


def load_pretrained(model: ImageClassifier) -> None:
    """Give a model the weights that ship for it, or raise a ValueError that says what differs.

    The number of classes, and whether an image may have several, is the caller's: weights whose
    shape follows from it stay as they are. So is grey or colour: the first convolution becomes one
    of the other. Both are logged.
    """
    if model.name not in list_pretrained():
        ships = ", ".join(list_pretrained())
        raise ValueError(
            f"`pretrained` must be False for {model.name}: weights ship for {ships} alone"
        )
    path = pretrained_path(model.name, model.iterations)
    own = model_info(model.name).task
    if model.task.image_size not in (own.image_size, as_size(own.image_size)):
        raise ValueError(
            f"`image_size` must be {own.image_size} for the weights that ship for {model.name}, "
            f"got {model.task.image_size}; `capsroute.models.load_backbone` copies those that fit "
            "other images"
        )
    if own.in_channels != model.in_channels and 1 not in (own.in_channels, model.in_channels):
        raise ValueError(
            f"`in_channels` must be {own.in_channels}, or 1 for grey, for the weights that ship "
            f"for {model.name}, got {model.in_channels}"
        )
    weights = load_tensors(path)
    _fit_channels(weights, model, path)
    if model.num_classes != own.num_classes:
        new = _replace_misfits(weights, model.state_dict())
        _log.info("%s: loaded the weights that ship; new: %s", model.name, ", ".join(new))
    else:
        model.class_names = read_metadata(path)["class_names"]
    model.load_state_dict(weights)


def _replace_misfits(weights: dict[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """Put a model's own weights where those given have another shape; returns their names."""
    new = [key for key in own if key in weights and weights[key].shape != own[key].shape]
    weights.update((key, own[key]) for key in new)
    return new


def _fit_channels(weights: dict[str, Tensor], model: ImageClassifier, path: Path) -> None:
    """Make weights of grey images those of a model of colour ones, or the reverse, and log which.

    A picture without colour gets the same responses from both: what one channel had is spread
    over all, what several had is summed, each in units of its normalisation's standard deviation.
    Only the means of several channels, where they differ, leave an offset.
    """
    own = model.state_dict()
    reading = [key for key in weights if key in own and _reads_images(weights[key], own[key])]
    if not reading:
        return
    with torch.random.fork_rng(devices=[]):  # building it draws initial weights
        trained = load_model(path)
    before, after = trained.in_channels, model.in_channels
    if before == after:
        return
    for key in reading:
        by_pixel = (weights[key].float() / _scale(trained)).sum(dim=1, keepdim=True)
        weights[key] = by_pixel.expand(-1, after, -1, -1) * _scale(model) / after
    how = f"spread over {after} channels" if before == 1 else f"of {before} channels summed to one"
    _log.info("%s: weights %s: %s", model.name, how, ", ".join(reading))


def _reads_images(given: Tensor, own: Tensor) -> bool:
    """Whether two convolutions differ in nothing but that one sees grey images."""
    if given.ndim != 4 or own.ndim != 4 or given.shape[1] == own.shape[1]:
        return False
    elsewhere_alike = given[:, :1].shape == own[:, :1].shape
    return elsewhere_alike and 1 in (given.shape[1], own.shape[1])


def _scale(model: ImageClassifier) -> Tensor:
    """What a model divides each channel by before its first convolution, (channels or 1, 1, 1)."""
    normalize = model.normalize
    return normalize.std.cpu() if isinstance(normalize, Normalize) else torch.ones(1, 1, 1)


def load_backbone(model: ImageClassifier, source: str | Path) -> list[str]:
    """Copy every weight that fits into the model; returns the names of the model's other weights.

    Those keep their initial values: for example the class capsules, if the classes differ in
    number or in name (`class_names`, where both sides have them).
    A first convolution for grey images also fits colour ones, and the reverse: its weights are
    spread over the channels, or summed, so that a picture without colour gets the same responses
    (from colour to grey, up to an offset if the channels are normalised with different means).
    `source` is a run's folder, a checkpoint or the name of a model whose weights ship with the
    package, as in `capsroute.load_model`.
    """
    from capsroute.models.sources import find_checkpoint  # which builds on this module

    path = find_checkpoint(source, model.iterations)
    metadata = read_metadata(path)
    if (described := metadata["model"]) != model.name:
        raise ValueError(
            f"`source` must hold weights of {model.name}, got {source} with {described}"
        )
    own, given = model.state_dict(), load_tensors(path)
    _fit_channels(given, model, path)
    names = metadata.get("class_names")
    renamed = names and model.class_names and names != model.class_names
    left = _of_classes(model) if renamed else []
    fits = {
        k: v for k, v in given.items() if k in own and k not in left and v.shape == own[k].shape
    }
    model.load_state_dict(own | fits)
    return [key for key in own if key not in fits]


def _of_classes(model: ImageClassifier) -> list[str]:
    """Names of the weights whose shape follows the number of classes."""
    with torch.device("meta"):
        one_more = create_model(
            model.name, **{**model.config, "num_classes": model.num_classes + 1}
        )
    shapes = {key: value.shape for key, value in one_more.state_dict().items()}
    return [key for key, value in model.state_dict().items() if value.shape != shapes[key]]


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
