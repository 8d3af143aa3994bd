"""What a run is trained on, kept beside its config: a folder of images may change meanwhile."""

from pathlib import Path
from typing import Any, NamedTuple

from capsroute.data import Dataset, Listing, list_image_folder
from capsroute.train.checkpoint import RunFolder
from capsroute.train.config import read_json


class DataRecord(NamedTuple):
    """A run's data.json."""

    classes: tuple[str, ...]
    image_size: tuple[int, int]
    """(height, width)"""
    channels: int
    unreadable: int
    """Files that were left out."""
    images: int | None
    """Image files of a folder; None for other data, as is the digest of their names."""
    names_sha256: str | None

    @classmethod
    def of(cls, dataset: Dataset) -> "DataRecord":
        found = dataset.listing
        images, digest = (None, None) if found is None else (found.images, found.digest)
        skipped, size = len(dataset.skipped), dataset.image_size
        return cls(dataset.class_names, size, dataset.channels, skipped, images, digest)

    @classmethod
    def read(cls, folder: RunFolder) -> "DataRecord | None":
        """None where a run has none: older versions wrote none."""
        if not folder.data.exists():
            return None
        saved = read_json(folder.data)
        try:
            saved |= {name: tuple(saved[name]) for name in ("classes", "image_size")}
            return cls(**saved)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder.data} must be a run's data.json: {error}") from None

    def listed_as(self, listing: Listing) -> "DataRecord":
        """The record of a folder whose images have not been read, as far as that goes."""
        return self._replace(
            classes=listing.class_names, images=listing.images, names_sha256=listing.digest
        )

    def change(self, now: "DataRecord") -> str | None:
        """The first thing in which the data is not what it was, in words."""
        if self.classes != now.classes:
            return _other_classes(self.classes, now.classes)
        if self.images != now.images:
            if self.images is None or now.images is None:
                return "it is data of another kind"
            return f"it holds {now.images:,} images and held {self.images:,}"
        if self.names_sha256 != now.names_sha256:
            return "some of its images have other names"
        if self.unreadable != now.unreadable:
            return f"{now.unreadable} of its files cannot be read, {self.unreadable} could not"
        if self.image_size != now.image_size:
            sizes = [f"{height}×{width}" for height, width in (now.image_size, self.image_size)]
            return f"its images are {sizes[0]} pixels and were {sizes[1]}"
        if self.channels != now.channels:
            return f"its images have {now.channels} channels and had {self.channels}"
        return None


def changed_since(folder: RunFolder, dataset: Dataset) -> str | None:
    """How the data has changed since the run in `folder` began: `it holds 9 images and held 8`.

    None where it has not, and where the run does not say what it was.
    """
    before = DataRecord.read(folder)
    return None if before is None else before.change(DataRecord.of(dataset))


def unknown_images_note(folder: RunFolder, dataset: Dataset) -> str | None:
    """What to tell of a run that does not say which images of a folder it held out."""
    if not dataset.drawn or folder.data.exists() or not folder.has_progress():
        return None
    return (
        f"{folder.path} does not say which images it held out (older versions chose others): "
        "it may have been trained on some that it is tested on"
    )


def check_data(folder: RunFolder, dataset: Dataset) -> None:
    """Raise if the run in `folder` got somewhere with other data."""
    if folder.has_progress() and (change := changed_since(folder, dataset)):
        raise _refusal(folder, change)


def check_listing(folder: RunFolder, data: str) -> None:
    """Raise if a finished run's folder of images has changed, as far as their names tell."""
    before, images = DataRecord.read(folder), Path(data).expanduser()
    if before is None or before.images is None or not images.is_dir():
        return
    if change := before.change(before.listed_as(list_image_folder(images))):
        raise _refusal(folder, change)


def record_data(folder: RunFolder, dataset: Dataset) -> None:
    """Write the record of a run that begins."""
    if not folder.has_progress():
        record: dict[str, Any] = DataRecord.of(dataset)._asdict()
        folder.write_data(record)


def _refusal(folder: RunFolder, change: str) -> ValueError:
    return ValueError(
        f"`data` must be as it was when the run in {folder.path} began, but {change}: "
        "restore it, or begin another run with --out"
    )


def _other_classes(before: tuple[str, ...], now: tuple[str, ...]) -> str:
    if len(before) != len(now):
        return f"it has {len(now)} classes and had {len(before)}"
    index = next(i for i, names in enumerate(zip(before, now, strict=True)) if len({*names}) > 1)
    return f"class {index} is {now[index]!r} and was {before[index]!r}"
