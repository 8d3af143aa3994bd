"""`capsroute eval`"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from capsroute.cli.data import report_skipped
from capsroute.cli.errors import UsageError, as_typed
from capsroute.cli.outputs import folder_to_write_to
from capsroute.cli.parsing import FLAGS, optional, parse
from capsroute.cli.progress import progress_bars
from capsroute.data import Dataset, MissingDataError, Split, list_datasets, load_dataset
from capsroute.data.mnist import find_idx
from capsroute.devices import choose_device
from capsroute.files import write_whole
from capsroute.models import model_info
from capsroute.models.base import ImageClassifier
from capsroute.models.pretrained import list_pretrained, pretrained_path
from capsroute.models.weights import load_model
from capsroute.nearest import nearest_path
from capsroute.progress import Progress
from capsroute.train.checkpoint import RunFolder
from capsroute.train.config import Config, DataConfig, load_config
from capsroute.train.evaluation import (
    NOTHING,
    Evaluation,
    Point,
    draw_confusion,
    draw_robustness,
    evaluate,
    finite,
    robustness,
)

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Options:
    """Measure a trained model: accuracy, each class, and what is taken for what.

    Writes confusion.png and evaluation.json into the run's folder. With --rotate or --shift it
    also measures how accuracy falls off when images turn or move, and draws robustness.png.

    For example `capsroute eval runs/fast_cifar10`,
    `capsroute eval runs/fast_cifar10 --rotate 30 --shift 6`,
    `capsroute eval model.safetensors --data ./my_images --out measured`,
    `capsroute eval --pretrained inverted_small_multimnist`.
    """

    run_or_checkpoint: Annotated[
        Path | None, tyro.conf.Positional, optional("RUN_OR_CHECKPOINT")
    ] = None
    """A run's folder, or a .safetensors file that capsroute wrote."""
    pretrained: Annotated[str | None, optional("NAME")] = None
    """A model whose weights ship with the package, instead; --iterations chooses among them."""
    data: Annotated[str | None, optional("NAME_OR_FOLDER")] = None
    """A dataset's name or a folder; what the run or the model was made for unless given."""
    data_root: Annotated[Path | None, optional("DIR")] = None
    """Where datasets are looked for; the run's, $CAPSROUTE_DATA or ~/.cache/capsroute."""
    split: Literal["test", "validation", "train"] = "test"
    """Which images. A fifth of a folder without a test part is held out for test."""
    strict: bool = False
    """A broken image file is an error, not skipped."""
    rotate: Annotated[float | None, optional("DEG")] = None
    """Measure a handful of angles up to this one too."""
    shift: Annotated[int | None, optional("PX")] = None
    """Measure shifts up to this many pixels too."""
    iterations: Annotated[int | None, optional("N")] = None
    """Routing iterations; the model's own unless given."""
    batch_size: Annotated[int, tyro.conf.arg(metavar="N")] = 500
    """Images at a time."""
    device: Annotated[str, tyro.conf.arg(metavar="DEVICE")] = "auto"
    """auto, cpu or cuda."""
    dtype: Annotated[Dtype | None, optional("{float32,bfloat16}")] = None
    """As the run was trained unless given; float32 for a checkpoint alone."""
    out: Annotated[Path | None, optional("DIR")] = None
    """Folder for the files; the run's, or the checkpoint's, or runs/NAME, unless given."""
    json: bool = False
    """Print evaluation.json instead of tables."""


def main(arguments: list[str]) -> None:
    options = parse(Options, "eval", arguments, config=FLAGS)
    _check(options)
    checkpoint, config = _source(options)
    model = _load_model(checkpoint, options.iterations)
    dataset, data = _load_data(options, config, model)
    crop = config.data.crop if config else None
    check_fit(model, dataset, crop)
    _check_shift(options.shift, model)
    split = _choose_split(dataset, options.split)
    beside = checkpoint.parent if options.pretrained is None else Path("runs") / checkpoint.stem
    out = folder_to_write_to(options.out or beside)
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
    report = about | as_dict(evaluation, names, points)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        _print_tables(report, evaluation, points)
    # the numbers are on the screen by now, should the folder not take the files
    written = _write(out, report, evaluation, names, points)
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


def _source(options: Options) -> tuple[Path, Config | None]:
    if (options.run_or_checkpoint is None) == (options.pretrained is None):
        raise UsageError(
            "expected either RUN_OR_CHECKPOINT or `--pretrained NAME` (see `capsroute eval --help`)"
        )
    if options.run_or_checkpoint is not None:
        return _find(options.run_or_checkpoint)
    assert options.pretrained is not None
    with as_typed(iterations="--iterations"):
        return pretrained_path(options.pretrained, options.iterations), None


def _find(path: Path) -> tuple[Path, Config | None]:
    """The weights, and the config of the run that they belong to, if any."""
    path = path.expanduser()
    if not path.exists():
        close = nearest_path(path)
        hint = f"; did you mean {str(close)!r}?" if close else ""
        if str(path) in list_pretrained():
            hint = f"; did you mean `--pretrained {path}`?"
        raise UsageError(f"{path}: no such run or checkpoint{hint}")
    folder = RunFolder(path if path.is_dir() else path.parent)
    checkpoint = folder.model if path.is_dir() else path
    if not checkpoint.is_file():
        raise UsageError(
            f"{path} holds no {checkpoint.name}; expected a run's folder (whose run has been "
            "evaluated once) or a .safetensors file"
        )
    of_a_run = checkpoint.name == folder.model.name and folder.config.is_file()
    return checkpoint, load_config(folder.config) if of_a_run else None


def _load_model(checkpoint: Path, iterations: int | None) -> ImageClassifier:
    changes = {} if iterations is None else {"iterations": iterations}
    with as_typed(path="RUN_OR_CHECKPOINT", iterations="--iterations"):
        return load_model(checkpoint, **changes)


def _load_data(
    options: Options, config: Config | None, model: ImageClassifier
) -> tuple[Dataset, str]:
    """The dataset, and what it was asked for by: the command line, else the run, else the model."""
    run = config.data if config else None
    name = options.data or (run.data if run else model_info(model.name).dataset)
    same = config is not None and run is not None and run.data == name
    try:
        dataset = load_dataset(
            name,
            root=options.data_root or (run.data_root if run else None),
            # a folder's images are brought to the model's size; other sets have one of their own
            image_size=_folder_size(model, run) if _is_image_folder(name) else None,
            strict=options.strict or (run is not None and run.strict),
            # those that training set aside, and no others
            validation=run.validation if same and run else 0.0,
            seed=config.seed if same and config else 0,
        )
    except MissingDataError as error:
        if options.data is None and run is not None:
            raise MissingDataError(f"{error} (the run's data; `--data` names another)") from error
        raise
    return dataset, name


def _folder_size(model: ImageClassifier, run: DataConfig | None) -> int | tuple[int, int] | None:
    return model.image_size if run is None or run.crop is None else run.image_size


def _is_image_folder(name: str) -> bool:
    if name in list_datasets():
        return False
    return find_idx(Path(name).expanduser(), "train-images-idx3-ubyte") is None


def check_fit(model: ImageClassifier, dataset: Dataset, crop: int | None = None) -> None:
    """Raise if the dataset, its images cropped, is not what the model was built for."""
    several = dataset.task == "multilabel"
    if model.task.multilabel != several:
        kinds = {True: "any number of classes", False: "one class"}
        raise _misfit(model, dataset, f"predicts {kinds[not several]} per image", kinds[several])
    theirs = len(dataset.class_names)
    if model.num_classes != theirs:
        raise _misfit(model, dataset, f"knows {model.num_classes} classes", str(theirs))
    if model.in_channels != dataset.channels:
        takes = f"takes images of {model.in_channels} channels"
        raise _misfit(model, dataset, takes, str(dataset.channels))
    size = dataset.image_size if crop is None else (crop, crop)
    if model.image_size != size:
        sizes = [f"{height}×{width}" for height, width in (model.image_size, size)]
        raise _misfit(model, dataset, f"takes images of {sizes[0]} pixels", sizes[1])
    _check_names(model, dataset)


def _misfit(model: ImageClassifier, dataset: Dataset, wants: str, has: str) -> UsageError:
    return UsageError(
        f"{model.name} {wants} and the dataset {dataset.name} has {has}; "
        "choose data that fits with `--data`"
    )


def _check_names(model: ImageClassifier, dataset: Dataset) -> None:
    """Classes of other names, or in another order, would be measured against each other."""
    ours, theirs = model.class_names, list(dataset.class_names)
    # idx files hold no names: the loader calls their classes 0 to 9
    if ours is None or all(name.isdigit() for name in theirs):
        return
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            raise _misfit(model, dataset, f"calls class {index} {mine!r}", repr(other))


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
        angles = angles_up_to(options.rotate)
        points.append(Point("rotation", 0, evaluation.accuracy))
        listen = begin("turned images")
        points += robustness(model, split, degrees=angles, progress=listen, **settings)
    if options.shift:
        shifts = shifts_up_to(options.shift)
        points.append(Point("shift", 0, evaluation.accuracy))
        listen = begin("shifted images")
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


def as_dict(evaluation: Evaluation, names: list[str], points: list[Point]) -> dict[str, Any]:
    """An evaluation as evaluation.json holds it."""
    return {
        "images": evaluation.images,
        "accuracy": evaluation.accuracy,
        "not_finite": evaluation.not_finite,
        "classes": [
            {"name": name, **row._asdict()}
            for name, row in zip(names, evaluation.classes, strict=True)
        ],
        "counts": [row._asdict() for row in evaluation.counts],
        "confusion": {
            "labels": [*names, NOTHING] if evaluation.multilabel else names,
            "rows_true_columns_predicted": evaluation.confusion,
        },
        "robustness": [point._asdict() for point in points],
    }


def _print_tables(report: dict[str, Any], evaluation: Evaluation, points: list[Point]) -> None:
    console = Console(highlight=False)
    iterations = report["iterations"]
    plural = "" if iterations == 1 else "s"
    routing = f", {iterations} routing iteration{plural}" if iterations else ""
    print(f"{report['model']}{routing}, on {evaluation.images:,} {report['split']} images")
    what = "every label of an image right" if evaluation.multilabel else "accuracy"
    print(f"{what}: {evaluation.accuracy:.2f} %")
    if evaluation.counts:
        table = _table("labels", "images", "accuracy %")
        for labels, images, accuracy in evaluation.counts:
            table.add_row(str(labels), f"{images:,}", f"{accuracy:.2f}")
        console.print(table)
    table = _table("class", "images", "recall %", "precision %")
    for row in report["classes"]:
        shares = [row["recall"], row["precision"]]
        cells = ["–" if share is None else f"{share:.2f}" for share in shares]
        table.add_row(row["name"].replace("[", r"\["), f"{row['support']:,}", *cells)
    console.print(table)
    for kind, heading in (("rotation", "rotated by °"), ("shift", "shifted by px")):
        chosen = [point for point in points if point.kind == kind]
        table = _table(heading, "accuracy %")
        for point in chosen:
            table.add_row(f"{point.value:g}", f"{point.accuracy:.2f}")
        if chosen:
            console.print(table)


def _table(first: str, *others: str) -> Table:
    table = Table(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def _write(
    out: Path,
    report: dict[str, Any],
    evaluation: Evaluation,
    names: list[str],
    points: list[Point],
) -> list[Path]:
    written = [out / "evaluation.json", out / "confusion.png"]
    write_whole(written[0], (json.dumps(report, indent=1) + "\n").encode())
    draw_confusion(evaluation, names, written[1])
    if points:
        written.append(out / "robustness.png")
        draw_robustness(points, written[-1])
    return written
