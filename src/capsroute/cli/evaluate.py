"""`capsroute eval`"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from capsroute.cli.data import report_skipped
from capsroute.cli.errors import UsageError, as_typed
from capsroute.cli.evaluation_tables import print_tables
from capsroute.cli.outputs import folder_to_write_to
from capsroute.cli.parsing import FLAGS, optional, parse
from capsroute.cli.progress import progress_bars
from capsroute.data import Dataset, MissingDataError, Split, list_datasets, load_dataset
from capsroute.data.mnist import find_idx
from capsroute.devices import choose_device
from capsroute.files import write_json
from capsroute.models import model_info
from capsroute.models.base import ImageClassifier
from capsroute.models.factory import load_model
from capsroute.models.sources import find_checkpoint, pretrained_path
from capsroute.models.weights import METADATA_KEY
from capsroute.progress import Progress
from capsroute.train.checkpoint import RunFolder
from capsroute.train.config import Config, DataConfig, load_config, read_json
from capsroute.train.data_record import changed_since, unknown_images_note
from capsroute.train.evaluation import Evaluation, Point, evaluate, finite, robustness
from capsroute.train.fit import check_fit
from capsroute.train.pictures import draw_confusion, draw_robustness

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Options:
    """Measure a trained model: its accuracy, overall and per class, and what it confuses.

    Writes confusion.png and evaluation.json to the run's folder. With --rotate or --shift, also
    measures how accuracy falls as images are turned or moved, and draws robustness.png.

    For example `capsroute eval runs/fast_cifar10`,
    `capsroute eval runs/fast_cifar10 --rotate 30 --shift 6`,
    `capsroute eval model.safetensors --data ./my_images --out measured`,
    `capsroute eval --pretrained inverted_small_multimnist`.
    """

    model: Annotated[str | None, tyro.conf.Positional, optional("MODEL")] = None
    """A run's folder, a checkpoint or a pretrained model's name; not an exported file."""
    pretrained: Annotated[str | None, optional("NAME")] = None
    """Instead of MODEL: one whose weights ship; --iterations chooses among them."""
    data: Annotated[str | None, optional("NAME_OR_FOLDER")] = None
    """A dataset's name or a folder. (default: what the run or the model was made for)"""
    data_root: Annotated[Path | None, optional("DIR")] = None
    """Where to look for datasets. (default: the run's, $CAPSROUTE_DATA or ~/.cache/capsroute)"""
    split: Literal["test", "validation", "train"] = "test"
    """Which images to use. In a folder without a test part, a fifth is held out for it."""
    strict: bool = False
    """Treat a broken image file as an error instead of skipping it."""
    rotate: Annotated[float | None, optional("DEG")] = None
    """Also measure images turned by a handful of angles, up to this one."""
    shift: Annotated[int | None, optional("PX")] = None
    """Also measure images shifted by up to this many pixels."""
    iterations: Annotated[int | None, optional("N")] = None
    """Routing iterations. (default: the model's own)"""
    batch_size: Annotated[int, tyro.conf.arg(metavar="N")] = 500
    """Images per batch."""
    device: Annotated[str, tyro.conf.arg(metavar="DEVICE")] = "auto"
    """auto, cpu or cuda."""
    dtype: Annotated[Dtype | None, optional("{float32,bfloat16}")] = None
    """Precision. (default: the run's, or float32 for a checkpoint alone)"""
    out: Annotated[Path | None, optional("DIR")] = None
    """Folder for the files. (default: the run's or checkpoint's; runs/NAME for shipped weights)"""
    json: bool = False
    """Print evaluation.json instead of tables."""


def main(arguments: list[str]) -> None:
    options = parse(Options, "eval", arguments, config=FLAGS)
    _check(options)
    checkpoint = _find_checkpoint(options)
    config = run_config(checkpoint)
    model = _load_model(checkpoint, options.iterations)
    dataset, data = _load_data(options, config, model)
    if config is not None and config.data.data == data:
        _tell_of_changes(RunFolder(checkpoint.parent), dataset)
    crop = None if model.resize is None else model.image_size[0]  # of what was resized
    _check_fit(model, dataset, crop)
    _check_shift(options.shift, model)
    split = _choose_split(dataset, options.split)
    out = folder_to_write_to(options.out or _default_folder(options, checkpoint))
    dtype = options.dtype or (config.dtype if config else "float32")
    about = {
        "checkpoint": str(checkpoint),
        "model": model.name,
        "iterations": model.iterations,
        "data": data,
        "split": options.split,
        "dtype": dtype,
    }
    evaluation, points = _measure(model, split, options, dtype, crop)
    names = model.class_names or list(dataset.class_names)
    _report(options, about, evaluation, names, points, out)
    report_skipped(dataset)


def _report(
    options: Options,
    about: dict[str, Any],
    evaluation: Evaluation,
    names: list[str],
    points: list[Point],
    out: Path,
) -> None:
    report = about | evaluation.as_dict(names, points)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        print_tables(report, evaluation, points)
    # the numbers are on the screen by now, should the folder not take the files
    written = [out / "evaluation.json", out / "confusion.png"]
    write_json(written[0], report)
    draw_confusion(evaluation, names, written[1])
    curves = out / "robustness.png"
    if points:
        written.append(curves)
        draw_robustness(points, curves)
    else:
        curves.unlink(missing_ok=True)  # of an evaluation before, which the numbers are not of
    if not options.json:
        print(f"wrote {', '.join(map(str, written))}")
    if evaluation.not_finite:
        print(f"{evaluation.not_finite} images got scores that are not finite", file=sys.stderr)


def _check(options: Options) -> None:
    if options.batch_size < 1:
        raise UsageError(f"`--batch-size` must be at least 1, got {options.batch_size}")
    if options.rotate is not None and not 0 < options.rotate <= 180:
        raise UsageError(f"`--rotate` must be above 0 and at most 180, got {options.rotate:g}")


def _check_shift(shift: int | None, model: ImageClassifier) -> None:
    side = min(model.image_size)
    if shift is not None and not 0 < shift < side:
        raise UsageError(f"`--shift` must be between 1 and {side - 1} pixels, got {shift}")


def _find_checkpoint(options: Options) -> Path:
    if (options.model is None) == (options.pretrained is None):
        raise UsageError(
            "expected either MODEL or `--pretrained NAME` (see `capsroute eval --help`)"
        )
    with as_typed(iterations="--iterations"):
        if options.model is not None:
            return find_checkpoint(options.model, options.iterations)
        assert options.pretrained is not None
        return pretrained_path(options.pretrained, options.iterations)


def _default_folder(options: Options, checkpoint: Path) -> Path:
    """Beside the weights; for those inside the package, with the runs."""
    of_the_user = options.model is not None and Path(options.model).expanduser().exists()
    return checkpoint.parent if of_the_user else Path("runs") / checkpoint.stem


def run_config(checkpoint: Path) -> Config | None:
    """The config of the run that the weights belong to, if any."""
    folder = RunFolder(checkpoint.parent)
    if checkpoint.name != folder.model.name or not folder.config.is_file():
        return None
    if METADATA_KEY in read_json(folder.config):  # a folder for the hub, whose file it is
        return None
    return load_config(folder.config)


def _load_model(checkpoint: Path, iterations: int | None) -> ImageClassifier:
    changes = {} if iterations is None else {"iterations": iterations}
    with as_typed(path="MODEL", iterations="--iterations"):
        return load_model(checkpoint, **changes)


def _load_data(
    options: Options, config: Config | None, model: ImageClassifier
) -> tuple[Dataset, str]:
    """The dataset, and what it was asked for by: the command line, else the run, else the model."""
    run = config or Config(data=DataConfig(model_info(model.name).dataset))
    name = options.data or run.data.data
    chosen = run if run.data.data == name else Config()
    try:
        dataset = load_dataset(
            name,
            root=options.data_root or run.data.data_root,
            # a folder's images are brought to the model's size, or to the one that it crops from;
            # other sets have one of their own
            image_size=(model.resize or model.image_size) if _is_image_folder(name) else None,
            strict=options.strict or run.data.strict,
            # those that training set aside, and no others
            validation=chosen.data.validation,
            seed=chosen.seed,
        )
    except MissingDataError as error:
        if options.data is None and config is not None:
            raise MissingDataError(f"{error} (the run's data; `--data` names another)") from error
        raise
    return dataset, name


def _tell_of_changes(run: RunFolder, dataset: Dataset) -> None:
    """On stderr, if a folder of images is not the one that the run was trained on."""
    note = unknown_images_note(run, dataset)
    if change := changed_since(run, dataset):
        note = (
            f"the run's data has changed: {change}; "
            "it may have been trained on some of the images that it is tested on"
        )
    if note:
        print(note, file=sys.stderr)


def _is_image_folder(name: str) -> bool:
    if name in list_datasets():
        return False
    return find_idx(Path(name).expanduser(), "train-images-idx3-ubyte") is None


def _check_fit(model: ImageClassifier, dataset: Dataset, crop: int | None) -> None:
    try:
        check_fit(model, dataset, crop)
    except ValueError as error:
        raise UsageError(f"{error}; choose data that fits with `--data`") from error


def _choose_split(dataset: Dataset, name: str) -> Split:
    split = getattr(dataset, name)
    if split is None:
        raise UsageError(
            f"`--split validation`: no images of {dataset.name} were set aside for validation; "
            "choose test or train"
        )
    if not len(split):
        raise UsageError(f"`--split {name}`: {dataset.name} has no such image that can be read")
    return finite(split)


def _measure(
    model: ImageClassifier, split: Split, options: Options, dtype: str, crop: int | None
) -> tuple[Evaluation, list[Point]]:
    size = options.batch_size
    with as_typed(device="--device"):
        device = choose_device(options.device)
    settings: dict[str, Any] = {"batch_size": size, "device": device, "dtype": dtype, "crop": crop}
    with progress_bars() as begin:
        try:
            evaluation = evaluate(model, split, progress=begin("evaluating"), **settings)
            return evaluation, _robustness(model, split, options, evaluation, settings, begin)
        except torch.OutOfMemoryError:
            raise UsageError(
                f"`--batch-size` must be smaller than {size}: {device} is out of memory"
            ) from None


def _robustness(
    model: ImageClassifier,
    split: Split,
    options: Options,
    evaluation: Evaluation,
    settings: dict[str, Any],
    begin: Callable[[str], Progress],
) -> list[Point]:
    points: list[Point] = []
    if options.rotate:
        angles, listen = angles_up_to(options.rotate), begin("turned images")
        points.append(Point("rotation", 0, evaluation.accuracy))
        points += robustness(model, split, degrees=angles, progress=listen, **settings)
    if options.shift:
        shifts, listen = shifts_up_to(options.shift), begin("shifted images")
        points.append(Point("shift", 0, evaluation.accuracy))
        points += robustness(model, split, shifts=shifts, progress=listen, **settings)
    return points


def angles_up_to(largest: float) -> list[float]:
    """Four to six even steps, round numbers where there are any."""
    steps = next((count for count in (6, 5, 4) if largest % count == 0), 5)
    return [largest * step / steps for step in range(1, steps + 1)]


def shifts_up_to(largest: int) -> list[int]:
    """Every pixel up to 8; beyond, eight shifts about evenly spaced."""
    steps = min(8, largest)
    return [round(largest * step / steps) for step in range(1, steps + 1)]
