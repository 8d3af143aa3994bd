"""What `capsroute train --data FOLDER` works out by itself: name, length, what was found."""

from dataclasses import replace
from pathlib import Path

from capsroute.data import Dataset, list_datasets
from capsroute.experiments import preset
from capsroute.experiments.presets import MOST_EPOCHS
from capsroute.train.checkpoint import RunFolder
from capsroute.train.config import Config, differences, read_json

OWN_IMAGES = "own_images"  # the preset for `--data FOLDER`
FEW_CLASSES = 10  # are named


def is_folder(data: str) -> bool:
    """Whether `--data` names a folder of images rather than a dataset."""
    return data not in list_datasets() and Path(data).expanduser().is_dir()


def folder_name(data: str) -> str:
    return Path(data).expanduser().resolve().name or "images"  # the root has no name


def as_begun(config: Config, out: Path, *, evaluations_open: bool) -> Config | None:
    """The config with the length of the run in `out`: what is asked for, before images are read.

    None where no run began with a length that this command works out, or where more differs.
    """
    if not (file := RunFolder(out).config).is_file():
        return None
    saved, planned = read_json(file), preset(OWN_IMAGES).config
    length = saved.get("steps"), saved.get("epochs")
    if length not in ((planned.steps, planned.epochs), (None, MOST_EPOCHS)):
        return None
    every = saved.get("eval_every", 0) if evaluations_open else config.eval_every
    config = replace(config, steps=length[0], epochs=length[1], eval_every=every)
    return None if differences(config, saved) else config


def what_was_found(dataset: Dataset) -> str:
    """`3 classes (bar, circle, square), 95 + 24 images (training + test), 46×46 colour`"""
    names = dataset.class_names
    which = f" ({', '.join(names)})" if len(names) <= FEW_CLASSES else ""
    parts = {"training": dataset.train, "validation": dataset.validation, "test": dataset.test}
    present = {part: split for part, split in parts.items() if split is not None}
    counts = " + ".join(f"{len(split):,}" for split in present.values())
    height, width = dataset.image_size
    kind = "grey" if dataset.channels == 1 else "colour"
    return (
        f"{len(names)} classes{which}, {counts} images ({' + '.join(present)}), "
        f"{height}×{width} {kind}"
    )


def length_in_words(config: Config, images: int) -> str:
    """`900 steps (300 epochs)`"""
    epoch_steps = -(-images // config.batch_size)
    steps = config.steps or config.epochs * epoch_steps
    epochs = steps / epoch_steps
    counted = f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.3g}"
    return f"{steps:,} step{'s' * (steps != 1)} ({counted} epoch{'s' * (counted != '1')})"
