"""One way to ask for data: by name, or by the path of a folder."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from capsroute.data import cifar
from capsroute.data.diverse_multimnist import CANVAS, EPOCH, TEST_SEED, DiverseMultiMNIST
from capsroute.data.download import mnist_folder
from capsroute.data.errors import DataError, MissingDataError
from capsroute.data.image_folder import ImageFolder, StoredSplit, load_image_folder
from capsroute.data.listing import Listing, Skipped
from capsroute.data.mnist import DigitArrays, find_idx, load_mnist
from capsroute.data.splits import ArraySplit, Split, split_by_name, stratified_split
from capsroute.nearest import nearest

Task = Literal["multiclass", "multilabel"]

DIGITS = tuple("0123456789")
FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
TEST_FRACTION = 0.2
"""Share of each class held out for test from a folder without a test part."""
VALIDATION_SEED = TEST_SEED + 1


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images for training, for validation (if any were set aside) and for testing."""

    name: str
    task: Task
    class_names: tuple[str, ...]
    image_size: tuple[int, int]
    """(height, width)"""
    channels: int
    train: Split
    validation: Split | None
    test: Split
    skipped: tuple[Skipped, ...] = ()
    """Files of a folder that could not be read."""
    listing: Listing | None = None
    """A folder's images by name; None where the data is no folder of images."""
    drawn: bool = False
    """Whether some of a folder's images were drawn, by their names, to be held out."""
    passed_over: tuple[Skipped, ...] = ()
    """Images that the folder holds besides: of other formats, or in no class's folder."""

    def skipped_lines(self, most: int = 20) -> list[str]:
        """The files that were skipped, at most so many by name; all that is left out, counted."""
        lines = [f"skipped {file.path}: {file.reason}" for file in self.skipped[:most]]
        unnamed = len(self.skipped) - most
        more = f", {unnamed} of them not named here" if unnamed > 0 else ""
        reasons = Counter([f"that could not be read{more}"] * len(self.skipped))
        reasons.update(file.reason for file in self.passed_over)
        counts = [f"{n} file{'s' * (n != 1)} {reason}" for reason, n in reasons.items()]
        return [*lines, f"left out {', '.join(counts)}"] if counts else lines


def list_datasets() -> tuple[str, ...]:
    """The names that `load_dataset` knows."""
    return tuple(_LOADERS)


def default_root() -> Path:
    """Where datasets are looked for: `$CAPSROUTE_DATA`, or `~/.cache/capsroute`."""
    chosen = os.environ.get("CAPSROUTE_DATA")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "capsroute"


def load_dataset(
    name_or_path: str | Path,
    *,
    root: str | Path | None = None,
    image_size: int | tuple[int, int] | None = None,
    strict: bool = False,
    validation: float = 0.0,
    seed: int = 0,
) -> Dataset:
    """Load a dataset by name (see `list_datasets()`) or from a folder.

    A folder holds images, in one sub-folder per class (see `image_folder`), or files in MNIST's
    idx format. `root` is where to look for `cifar10`, `cifar100` and `fashion_mnist`, by default
    `default_root()`; MNIST is inside the package.

    `validation` is the fraction of each class's training images to set aside, chosen by `seed`;
    training, validation and test images are disjoint. DiverseMultiMNIST sets aside that fraction
    of the training digits and generates validation images from them.

    `image_size` and `strict` apply to a folder of images: see `load_image_folder`. If the folder
    has no test part, a fifth of each class is held out for it, the same for every `seed`, so that
    no run trains on images that another is tested on. Images are held out of a folder by file
    name, so that the choice stays when other files come or go (`split_by_name`).
    """
    if not 0 <= validation < 1:
        raise ValueError(f"`validation` (={validation}) must be in [0, 1)")
    if isinstance(name_or_path, str) and name_or_path in _LOADERS:
        where = Path(root).expanduser() if root is not None else default_root()
        dataset = _LOADERS[name_or_path](where, validation, seed)
        _check_size(dataset, image_size)
        return dataset
    path = Path(name_or_path).expanduser()
    if not path.exists():
        raise _unknown(name_or_path)
    if find_idx(path, "train-images-idx3-ubyte"):
        dataset = _digits(path.resolve().name, load_mnist(path), DIGITS, validation, seed)
        _check_size(dataset, image_size)
        return dataset
    folder = load_image_folder(path, image_size=image_size, strict=strict)
    return _from_folder(path.resolve().name, folder, validation, seed)


def _cifar(name: str, root: Path, validation: float, seed: int) -> Dataset:
    arrays = cifar.load_cifar(name, root)
    return _from_arrays(name, cifar.CLASS_NAMES[name], arrays, validation, seed)


def _mnist(root: Path, validation: float, seed: int) -> Dataset:
    return _digits("mnist", load_mnist(), DIGITS, validation, seed)


def _fashion_mnist(root: Path, validation: float, seed: int) -> Dataset:
    try:
        arrays = load_mnist(mnist_folder(root))
    except MissingDataError as error:
        raise MissingDataError(
            f"{error}; get it with `capsroute data download fashion_mnist` "
            f"or from https://github.com/zalandoresearch/fashion-mnist"
        ) from error
    return _digits("fashion_mnist", arrays, FASHION, validation, seed)


def _diverse_multimnist(root: Path, validation: float, seed: int) -> Dataset:
    arrays = load_mnist()
    digits, labels = arrays.train_images, arrays.train_labels
    held_out = None
    if validation:
        stay, held = stratified_split(labels, validation, seed)
        source = DiverseMultiMNIST.from_digits(digits[held], labels[held])
        images, targets, _ = source.fixed_set(round(validation * EPOCH), VALIDATION_SEED)
        held_out = ArraySplit(images, targets)
        digits, labels = digits[stay], labels[stay]
    test_source = DiverseMultiMNIST.from_digits(arrays.test_images, arrays.test_labels)
    images, targets, _ = test_source.fixed_set()
    return Dataset(
        "diverse_multimnist",
        "multilabel",
        DIGITS,
        (CANVAS, CANVAS),
        1,
        DiverseMultiMNIST.from_digits(digits, labels),
        held_out,
        ArraySplit(images, targets),
    )


_LOADERS: dict[str, Callable[[Path, float, int], Dataset]] = {
    "cifar10": partial(_cifar, "cifar10"),
    "cifar100": partial(_cifar, "cifar100"),
    "mnist": _mnist,
    "fashion_mnist": _fashion_mnist,
    "diverse_multimnist": _diverse_multimnist,
}


def _digits(
    name: str, arrays: DigitArrays, class_names: tuple[str, ...], validation: float, seed: int
) -> Dataset:
    """Grey images without a channel axis."""
    train, train_labels, test, test_labels = arrays
    with_channel = (train[:, None], train_labels, test[:, None], test_labels)
    return _from_arrays(name, class_names, with_channel, validation, seed)


def _from_arrays(
    name: str,
    class_names: tuple[str, ...],
    arrays: tuple[Tensor, Tensor, Tensor, Tensor],
    validation: float,
    seed: int,
) -> Dataset:
    images, labels, test_images, test_labels = arrays
    train, held_out = ArraySplit(images, labels), None
    if validation:
        stay, held = stratified_split(labels, validation, seed)
        train, held_out = train.subset(stay), train.subset(held)
    test = ArraySplit(test_images, test_labels)
    channels, height, width = images.shape[1:]
    return Dataset(
        name, "multiclass", class_names, (height, width), channels, train, held_out, test
    )


def _from_folder(name: str, folder: ImageFolder, validation: float, seed: int) -> Dataset:
    train, test, held_out = folder.train, folder.test, folder.validation
    names, drawn = folder.train_names, False
    if test is None:
        train, names, test = _set_aside(train, names, TEST_FRACTION, seed=0)
        drawn = True
    if held_out is None and validation:
        train, names, held_out = _set_aside(train, names, validation, seed)
        drawn = True
    return Dataset(
        name,
        "multiclass",
        folder.class_names,
        folder.image_size,
        folder.channels,
        train,
        held_out,
        test,
        folder.skipped,
        folder.listing,
        drawn,
        folder.passed_over,
    )


def _set_aside(
    split: StoredSplit, names: tuple[str, ...], fraction: float, seed: int
) -> tuple[StoredSplit, tuple[str, ...], StoredSplit]:
    """What stays, its names, and what is held out."""
    stay, held = split_by_name(names, split.targets, fraction, seed)
    return split.subset(stay), tuple(names[row] for row in stay.tolist()), split.subset(held)


def _check_size(dataset: Dataset, image_size: int | tuple[int, int] | None) -> None:
    asked = (image_size, image_size) if isinstance(image_size, int) else image_size
    if asked is not None and asked != dataset.image_size:
        height, width = dataset.image_size
        raise ValueError(
            f"`image_size` (={image_size}): {dataset.name} has {height}×{width} images; "
            f"a size can be chosen for a folder of images only"
        )


def _unknown(name: str | Path) -> DataError:
    if isinstance(name, Path) or os.sep in name or name.startswith((".", "~")):
        return MissingDataError(f"{name}: no such folder")
    return DataError(
        f"no dataset and no folder of images is called `{name}`{nearest(name, _LOADERS)}"
    )
