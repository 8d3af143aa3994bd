"""Models made: by their names, with weights that ship, or as a file describes them."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capsroute.models.base import ImageClassifier, Normalize, Size, as_size
from capsroute.models.pretrained import list_pretrained
from capsroute.models.registry import list_models, model_info
from capsroute.models.sources import find_checkpoint, pretrained_path
from capsroute.models.weights import load_tensors, read_metadata
from capsroute.nearest import nearest

NORMALIZATION = ("mean", "std")  # None is a value of theirs: images are taken as they are
_log = logging.getLogger("capsroute")


def create_model(
    name: str,
    *,
    pretrained: bool = False,
    num_classes: int | None = None,
    image_size: Size | None = None,
    in_channels: int | None = None,
    iterations: int | None = None,
    schedule: str | None = None,
    **overrides: Any,
) -> ImageClassifier:
    """Create a registered model. Arguments left out keep the model's own values.

    Args:
        name: a name from `list_models()`.
        pretrained: load the weights that ship with the package, trained with `iterations`. If
            `num_classes` is changed, the class layer starts afresh and all others are loaded; if
            `in_channels` is changed from colour to grey or the reverse, the first convolution is
            adapted.
        num_classes: number of scores per image.
        image_size: an integer or (height, width).
        in_channels: 1 for grey, 3 for colour, or any other number.
        iterations: number of routing iterations; 1 is uniform routing.
        schedule: `concurrent` or `sequential` (inverted models).
        overrides: options of the family, such as `bn_group`, `layer_norm` or `initial_poses`, and
            `mean` and `std` per channel; None for both leaves images unnormalised.
    """
    info = model_info(name)
    requested: dict[str, Any] = {
        "num_classes": num_classes,
        "image_size": image_size,
        "in_channels": in_channels,
        "iterations": iterations,
        "schedule": schedule,
        **overrides,
    }
    if not isinstance(pretrained, bool):
        raise ValueError(
            f"`pretrained` must be True or False, got {pretrained!r}; `load_model` reads files"
        )
    requested = {
        key: _plain(value)
        for key, value in requested.items()
        if value is not None or key in NORMALIZATION
    }
    accepted = [*info.task_arguments, *info.options]
    for key in requested:
        if key not in accepted:
            raise ValueError(f"{name} has no option `{key}`{nearest(key, accepted)}")
    task = replace(info.task, **{k: requested[k] for k in requested if k in info.task_arguments})
    _check_normalization(requested, task.in_channels)
    options = {k: requested[k] for k in requested if k not in info.task_arguments}
    model = info.build(task, **options)
    if not isinstance(model, ImageClassifier):
        raise TypeError(
            f"{name} must return an ImageClassifier, got {type(model).__name__} from its function"
        )
    model.name, model.config = name, requested
    if pretrained:
        _load_pretrained(model)
    return model


def _check_normalization(requested: dict[str, Any], channels: int) -> None:
    """A dataset's own is averaged for images of other channels; the caller's is meant as it is."""
    for name in NORMALIZATION:
        given = requested.get(name)
        if given is not None and len(given) != channels:
            raise ValueError(
                f"`{name}` must be a number for each channel (`in_channels` is {channels}), "
                f"got {given!r}"
            )


def _plain(value: Any) -> Any:
    """Numbers of NumPy and PyTorch, such as `labels.max() + 1`, as a saved file can hold them."""
    if hasattr(value, "tolist") and not getattr(value, "requires_grad", False):
        value = value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def load_model(source: str | Path, **changes: Any) -> ImageClassifier:
    """Build the model that a checkpoint describes and load its weights.

    Args:
        source: a run's folder, a checkpoint (from `save_model`, or a run's `model.safetensors`),
            or the name of a model whose weights ship with the package.
        changes: arguments of `create_model` that leave the weights' shapes alone, such as
            `iterations`.
    """
    path = find_checkpoint(source, changes.get("iterations"))
    metadata = read_metadata(path)
    _check_registered(metadata["model"], path)
    config = {**metadata["config"], **changes}
    if isinstance(config.get("image_size"), list):
        config["image_size"] = tuple(config["image_size"])
    model = create_model(metadata["model"], **config)
    model.class_names = metadata.get("class_names")
    resize = metadata.get("resize")
    model.resize = None if resize is None else tuple(resize)
    model.load_state_dict(load_tensors(path))
    return model


def _check_registered(name: str, path: Path) -> None:
    """A model of one's own is known once the module that registers it has been imported."""
    if name not in list_models():
        raise ValueError(
            f"{path} holds a {name!r}, which no imported module registers: import the one that "
            "does first (`capsroute --import MODULE` on the command line)"
        )


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


def _load_pretrained(model: ImageClassifier) -> None:
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
