"""`capsroute data`"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from torch import Tensor

from capsroute.cli.errors import UsageError
from capsroute.cli.parsing import FLAGS, optional, parse
from capsroute.data import (
    Dataset,
    MissingDataError,
    TrainBatches,
    contact_sheet,
    default_root,
    download,
    list_datasets,
    load_dataset,
    verify,
)
from capsroute.data.cifar import find
from capsroute.data.download import IN_THE_PACKAGE, mnist_folder
from capsroute.data.download import Progress as Transferred
from capsroute.data.mnist import find_idx
from capsroute.files import write_whole
from capsroute.nearest import nearest

OVERVIEW = """\
usage: capsroute data COMMAND [OPTIONS]

List, show, download or verify datasets. A dataset is a name that `list` prints, or a folder: of
images, in one sub-folder per class, or of files in MNIST's idx format.

  list       List the datasets, and whether each is on this machine.
  show       Write some images of a dataset, with their labels, to one PNG.
  download   Download a dataset and check its digest; resumes after an interruption.
  verify     Check the files of a dataset against their published digests.

For example:
  capsroute data list
  capsroute data show diverse_multimnist --out digits.png
  capsroute data download cifar10 --root ~/data
  capsroute data verify cifar10 --root ~/data

`capsroute data COMMAND --help` explains a command. Datasets are looked for in --root, by default
$CAPSROUTE_DATA or ~/.cache/capsroute."""

MOST_SHOWN = 2500

Root = Annotated[Path | None, optional("DIR")]
Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(OVERVIEW)
        return
    name, *rest = arguments
    if name not in _COMMANDS:
        raise UsageError(f"no command `data {name}`{nearest(name, _COMMANDS)}")
    _COMMANDS[name](rest)


@dataclass(frozen=True)
class ShowOptions:
    """Write some images of a dataset, with their labels, to one PNG.

    For example `capsroute data show diverse_multimnist`,
    `capsroute data show ./my_images --split test --count 100 --out sheet.png`.
    """

    name: Name
    """A name that `capsroute data list` prints, or a folder."""
    count: int = 64
    """How many images to show."""
    out: Annotated[Path | None, optional("FILE.png")] = None
    """File to write. (default: <name>.png in this folder)"""
    split: Literal["train", "test"] = "train"
    """Which images to show."""
    seed: int = 0
    """Seed that picks the images."""
    root: Root = None
    """Where to look for datasets. (default: $CAPSROUTE_DATA or ~/.cache/capsroute)"""
    image_size: Annotated[int | None, optional("PX")] = None
    """Side to resize a folder's images to. (default: worked out from the images)"""
    strict: bool = False
    """Treat a broken image file as an error instead of skipping it."""


def _show(arguments: list[str]) -> None:
    options = parse(ShowOptions, "data show", arguments, config=FLAGS)
    if not 1 <= options.count <= MOST_SHOWN:
        raise UsageError(f"`--count` must be between 1 and {MOST_SHOWN}, got {options.count}")
    dataset = load_dataset(
        options.name, root=options.root, image_size=options.image_size, strict=options.strict
    )
    path = _sheet_path(options.out, dataset)
    split = dataset.train if options.split == "train" else dataset.test
    batches = TrainBatches(split, options.count, seed=options.seed)
    images, targets = batches.render(batches.plan(0))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, contact_sheet(images, captions(dataset, targets)))
    height, width = dataset.image_size
    print(
        f"{path}: {len(images)} {options.split} images of {dataset.name} "
        f"({height}×{width}×{dataset.channels}, {len(dataset.class_names)} classes)"
    )
    report_skipped(dataset)


def _sheet_path(out: Path | None, dataset: Dataset) -> Path:
    path = Path(f"{dataset.name}.png") if out is None else out
    if path.suffix.lower() != ".png" or path.is_dir():
        raise UsageError(f"`--out` must be the name of a file that ends in .png, got {path}")
    return path


def captions(dataset: Dataset, targets: Tensor) -> list[str]:
    """The class of each image, or its classes with " + " between them."""
    names = dataset.class_names
    if dataset.task == "multiclass":
        return [names[label] for label in targets.tolist()]
    return [
        " + ".join(name for name, present in zip(names, row, strict=True) if present)
        for row in targets.tolist()
    ]


def report_skipped(dataset: Dataset) -> None:
    """Name on stderr the files of a folder that could not be read, and count them."""
    for line in dataset.skipped_lines():
        print(line, file=sys.stderr)


@dataclass(frozen=True)
class DownloadOptions:
    """Download a dataset and check its digest; the same command resumes after an interruption.

    For example `capsroute data download cifar10 --root ~/data`.
    """

    name: Name
    """cifar10, cifar100 or fashion_mnist. MNIST is inside the package."""
    root: Root = None
    """Folder to put it in. (default: $CAPSROUTE_DATA or ~/.cache/capsroute)"""


def _download(arguments: list[str]) -> None:
    options = parse(DownloadOptions, "data download", arguments)
    console = Console()
    with _transfer_bar(console) if console.is_terminal else _transfer_lines() as progress:
        folder = download(options.name, _root(options.root), progress)
    print(f"{options.name} is in {folder}, its digests right")


@contextmanager
def _transfer_bar(console: Console) -> Iterator[Transferred]:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    tasks: dict[str, TaskID] = {}

    def show(file: str, done: int, total: int | None) -> None:
        if file not in tasks:
            tasks[file] = bar.add_task(file, total=total)
        bar.update(tasks[file], completed=done, total=total)

    with bar:
        yield show


@contextmanager
def _transfer_lines() -> Iterator[Transferred]:
    """A line for each tenth of a file, or for each 10 MB where its size is unknown."""
    last: dict[str, int] = {}

    def show(file: str, done: int, total: int | None) -> None:
        tenth = 10 * done // total if total else done // 10_000_000
        if last.get(file) != tenth:
            last[file] = tenth
            of = f" of {total / 1e6:.1f} MB ({100 * done / total:.0f} %)" if total else " MB"
            print(f"{file}: {done / 1e6:.1f}{of}", flush=True)

    yield show


@dataclass(frozen=True)
class VerifyOptions:
    """Check every file of a dataset against its published digest; exit status 1 if one is bad.

    For example `capsroute data verify cifar10 --root ~/data`.
    """

    name: Name
    """A name that `capsroute data list` prints."""
    root: Root = None
    """Folder that holds it. (default: $CAPSROUTE_DATA or ~/.cache/capsroute)"""


def _verify(arguments: list[str]) -> None:
    options = parse(VerifyOptions, "data verify", arguments)
    checks = verify(options.name, _root(options.root))
    for file, ok, detail in checks:
        print(f"{'ok ' if ok else 'BAD'}  {file}: {detail.removeprefix(f'{file}: ')}")
    bad = sum(not check.ok for check in checks)
    if bad:
        print(f"{options.name}: {bad} of {len(checks)} bad")
        sys.exit(1)
    print(f"{options.name}: all {len(checks)} files are right")


def _root(given: Path | None) -> Path:
    root = default_root() if given is None else given.expanduser()
    if root.exists() and not root.is_dir():
        raise UsageError(f"`--root` must be a folder, got {root}: it is a file")
    return root


@dataclass(frozen=True)
class ListOptions:
    """List the datasets, and whether each is on this machine.

    For example `capsroute data list --root ~/data`.
    """

    root: Root = None
    """Where to look for them. (default: $CAPSROUTE_DATA or ~/.cache/capsroute)"""


_COLUMNS = ("train", "test", "size", "classes")
_ABOUT = {
    "cifar10": ("50,000", "10,000", "32x32x3", "10"),
    "cifar100": ("50,000", "10,000", "32x32x3", "100"),
    "mnist": ("60,000", "10,000", "28x28x1", "10"),
    "fashion_mnist": ("60,000", "10,000", "28x28x1", "10"),
    "diverse_multimnist": ("generated", "10,000", "36x36x1", "1–2 of 10"),
}


def _list(arguments: list[str]) -> None:
    root = _root(parse(ListOptions, "data list", arguments).root)
    table = Table(title="datasets", title_justify="left")
    table.add_column("dataset", no_wrap=True)
    for heading in _COLUMNS:
        table.add_column(heading, justify="right")
    table.add_column("where")
    for name in list_datasets():
        table.add_row(name, *_ABOUT[name], _where(name, root))
    Console().print(table)
    print(
        f"Looked for in {root}.\n"
        "`capsroute data download NAME` fetches one that is missing.\n"
        "The path of a folder of images, one sub-folder for each class, is a dataset too."
    )


def _where(name: str, root: Path) -> str:
    if name in IN_THE_PACKAGE:
        return "package"
    if name == "fashion_mnist":
        folder = mnist_folder(root)
        here = find_idx(folder, "train-images-idx3-ubyte") is not None
        return folder.name if here else "missing"
    try:
        return find(name, root).path.name
    except MissingDataError:
        return "missing"


_COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "list": _list,
    "show": _show,
    "download": _download,
    "verify": _verify,
}
