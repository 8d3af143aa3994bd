"""A folder of images, one sub-folder per class.

    folder/cat/*.png, folder/dog/*.jpg                  the caller splits it
    folder/train/cat/…, folder/test/cat/…               `val` instead of `test`, or both;
                                                        also Train, Test, valid, Validation

Images may differ in size, mode and format. All are brought to one size, scaled to cover it and
cropped at the centre, and to one channel (when every image is grey) or three. Transparent
images are laid on white, 16-bit ones scaled to 8, EXIF rotations applied; of several frames the
first counts.

Every file is decoded once when the folder is read, which finds the broken ones. The pixels are
kept when they fit in `memory_limit` bytes; otherwise each batch is decoded on demand.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from capsroute.data.decoding import GREY_MODES, decode, open_image, why_unreadable
from capsroute.data.errors import DataError
from capsroute.data.listing import ImageFile, Listing, Skipped, find_images
from capsroute.data.splits import (
    CPU,
    ArraySplit,
    Batch,
    Split,
    move,
    render_one,
    resolve_device,
    row_of,
)

LARGEST_INFERRED = 64
"""The side that images are brought to when they are larger and no size was asked for."""
MEMORY_LIMIT = 2 << 30

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class FolderSplit(Split):
    """Images decoded when a batch asks for them. See `ArraySplit` for those held in memory."""

    paths: tuple[Path, ...]
    targets: Tensor
    image_size: tuple[int, int]
    channels: int
    device: torch.device = CPU
    resident = generated = False

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Batch:
        return render_one(self, torch.tensor([[row_of(self, index)]]))

    def to(self, device: torch.device | str) -> FolderSplit:
        return replace(self, device=resolve_device(device))

    def render(self, plan: Tensor) -> Batch:
        rows = plan[:, 0]
        images = np.stack([self._decode(row) for row in rows.tolist()])
        return move(torch.from_numpy(images), self.device), move(self.targets[rows], self.device)

    def subset(self, rows: Tensor) -> FolderSplit:
        paths = tuple(self.paths[row] for row in rows.tolist())
        return replace(self, paths=paths, targets=self.targets[rows])

    def _decode(self, row: int) -> np.ndarray:
        try:
            return decode(self.paths[row], self.image_size, self.channels)
        except Exception as error:
            raise DataError(
                f"{self.paths[row]} could be read at first and no longer can ({error})"
            ) from error


StoredSplit = ArraySplit | FolderSplit


class ImageFolder(NamedTuple):
    """What a folder holds. `test` and `validation` are None where it has no such part."""

    class_names: tuple[str, ...]
    image_size: tuple[int, int]
    channels: int
    train: StoredSplit
    validation: StoredSplit | None
    test: StoredSplit | None
    skipped: tuple[Skipped, ...]
    train_names: tuple[str, ...]
    """Of the training images: their paths below the folder."""
    listing: Listing
    passed_over: tuple[Skipped, ...]
    """Images of other formats, and those in no class's folder."""


def load_image_folder(
    folder: str | Path,
    *,
    image_size: int | tuple[int, int] | None = None,
    strict: bool = False,
    memory_limit: int = MEMORY_LIMIT,
) -> ImageFolder:
    """Read a folder of images (see the module's docstring).

    `image_size` is (height, width) or the side of a square. By default it is the images' own
    size, when they share one no larger than 64×64, and otherwise a square as large as the median
    of their shorter sides, 64 at most. `strict` makes a broken file an error; otherwise it is
    left out and listed in `skipped`.
    """
    found = find_images(folder)
    class_names, parts = found.class_names, found.parts
    headers, skipped = _read_headers([file for files in parts.values() for file in files])
    size = _size(image_size, [header.size for header in headers.values()])
    channels = 1 if all(header.grey for header in headers.values()) else 3
    pixels = sum(map(len, parts.values())) * channels * size[0] * size[1]
    splits = {}
    for part, files in parts.items():
        readable = [file for file in files if file.path in headers]
        splits[part], broken = _read_part(readable, size, channels, keep=pixels <= memory_limit)
        skipped += broken
    if strict and skipped:
        raise DataError(
            f"{skipped[0].path}: {skipped[0].reason} ({len(skipped)} broken in all; `strict`)"
        )
    _check_every_class(splits["train"], class_names, found.train)
    broken_files = {file.path for file in skipped}
    trained_on = [file for file in parts["train"] if file.path not in broken_files]
    return ImageFolder(
        class_names,
        size,
        channels,
        splits["train"],
        splits.get("val") if "test" in splits else None,
        splits.get("test", splits.get("val")),
        tuple(skipped),
        tuple(found.name(file) for file in trained_on),
        found.listing(),
        tuple(found.passed_over),
    )


class _Header(NamedTuple):
    size: tuple[int, int]
    """(height, width)"""
    grey: bool


def _read_header(path: Path) -> _Header:
    with open_image(path) as image:
        return _Header((image.height, image.width), image.mode in GREY_MODES)


def _read_headers(files: Sequence[ImageFile]) -> tuple[dict[Path, _Header], list[Skipped]]:
    headers, skipped = {}, []
    for file, result in _try_each(lambda file: _read_header(file.path), files):
        if isinstance(result, Skipped):
            skipped.append(result)
        else:
            headers[file.path] = result
    if not headers:
        raise DataError(f"{skipped[0].path}: {skipped[0].reason} (as is every other image)")
    return headers, skipped


def _read_part(
    files: Sequence[ImageFile], size: tuple[int, int], channels: int, *, keep: bool
) -> tuple[StoredSplit, list[Skipped]]:
    """Decode every file; the split of those that could be, and the others."""

    def read(file: ImageFile) -> np.ndarray | None:
        pixels = decode(file.path, size, channels)
        return pixels if keep else None

    good: list[ImageFile] = []
    images: list[np.ndarray] = []
    skipped: list[Skipped] = []
    for file, result in _try_each(read, files):
        if isinstance(result, Skipped):
            skipped.append(result)
            continue
        good.append(file)
        if result is not None:
            images.append(result)
    targets = torch.tensor([file.label for file in good], dtype=torch.int64)
    if keep:
        shape = (0, channels, *size)
        stacked = np.stack(images) if images else np.empty(shape, dtype=np.uint8)
        return ArraySplit(torch.from_numpy(stacked), targets), skipped
    return FolderSplit(tuple(file.path for file in good), targets, size, channels), skipped


def _try_each(
    function: Callable[[ImageFile], T], files: Sequence[ImageFile]
) -> Iterator[tuple[ImageFile, T | Skipped]]:
    """`function` of each file, in threads (Pillow decodes outside Python's lock)."""

    def attempt(file: ImageFile) -> T | Skipped:
        try:
            return function(file)
        except Exception as error:  # Pillow's decoders raise nearly anything on a broken file
            return Skipped(file.path, why_unreadable(error))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        yield from zip(files, pool.map(attempt, files), strict=True)


def _size(asked: int | tuple[int, int] | None, sizes: list[tuple[int, int]]) -> tuple[int, int]:
    if asked is not None:
        height, width = (asked, asked) if isinstance(asked, int) else asked
        if height < 1 or width < 1:
            raise ValueError(f"`image_size` (={asked}) must be positive")
        return height, width
    if len(set(sizes)) == 1 and max(sizes[0]) <= LARGEST_INFERRED:
        return sizes[0]
    side = min(int(statistics.median(min(size) for size in sizes)), LARGEST_INFERRED)
    return side, side


def _check_every_class(split: StoredSplit, class_names: tuple[str, ...], folder: Path) -> None:
    counts = torch.bincount(split.targets, minlength=len(class_names))
    for name, count in zip(class_names, counts.tolist(), strict=True):
        if count == 0:
            raise DataError(f"{folder / name}: no image in it can be read")
