"""`capsroute train`"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from capsroute.cli import to_type
from capsroute.cli.errors import UsageError, as_typed
from capsroute.cli.own_images import (
    OWN_IMAGES,
    as_begun,
    folder_name,
    is_folder,
    length_in_words,
    what_was_found,
)
from capsroute.cli.parsing import as_options, optional, parse
from capsroute.cli.progress import make_reporter, notes_to
from capsroute.data import Dataset, list_datasets
from capsroute.devices import choose_device
from capsroute.experiments import DEFAULT, list_presets, preset
from capsroute.experiments.presets import MOST_EPOCHS, from_trained_weights, limit_epochs
from capsroute.models.base import CapsuleClassifier
from capsroute.models.registry import model_info
from capsroute.nearest import nearest
from capsroute.train.build import Runtime, load_data, model_to_start_from
from capsroute.train.checkpoint import RunFolder
from capsroute.train.config import Config
from capsroute.train.data_record import check_listing
from capsroute.train.engine import DivergedError, train
from capsroute.train.interruption import Interrupted

TAKES_BACKBONE = "inverted_resnet_cifar10"  # the model for `--backbone NAME`

FIRST_PRESETS = (
    DEFAULT,
    OWN_IMAGES,
    "inverted_resnet_cifar10_r2",
    "inverted_simple_cifar10_r2",
    "fast_cifar10",
)


@dataclass(frozen=True)
class Options:
    """Options of `capsroute train`; the defaults shown are those of the preset."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    runtime: Annotated[Runtime, tyro.conf.arg(name="")] = field(default_factory=Runtime)
    out: Annotated[Path | None, optional("PATH")] = None
    """Folder of the run; the same command resumes it. (default: runs/<experiment>)"""


def main(arguments: list[str]) -> None:
    if "--list" in arguments:
        print("\n".join(["Presets:", *_preset_lines(list_presets())]))
        return
    with as_options(Options):
        _train(arguments)


def _train(arguments: list[str]) -> None:
    name, rest = _preset_name(arguments)
    options = _parse(name, rest)
    device = choose_device(options.runtime.device).type
    config = _named(_with_model(_with_folder(options.config), rest), name)
    out = options.out or Path("runs") / config.experiment
    length_open = name == OWN_IMAGES and not (_given("--steps", rest) or _given("--epochs", rest))
    evaluations_open = not _given("--eval-every", rest)
    begun = as_begun(config, out, evaluations_open=evaluations_open) if length_open else None
    config = begun or config
    if "RANK" not in os.environ and RunFolder(out).summary.exists():
        _tell_finished(config, RunFolder(out))
        return
    with as_typed(name="--model"):
        model_info(config.model.model)  # told before all images are read, if there is none
    reporter = make_reporter()
    first = int(os.environ.get("RANK", "0")) == 0
    try:
        with reporter, notes_to(reporter):
            dataset = None
            if is_folder(config.data.data):
                dataset = load_data(config, reporter)
                if length_open and begun is None:
                    images = len(dataset.train)
                    config = limit_epochs(config, images, evaluations_open=evaluations_open)
                for line in _plan(config, dataset, device, name, length_open):
                    reporter.message(line)
            summary = train(config, out, options.runtime, reporter, dataset)
    except Interrupted as stop:
        if first:
            print(f"{stop}; {_how_to_go_on(out, arguments)}", file=sys.stderr)
        sys.exit(128 + stop.signum)
    except DivergedError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except torch.OutOfMemoryError:
        raise UsageError(
            f"out of memory with `--batch-size` {config.batch_size}: try a smaller one, or "
            "`--accumulate 2`, which takes a batch in pieces"
        ) from None
    if summary:  # the first process's
        _print_summary(summary, out)
        print(_next_commands(config, out))


def _plan(
    config: Config, dataset: Dataset, device: str, recipe: str, length_open: bool
) -> tuple[str, str]:
    """What was found in a folder and what becomes of it, before it begins."""
    found = f"{what_was_found(dataset)}: {config.model.model} on {device}, recipe {recipe}"
    limited = length_open and config.steps is None
    why = ": no more for few images, unless `--steps` or `--epochs` is given" if limited else ""
    return found, length_in_words(config, len(dataset.train)) + why


def _tell_finished(config: Config, folder: RunFolder) -> None:
    folder.check(config)
    check_listing(folder, config.data.data)
    summary = folder.read_summary()
    print(
        f"already finished in {folder.path}: test {summary['test_accuracy_last']:.2f} % after "
        f"{summary['steps']:,} steps; nothing was trained (`--out FOLDER` begins another run)"
    )
    print(_next_commands(config, folder.path))


def _next_commands(config: Config, out: Path) -> str:
    commands = ["predict"]
    routed = issubclass(model_info(config.model.model).family, CapsuleClassifier)
    if routed and config.model.windows != "mixed":  # whose capsules have no place in the image
        commands.append("explain")
    return "\n".join(["next:", *(f"  {to_type(command, out, 'IMAGE')}" for command in commands)])


def _how_to_go_on(out: Path, arguments: list[str]) -> str:
    same = "the same torchrun command" if "RANK" in os.environ else to_type("train", *arguments)
    if RunFolder(out).state.exists():
        return f"a checkpoint is in {out}. Resume with {same}"
    return f"there was nothing to save. Begin again with {same}"


def _preset_name(arguments: list[str]) -> tuple[str, list[str]]:
    if arguments and not arguments[0].startswith("-"):
        if arguments[0] not in list_presets():
            hint = nearest(arguments[0], list_presets())
            if Path(arguments[0]).is_dir():
                hint = (
                    f"; for the images in that folder: {to_type('train', '--data', arguments[0])}"
                )
            raise UsageError(f"no preset {arguments[0]!r}{hint}")
        return arguments[0], arguments[1:]
    return (OWN_IMAGES if _folder_given(arguments) else DEFAULT), arguments


def _given(option: str, arguments: list[str]) -> bool:
    return any(argument.split("=")[0].replace("_", "-") == option for argument in arguments)


def _values(option: str, arguments: list[str]) -> list[str]:
    """What follows an option, as `--data pets` or `--data=pets`."""
    given = [value for before, value in pairwise(arguments) if before == option]
    return given + [a.removeprefix(f"{option}=") for a in arguments if a.startswith(f"{option}=")]


def _folder_given(arguments: list[str]) -> bool:
    """Whether `--data` names a folder of images rather than a dataset."""
    return any(map(is_folder, _values("--data", arguments)))


def _with_folder(config: Config) -> Config:
    """`images` and `images/` are written alike; `./mnist` stays, as no dataset's name."""
    folder = str(Path(config.data.data))
    if folder in list_datasets():
        return config
    return replace(config, data=replace(config.data, data=folder))


def _with_model(config: Config, arguments: list[str]) -> Config:
    """The model whose weights the user wants to start from, or that takes the backbone named."""
    start = config.model.pretrained
    if _given("--model", arguments) or (start is None and config.model.backbone is None):
        return config
    model = TAKES_BACKBONE
    if start not in (None, "timm"):
        model = model_to_start_from(start, config.model.iterations)
    return replace(config, model=replace(config.model, model=model))


def _parse(name: str, arguments: list[str]) -> Options:
    config = preset(name).config
    if _given("--epochs", arguments):
        if _given("--steps", arguments):
            raise UsageError("`--epochs` and `--steps` both give the length of the run: choose one")
        config = replace(config, steps=None)  # the preset's
    if name == OWN_IMAGES and _from_trained_weights(arguments):
        config = from_trained_weights(config)
    try:
        return parse(
            Options,
            "train",
            arguments,
            default=Options(config),
            description=_description(name),
            config=(tyro.conf.OmitArgPrefixes,),
        )
    except UsageError as error:
        if _given("--preset", arguments):
            raise UsageError(_instead_of_preset_option(arguments)) from None
        if late := [argument for argument in arguments if argument in list_presets()]:
            raise UsageError(f"{error}; a preset comes first: capsroute train {late[0]}") from None
        raise


def _from_trained_weights(arguments: list[str]) -> bool:
    """Of the capsules, too: a backbone of timm has none."""
    return any(start != "timm" for start in _values("--pretrained", arguments))


def _instead_of_preset_option(arguments: list[str]) -> str:
    presets = list_presets()
    told = "a preset comes first, without `--preset`: capsroute train "
    name = next(iter(_values("--preset", arguments)), "-")
    if name in presets:
        return told + name
    if name.startswith("-"):  # another option, or nothing
        return f"{told}PRESET; `capsroute train --list` shows all {len(presets)}"
    return f"{told}PRESET; no preset {name!r}{nearest(name, presets)}"


def _named(config: Config, name: str) -> Config:
    """Another model or other data make another experiment, unless the user named it."""
    planned = preset(name).config
    same_model = config.model.model == planned.model.model
    same = same_model and config.data.data == planned.data.data
    if same or config.experiment != planned.experiment:
        return config
    data = folder_name(config.data.data)
    if name == OWN_IMAGES:
        parts = [data, "" if same_model else config.model.model]
        parts.append("pretrained" if config.model.pretrained else "")
        return replace(config, experiment="_".join(filter(None, parts)))
    return replace(config, experiment=f"{config.model.model}_{data}")


def _description(name: str) -> str:
    presets = "\n".join(_preset_lines(FIRST_PRESETS))
    return f"""\
Train a model. A run lives in its folder: the same command resumes it, on a CPU bit for bit.

Examples:
  capsroute train
  capsroute train --steps 500 --out runs/short
  capsroute train inverted_resnet_cifar10_r2 --seed 1 --data-root ~/data
  capsroute train --data ./my_images
  capsroute train --data ./my_images --pretrained inverted_small_multimnist
  torchrun --nproc-per-node 2 -m capsroute train

A run on a folder of images is named after it and takes at most {MOST_EPOCHS} epochs unless \
`--steps` or `--epochs` is given.

Presets, given as the first argument (`capsroute train --list` shows all {len(list_presets())}):
{presets}

The defaults below are those of {name}."""


def _preset_lines(names: Sequence[str]) -> list[str]:
    width = max(map(len, names))
    return [f"  {name:<{width}}  {preset(name).summary}" for name in names]


def _print_summary(summary: dict[str, object], out: Path) -> None:
    table = Table(title=escape(str(out)), title_justify="left", show_header=False)
    for key in ("experiment", "params", "steps", "test_accuracy_last", "test_accuracy_best"):
        value = summary[key]
        table.add_row(key, f"{value:.2f} %" if isinstance(value, float) else escape(f"{value}"))
    table.add_row("train_seconds", f"{summary['train_seconds']:.1f}")
    Console().print(table)
