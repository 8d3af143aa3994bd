"""Which images a folder holds, by their names; none is opened here."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from capsroute.data.decoding import why_unreadable
from capsroute.data.errors import DataError, MissingDataError

PARTS = {"train": "train", "test": "test", "val": "val", "valid": "val", "validation": "val"}
"""Names of the folders of parts, in small letters, and the part that each is."""
# fmt: off
SUFFIXES = frozenset((
    ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff",
    ".pbm", ".pgm", ".ppm", ".pnm",
))
UNREAD_SUFFIXES = frozenset((
    ".avif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".jxl", ".psd", ".svg", ".tga",
    ".arw", ".cr2", ".cr3", ".dng", ".nef", ".raf", ".rw2",
))
"""Of images that are passed over as other files are, but counted."""
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
    passed_over: list[Skipped]
    """Images that belong to no class, or whose format is not read."""

    def name(self, file: ImageFile) -> str:
        """Its path below the folder."""
        return file.path.relative_to(self.root).as_posix()

    def listing(self) -> Listing:
        names = sorted(self.name(file) for files in self.parts.values() for file in files)
        digest = hashlib.sha256(b"\0".join(map(os.fsencode, names))).hexdigest()
        return Listing(self.class_names, len(names), digest)


def images_below(folder: Path) -> tuple[list[Path], list[Skipped]]:
    """Every image file in a folder and below it, sorted; and the folders that cannot be listed."""
    files, closed = _files_below(folder)
    return [file for file in files if _suffix(file) in SUFFIXES], closed


def _files_below(folder: Path) -> tuple[list[Path], list[Skipped]]:
    files: list[Path] = []
    closed: list[Skipped] = []

    def note(error: OSError) -> None:
        closed.append(Skipped(Path(error.filename), why_unreadable(error)))

    for where, _, names in os.walk(folder, onerror=note):
        files += [Path(where, name) for name in names]
    return sorted(files), sorted(closed)


def _suffix(file: Path) -> str:
    return file.suffix.lower()


def find_images(folder: str | Path) -> FolderFiles:
    """The files of a folder, which must have two classes at least and images in each."""
    root = _existing_folder(Path(folder))
    layout = _layout(root)
    class_names = _class_names(layout["train"])
    parts: dict[str, list[ImageFile]] = {}
    passed_over: list[Skipped] = []
    for part, path in layout.items():
        parts[part], unread = _files(path, class_names)
        passed_over += unread
    for path in sorted({root, *layout.values()}):
        passed_over += _loose_images(path)
    return FolderFiles(root, layout["train"], class_names, parts, passed_over)


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
    found: dict[str, list[Path]] = {part: [] for part in PARTS.values()}
    others: list[Path] = []
    for path in _sub_folders(root):
        part = PARTS.get(path.name.lower())
        (found[part] if part else others).append(path)
    train = next((path for path in found["train"] if any(_sub_folders(path))), None)
    if train is None:
        return {"train": root}
    others = [path for path in others if images_below(path)[0]]
    if others and train.name != "train" and not found["test"] + found["val"]:
        return {"train": root}  # classes `Train` and `Truck`
    if surplus := others + [path for paths in found.values() for path in paths[1:]]:
        raise DataError(
            f"{surplus[0]}: a folder beside {train.name}, which holds classes; "
            "expected one each of train, test and val (or valid, or validation)"
        )
    return {part: paths[0] for part, paths in found.items() if paths}


def _class_names(folder: Path) -> tuple[str, ...]:
    names = tuple(path.name for path in _sub_folders(folder))
    if len(names) < 2:
        found = f"one class only, `{names[0]}`" if names else "no sub-folders"
        raise DataError(f"{folder}: {found}; expected two classes at least, one sub-folder each")
    return names


def _files(folder: Path, class_names: tuple[str, ...]) -> tuple[list[ImageFile], list[Skipped]]:
    """The images of a part, and those whose format is not read."""
    files: list[ImageFile] = []
    unread: list[Skipped] = []
    for path in _sub_folders(folder):
        if path.name not in class_names:
            raise DataError(
                f"{path}: class `{path.name}` has no training folder; "
                f"expected one of {', '.join(class_names)}"
            )
        below, closed = _files_below(path)
        images = [file for file in below if _suffix(file) in SUFFIXES]
        if closed:
            raise DataError(f"{closed[0].path}: {closed[0].reason}; expected a folder of images")
        if not images:
            raise DataError(
                f"{path}: empty class folder; expected images ({' '.join(sorted(SUFFIXES))})"
            )
        files += [ImageFile(file, class_names.index(path.name)) for file in images]
        unread += [_unread(file) for file in below if _suffix(file) in UNREAD_SUFFIXES]
    return files, unread


def _unread(file: Path) -> Skipped:
    return Skipped(file, f"of a format that is not read ({_suffix(file)})")


def _loose_images(folder: Path) -> list[Skipped]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    images = [file for file in files if _suffix(file) in SUFFIXES | UNREAD_SUFFIXES]
    return [Skipped(file, "in no class's folder") for file in images]


def _sub_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    folders = [path for path in folder.iterdir() if path.is_dir()]
    return sorted(path for path in folders if not path.name.startswith((".", "__MACOSX")))
