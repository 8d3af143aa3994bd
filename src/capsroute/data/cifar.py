"""CIFAR-10 and CIFAR-100 from their official distributions, binary or python.

Looked for in this order under a root folder: the unpacked binary folder, the unpacked python
folder, the binary archive, the python archive; the root may also be one of those folders. The
first that is there is used, and every file of it is checked against its published digest.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from capsroute.data.cifar_names import CIFAR10_CLASSES, CIFAR100_CLASSES
from capsroute.data.errors import DataError, MissingDataError
from capsroute.nearest import nearest

PIXELS = 3 * 32 * 32


class CifarArrays(NamedTuple):
    """Images are uint8 `(n, 3, 32, 32)`, labels int64 `(n,)` (fine ones for CIFAR-100)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Distribution:
    """One official form of a dataset: where its files lie, and what they must be."""

    folder: str
    archive: str
    algorithm: str
    digests: Mapping[str, str]
    """Digest of each file, training files first; those with `test` in their name are for test."""
    label_column: int
    """Binary records: bytes before the label that is ours. Python batches: unused."""
    label_key: str
    """Key of the labels in a python batch; empty for the binary form."""


DISTRIBUTIONS: dict[str, tuple[Distribution, ...]] = {
    "cifar10": (
        Distribution(
            folder="cifar-10-batches-bin",
            archive="cifar-10-binary.tar.gz",
            algorithm="sha1",
            digests={
                "data_batch_1.bin": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
                "data_batch_2.bin": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
                "data_batch_3.bin": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
                "data_batch_4.bin": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
                "data_batch_5.bin": "26e2849e66a845b7f1e4614ae70f4889ae604628",
                "test_batch.bin": "67eb016db431130d61cd03c7ad570b013799c88c",
            },
            label_column=0,
            label_key="",
        ),
        Distribution(
            folder="cifar-10-batches-py",
            archive="cifar-10-python.tar.gz",
            algorithm="md5",
            digests={
                "data_batch_1": "c99cafc152244af753f735de768cd75f",
                "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "634d18415352ddfa80567beed471001a",
                "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
                "test_batch": "40351d587109b95175f43aff81a1287e",
            },
            label_column=0,
            label_key="labels",
        ),
    ),
    "cifar100": (
        Distribution(
            folder="cifar-100-binary",
            archive="cifar-100-binary.tar.gz",
            algorithm="sha1",
            digests={
                "train.bin": "e207cd2e05b73b1393c74c7f5e7bea451d63e08e",
                "test.bin": "8fb6623e830365ff53cf14adec797474f5478006",
            },
            label_column=1,  # after the coarse label
            label_key="",
        ),
        Distribution(
            folder="cifar-100-python",
            archive="cifar-100-python.tar.gz",
            algorithm="md5",
            digests={
                "train": "16019d7e3df5f24257cddd939b257f8d",
                "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
            },
            label_column=0,
            label_key="fine_labels",
        ),
    ),
}

CLASS_NAMES = {"cifar10": CIFAR10_CLASSES, "cifar100": CIFAR100_CLASSES}


class Found(NamedTuple):
    """A distribution that is there: an unpacked folder or an archive."""

    form: Distribution
    path: Path


def load_cifar(name: str, root: str | Path) -> CifarArrays:
    """`cifar10` or `cifar100` from the folder `root` (see the module's docstring)."""
    found = find(name, Path(root))
    parts: dict[bool, list[tuple[np.ndarray, np.ndarray]]] = {False: [], True: []}
    for file, data in read_files(found):
        source = str(found.path / file)
        if data is None:
            raise MissingDataError(
                f"{file} not found in {found.path}, which holds others of its set; "
                f"get it with `capsroute data download {name}`"
            )
        check_digest(found.form, file, data, source)
        arrays = _parse(found.form, data, source, len(CLASS_NAMES[name]))
        parts["test" in file].append(arrays)
    return CifarArrays(*_join(parts[False]), *_join(parts[True]))


def find(name: str, root: Path) -> Found:
    """The first distribution of `name` under `root`."""
    if name not in DISTRIBUTIONS:
        raise DataError(f"no CIFAR set is called `{name}`{nearest(name, DISTRIBUTIONS)}")
    if root.is_file():
        raise DataError(f"{root} is a file; expected a folder that holds {name}")
    forms = DISTRIBUTIONS[name]
    for form in forms:
        for folder in (root / form.folder, root):
            # whichever file is there identifies the form; one that is not is reported as missing
            if any((folder / file).is_file() for file in form.digests):
                return Found(form, folder)
    for form in forms:
        if (root / form.archive).is_file():
            return Found(form, root / form.archive)
    first = forms[0]
    raise MissingDataError(
        f"{first.folder}/{next(iter(first.digests))} not found in {root} "
        f"(nor {forms[1].folder}, {first.archive} or {forms[1].archive}); get it with "
        f"`capsroute data download {name}` or from https://www.cs.toronto.edu/~kriz/cifar.html"
    )


def read_files(found: Found) -> Iterator[tuple[str, bytes | None]]:
    """The name of each file of a distribution, in the order of its digests, and its bytes.

    None stands for the bytes of a file that is missing.
    """
    if found.path.is_dir():
        for file in found.form.digests:
            path = found.path / file
            yield file, path.read_bytes() if path.is_file() else None
    else:
        members = _read_archive(found)
        yield from ((file, members.get(file)) for file in found.form.digests)


def check_digest(form: Distribution, file: str, data: bytes, source: str) -> None:
    digest = hashlib.new(form.algorithm, data, usedforsecurity=False).hexdigest()
    if digest != form.digests[file]:
        raise DataError(
            f"{source}: {form.algorithm} {digest}, expected {form.digests[file]} "
            f"({len(data):,} bytes: truncated or damaged; download it again)"
        )


def _read_archive(found: Found) -> dict[str, bytes]:
    wanted = {f"{found.form.folder}/{file}": file for file in found.form.digests}
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(found.path) as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.name in wanted else None
                if stream is not None:
                    members[wanted[member.name]] = stream.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{found.path}: damaged archive ({error}); download it again") from error
    return members


def _parse(
    form: Distribution, data: bytes, source: str, classes: int
) -> tuple[np.ndarray, np.ndarray]:
    pixels, labels = (
        _parse_python(data, form.label_key, source)
        if form.label_key
        else _parse_binary(data, form.label_column, source)
    )
    if labels.size and not (labels.min() >= 0 and labels.max() < classes):
        wrong = labels[(labels < 0) | (labels >= classes)][0]
        raise DataError(f"{source}: label {wrong} is out of range; expected 0 to {classes - 1}")
    return pixels.reshape(-1, 3, 32, 32), labels


def _parse_binary(data: bytes, label_column: int, source: str) -> tuple[np.ndarray, np.ndarray]:
    record = label_column + 1 + PIXELS
    if not data or len(data) % record:
        raise DataError(
            f"{source}: {len(data):,} bytes, expected records of {record}: truncated file"
        )
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, record)
    return records[:, label_column + 1 :], records[:, label_column].astype(np.int64)


def _parse_python(data: bytes, label_key: str, source: str) -> tuple[np.ndarray, np.ndarray]:
    batch = unpickle_arrays(data, source)
    pixels = batch.get("data") if isinstance(batch, dict) else None
    labels = batch.get(label_key) if isinstance(batch, dict) else None
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.shape[1:] != (PIXELS,)
        or not isinstance(labels, list)
        or len(labels) != len(pixels)
    ):
        raise DataError(
            f"{source}: expected a dict with `data`, uint8 (n, {PIXELS}), and `{label_key}`, "
            f"a list of n labels"
        )
    return pixels, np.array(labels, dtype=np.int64)


# asked of an array, because numpy has moved this function from module to module
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ADMITTED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Builds numpy arrays and Python's plain containers; every other name is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ADMITTED[module, name]


def unpickle_arrays(data: bytes, source: str) -> Any:
    """Unpickle numpy arrays and plain containers; anything that could run code is an error."""
    try:
        # the official files were written by Python 2: latin1 keeps its strings' bytes
        return _ArrayUnpickler(io.BytesIO(data), encoding="latin1").load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DataError(
            f"{source}: refused; a batch may hold numpy arrays alone ({error})"
        ) from error


def _join(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*parts, strict=True)
    return torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(labels))
