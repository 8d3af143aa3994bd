"""Which images a folder holds, by their names; none is opened here."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from .decoding import why_unreadable
from .errors import DataError, MissingDataError

TEST_FOLDERS = ("test", "val")
# fmt: off
SUFFIXES = frozenset((
    ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff",
    ".pbm", ".pgm", ".ppm", ".pnm",
))
# fmt: on


class Skipped(NamedTuple):
    """A file or a folder that could not be read, and why."""

    path: Path
    reason: str


class ImageFile(NamedTuple):
    """A file that should be an image, and the class it lies in."""

    path: Path
    label: int


class Listing(NamedTuple):
    """Which images a folder holds, by their names: enough to tell that it has changed."""

    class_names: tuple[str, ...]
    images: int
    digest: str
    """Of the sorted paths below the folder."""


class FolderFiles(NamedTuple):
    """The image files of a folder, by part: `train`, and `test` or `val` where it has them."""

    root: Path
    train: Path
    """Where the classes of the training images are."""
    class_names: tuple[str, ...]
    parts: dict[str, list[ImageFile]]

    def name(self, file: ImageFile) -> str:
        """Its path below the folder."""
        return file.path.relative_to(self.root).as_posix()

    def listing(self) -> Listing:
        names = sorted(self.name(file) for files in self.parts.values() for file in files)
        digest = hashlib.sha256(b"\0".join(map(os.fsencode, names))).hexdigest()
        return Listing(self.class_names, len(names), digest)


def images_below(folder: Path) -> tuple[list[Path], list[Skipped]]:
    """Every image file in a folder and below it, sorted; and the folders that cannot be listed."""
    files: list[Path] = []
    closed: list[Skipped] = []

    def note(error: OSError) -> None:
        closed.append(Skipped(Path(error.filename), why_unreadable(error)))

    for where, _, names in os.walk(folder, onerror=note):
        files += [Path(where, name) for name in names if Path(name).suffix.lower() in SUFFIXES]
    return sorted(files), sorted(closed)


def find_images(folder: str | Path) -> FolderFiles:
    """The files of a folder, which must have two classes at least and images in each."""
    root = _existing_folder(Path(folder))
    layout = _layout(root)
    class_names = _class_names(layout["train"])
    parts = {part: _files(path, class_names) for part, path in layout.items()}
    return FolderFiles(root, layout["train"], class_names, parts)


def list_image_folder(folder: str | Path) -> Listing:
    """The images that `load_image_folder` would read."""
    return find_images(folder).listing()


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


def _files(folder: Path, class_names: tuple[str, ...]) -> list[ImageFile]:
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
        files += [ImageFile(file, class_names.index(path.name)) for file in images]
    return files


def _sub_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
