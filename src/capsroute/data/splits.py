"""A part of a dataset: what batches are made of, wherever its images live."""

from __future__ import annotations

import hashlib
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.utils.data
from torch import Tensor

from capsroute.data.augment import to_float
from capsroute.data.errors import DataError
from capsroute.data.rng import Purpose, check_seed, random_keys

Batch = tuple[Tensor, Tensor]
CPU = torch.device("cpu")


class Split(torch.utils.data.Dataset[Batch], ABC):
    """A part of a dataset: training, validation or test images with their targets.

    Also a PyTorch dataset, for use with `DataLoader`, `Subset` and `random_split`.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Batch:
        """An image as models take it, float `(C, H, W)` in [0, 1], and its target."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where `render` leaves its results."""

    @property
    @abstractmethod
    def resident(self) -> bool:
        """Whether the images live on `device` (or are generated there); else they stream."""

    @property
    @abstractmethod
    def generated(self) -> bool:
        """Whether `render` itself reads an image's random numbers; augmentation needs others."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Split:
        """The same split, for batches on `device`."""

    @abstractmethod
    def render(self, plan: Tensor) -> Batch:
        """uint8 images `(n, C, H, W)` and targets (int64 `(n,)` or float `(n, classes)`).

        `plan` is int64 `(n, 1 + draws)`: an image's index, then its random numbers. It lies on
        `device` when the split is resident, on the CPU otherwise.
        """


@dataclass(frozen=True, eq=False)
class ArraySplit(Split):
    """Images held whole: uint8 `(n, C, H, W)`, with int64 labels or float multi-hot targets.

    On a device too full to hold them, `to` leaves the images in host memory and `render` moves
    each batch.
    """

    images: Tensor
    targets: Tensor
    device: torch.device = CPU
    generated = False

    def __post_init__(self) -> None:
        if not isinstance(self.images, Tensor) or not isinstance(self.targets, Tensor):
            kinds = f"{type(self.images).__name__} and {type(self.targets).__name__}"
            raise TypeError(f"`images` and `targets` must be tensors, got {kinds}")
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise TypeError(
                f"`images` is {self.images.dtype} with shape {tuple(self.images.shape)}; "
                f"expected uint8 (n, channels, height, width)"
            )
        if len(self.images) != len(self.targets):
            raise ValueError(
                f"`targets` has {len(self.targets)} rows for {len(self.images)} images"
            )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        return render_one(self, torch.tensor([[row_of(self, index)]]))

    @property
    def resident(self) -> bool:
        return self.images.device == self.device

    def to(self, device: torch.device | str) -> ArraySplit:
        where = resolve_device(device)
        if not _fits(self.images, where):
            return replace(self, device=where)
        return ArraySplit(self.images.to(where), self.targets.to(where), where)

    def render(self, plan: Tensor) -> Batch:
        rows = plan[:, 0]
        images, targets = self.images.index_select(0, rows), self.targets.index_select(0, rows)
        return move(images, self.device), move(targets, self.device)

    def subset(self, rows: Tensor) -> ArraySplit:
        return replace(self, images=self.images[rows], targets=self.targets[rows])


def row_of(split: Split, index: int) -> int:
    """`index` counted from the start; an IndexError, which ends a loop, past either end."""
    row = operator.index(index)
    count = len(split)
    if not -count <= row < count:
        raise IndexError(f"`index` must be in [{-count}, {count}), got {row}")
    return row % count


def render_one(split: Split, plan: Tensor) -> Batch:
    """The image of a plan of one row, as floats, and its target."""
    images, targets = split.render(move(plan, split.device) if split.resident else plan)
    return to_float(images)[0], targets[0]


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Sorted positions that stay, and those held out: `fraction` of each class, to within one.

    One image at least of each class stays.
    """
    counts = _class_sizes(labels, fraction)
    keys = random_keys(seed, Purpose.SPLIT, 0, len(labels))
    # rounding the running sum makes the total right too
    quota = np.diff(np.rint(np.cumsum(counts) * fraction), prepend=0)
    return _first_of_each_class(labels, keys, quota, fraction)


def split_by_name(
    names: Sequence[str], labels: Tensor, fraction: float, seed: int
) -> tuple[Tensor, Tensor]:
    """As `stratified_split`, for images that come and go: a hash of its name places an image.

    One image more or fewer in a class moves at most one other of that class, and none elsewhere.
    So each class is rounded by itself, and one image is held out of any class that has two.
    """
    counts = _class_sizes(labels, fraction)
    keys = np.array([_key(name, seed) for name in names], dtype=np.uint64)
    quota = np.maximum(np.rint(counts * fraction), 1)
    return _first_of_each_class(labels, keys, quota, fraction)


def _key(name: str, seed: int) -> int:
    salt = check_seed(seed).to_bytes(8, "little")
    return int.from_bytes(
        hashlib.blake2b(os.fsencode(name), digest_size=8, key=salt).digest(), "little"
    )


def _class_sizes(labels: Tensor, fraction: float) -> np.ndarray:
    if not 0 < fraction < 1:
        raise ValueError(f"the fraction held out (={fraction}) must be between 0 and 1")
    return np.unique(labels.numpy(), return_counts=True)[1]


def _first_of_each_class(
    labels: Tensor, keys: np.ndarray, quota: np.ndarray, fraction: float
) -> tuple[Tensor, Tensor]:
    """Holds out the `quota` of each class whose keys come first; one image at least stays."""
    counts = _class_sizes(labels, fraction)
    by_class = np.lexsort((keys, labels.numpy()))
    place_in_class = np.concatenate([np.arange(count) for count in counts])
    held = np.zeros(len(labels), dtype=bool)
    held[by_class] = place_in_class < np.repeat(np.minimum(quota, counts - 1), counts)
    if not held.any():
        raise DataError(
            f"a share of {fraction:g} holds out none of the {len(labels)} images in "
            f"{len(counts)} classes; expected a larger share, or more images"
        )
    return torch.from_numpy(np.flatnonzero(~held)), torch.from_numpy(np.flatnonzero(held))


def resolve_device(device: torch.device | str) -> torch.device:
    """The device as tensors name it: `cuda` becomes `cuda:0`."""
    return torch.empty(0, device=device).device


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`, without waiting for a GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _fits(images: Tensor, device: torch.device) -> bool:
    """Whether the images take at most half of a GPU's free memory."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return images.nbytes <= free // 2
