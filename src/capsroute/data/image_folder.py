"""A folder of images, one sub-folder per class.

    folder/cat/*.png, folder/dog/*.jpg                  the caller splits it
    folder/train/cat/…, folder/test/cat/…               `val` instead of `test`, or both

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
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from .errors import DataError, MissingDataError
from .splits import CPU, ArraySplit, Batch, move, render_one, resolve_device, row_of

LARGEST_INFERRED = 64
"""The side that images are brought to when they are larger and no size was asked for."""
MEMORY_LIMIT = 2 << 30

GREY_MODES = {"1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N"}
TEST_FOLDERS = ("test", "val")

# named, because Pillow would hand some other formats to external programs
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
# fmt: off
SUFFIXES = frozenset((
    ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff",
    ".pbm", ".pgm", ".ppm", ".pnm",
))
# fmt: on

T = TypeVar("T")


class Skipped(NamedTuple):
    """A file or a folder that could not be read, and why."""

    path: Path
    reason: str


def open_image(file: Path | BinaryIO) -> Image.Image:
    """A picture of a format that is read here; no pixel is decoded yet."""
    return Image.open(file, formats=FORMATS)


def why_unreadable(error: Exception) -> str:
    """What opening or decoding a picture raised, in one line that does not repeat its name."""
    match error:
        case FileNotFoundError():
            return "no such file"
        case IsADirectoryError():
            return "a folder, not an image"
        case PermissionError():
            return "no permission to read it"
        case UnidentifiedImageError():
            return f"not an image of a kind that is read here ({', '.join(FORMATS)})"
        case Image.DecompressionBombError():
            return f"too many pixels; at most {2 * (Image.MAX_IMAGE_PIXELS or 0):,} are read"
    return " ".join(str(error).split()) or type(error).__name__


def images_below(folder: Path) -> tuple[list[Path], list[Skipped]]:
    """Every image file in a folder and below it, sorted; and the folders that cannot be listed."""
    files: list[Path] = []
    closed: list[Skipped] = []

    def note(error: OSError) -> None:
        closed.append(Skipped(Path(error.filename), why_unreadable(error)))

    for where, _, names in os.walk(folder, onerror=note):
        files += [Path(where, name) for name in names if Path(name).suffix.lower() in SUFFIXES]
    return sorted(files), sorted(closed)


@dataclass(frozen=True, eq=False)
class FolderSplit:
    """Images decoded when a batch asks for them. See `ArraySplit` for those held in memory."""

    paths: tuple[Path, ...]
    targets: Tensor
    image_size: tuple[int, int]
    channels: int
    device: torch.device = CPU

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Batch:
        return render_one(self, torch.tensor([[row_of(self, index)]]))

    @property
    def resident(self) -> bool:
        return False

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


class _File(NamedTuple):
    path: Path
    label: int


def load_image_folder(
    folder: str | Path,
    *,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    strict: bool = False,
    memory_limit: int = MEMORY_LIMIT,
) -> ImageFolder:
    """Read a folder of images (see the module's docstring).

    `image_size` is (height, width) or the side of a square. By default it is the images' own
    size, when they share one no larger than 64×64, and otherwise a square as large as the median
    of their shorter sides, 64 at most. `strict` makes a broken file an error; otherwise it is
    left out and listed in `skipped`.
    """
    root = _existing_folder(Path(folder))
    if channels not in (None, 1, 3):
        raise ValueError(f"`channels` (={channels}) must be 1 or 3")
    layout = _layout(root)
    class_names = _class_names(layout["train"])
    parts = {part: _files(path, class_names) for part, path in layout.items()}
    headers, skipped = _read_headers([file for files in parts.values() for file in files])
    size = _size(image_size, [header.size for header in headers.values()])
    depth = channels or (1 if all(header.grey for header in headers.values()) else 3)
    pixels = sum(map(len, parts.values())) * depth * size[0] * size[1]
    splits = {}
    for part, files in parts.items():
        readable = [file for file in files if file.path in headers]
        splits[part], broken = _read_part(readable, size, depth, keep=pixels <= memory_limit)
        skipped += broken
    if strict and skipped:
        raise DataError(
            f"{skipped[0].path}: {skipped[0].reason} ({len(skipped)} broken in all; `strict`)"
        )
    _check_every_class(splits["train"], class_names, layout["train"])
    return ImageFolder(
        class_names,
        size,
        depth,
        splits["train"],
        splits.get("val") if "test" in splits else None,
        splits.get("test", splits.get("val")),
        tuple(skipped),
    )


def decode(path: Path, image_size: tuple[int, int], channels: int) -> np.ndarray:
    """The image as uint8 `(channels, height, width)`."""
    height, width = image_size
    with open_image(path) as file:
        # lets a JPEG decode at a fraction of its size, still no smaller than what is needed
        file.draft(None, (2 * max(image_size), 2 * max(image_size)))
        image = ImageOps.exif_transpose(file)
        image = ImageOps.fit(
            to_mode(image, "L" if channels == 1 else "RGB"),
            (width, height),
            Image.Resampling.BILINEAR,
        )
    array = np.asarray(image, dtype=np.uint8).reshape(height, width, channels)
    return np.ascontiguousarray(array.transpose(2, 0, 1))


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == "F":
        raise ValueError("floating-point pixels; expected 8 or 16 bits")
    if image.mode.startswith("I"):
        # Pillow's own conversion clips 16 bits at 255
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert(mode)


class _Header(NamedTuple):
    size: tuple[int, int]
    """(height, width)"""
    grey: bool


def _read_header(path: Path) -> _Header:
    with open_image(path) as image:
        return _Header((image.height, image.width), image.mode in GREY_MODES)


def _read_headers(files: Sequence[_File]) -> tuple[dict[Path, _Header], list[Skipped]]:
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
    files: Sequence[_File], size: tuple[int, int], channels: int, *, keep: bool
) -> tuple[StoredSplit, list[Skipped]]:
    """Decode every file; the split of those that could be, and the others."""

    def read(file: _File) -> np.ndarray | None:
        pixels = decode(file.path, size, channels)
        return pixels if keep else None

    good: list[_File] = []
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
    function: Callable[[_File], T], files: Sequence[_File]
) -> Iterator[tuple[_File, T | Skipped]]:
    """`function` of each file, in threads (Pillow decodes outside Python's lock)."""

    def attempt(file: _File) -> T | Skipped:
        try:
            return function(file)
        except Exception as error:  # Pillow's decoders raise nearly anything on a broken file
            return Skipped(file.path, why_unreadable(error))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        yield from zip(files, pool.map(attempt, files), strict=True)


def _existing_folder(path: Path) -> Path:
    if path.is_file():
        raise DataError(f"{path} is a file; expected a folder with one sub-folder per class")
    if not path.is_dir():
        raise MissingDataError(f"{path}: no such folder; expected one with a sub-folder a class")
    return path


def _layout(root: Path) -> dict[str, Path]:
    """The folders of classes, by part. A `train` that holds no folder is a class of its own."""
    if not any(_sub_folders(root / "train")):
        return {"train": root}
    present = [part for part in ("train", *TEST_FOLDERS) if (root / part).is_dir()]
    return {part: root / part for part in present}


def _class_names(folder: Path) -> tuple[str, ...]:
    names = tuple(path.name for path in _sub_folders(folder))
    if len(names) < 2:
        found = f"one class only, `{names[0]}`" if names else "no sub-folders"
        raise DataError(f"{folder}: {found}; expected two classes at least, one sub-folder each")
    return names


def _files(folder: Path, class_names: tuple[str, ...]) -> list[_File]:
    files = []
    for path in _sub_folders(folder):
        if path.name not in class_names:
            raise DataError(
                f"{path}: class `{path.name}` has no training folder; "
                f"expected one of {', '.join(class_names)}"
            )
        images, closed = images_below(path)
        if closed:
            raise DataError(f"{closed[0].path}: {closed[0].reason}; expected a folder of images")
        if not images:
            raise DataError(
                f"{path}: empty class folder; expected images ({' '.join(sorted(SUFFIXES))})"
            )
        files += [_File(file, class_names.index(path.name)) for file in images]
    return files


def _sub_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


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
