"""MNIST from inside the package, and any set in MNIST's idx format from a folder."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from capsroute.data.errors import DataError, MissingDataError

PACKED = Path(__file__).parent / "files"

# sha1 of the official idx files, unpacked
MNIST_SHA1 = {
    "train-images-idx3-ubyte": "c3557c10f29b266e19b3eeee1553c85e0ef4a8ea",
    "train-labels-idx1-ubyte": "adbf52269f5d842899f287c269e2883e40b4f6e2",
    "t10k-images-idx3-ubyte": "65e11ec1fd220343092a5070b58418b5c2644e26",
    "t10k-labels-idx1-ubyte": "a6d52cc628797e845885543326e9f10abb8a6f89",
}

CLASSES = 10


class DigitArrays(NamedTuple):
    """Images are uint8 `(n, height, width)`, labels int64 `(n,)`."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_mnist(root: str | Path | None = None) -> DigitArrays:
    """MNIST: the packed set when `root` is None, else the idx files in the folder `root`.

    The packed set is checked against the official digests. A folder may hold any set of ten
    classes in MNIST's format and under its file names, such as Fashion-MNIST, plain or `.gz`.
    """
    folder = PACKED if root is None else Path(root)
    files = {name: read_idx_bytes(folder, name) for name in MNIST_SHA1}
    if root is None:
        for name, data in files.items():
            check_packed(name, data)
    train = _split(folder, files, "train")
    test = _split(folder, files, "t10k")
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DataError(
            f"{folder}: training images are {tuple(train[0].shape[1:])} pixels, "
            f"test images {tuple(test[0].shape[1:])}; expected one size"
        )
    return DigitArrays(*train, *test)


def check_packed(name: str, data: bytes) -> None:
    digest = hashlib.sha1(data, usedforsecurity=False).hexdigest()
    if digest != MNIST_SHA1[name]:
        raise DataError(
            f"{PACKED / name}.xz: sha1 {digest}, expected {MNIST_SHA1[name]}; reinstall capsroute"
        )


def find_idx(folder: Path, name: str) -> Path | None:
    """The file that holds `name`, plain or compressed."""
    candidates = (folder / (name + suffix) for suffix in ("", ".gz", ".xz"))
    return next((path for path in candidates if path.is_file()), None)


def read_idx_bytes(folder: Path, name: str) -> bytes:
    """The unpacked bytes of the idx file `name`."""
    if folder.is_file():
        raise DataError(f"{folder} is a file; expected a folder with {name} or {name}.gz")
    path = find_idx(folder, name)
    if path is None:
        raise MissingDataError(f"{name} (or {name}.gz) not found in {folder}")
    data = path.read_bytes()
    try:
        match path.suffix:
            case ".gz":
                return gzip.decompress(data)
            case ".xz":
                return lzma.decompress(data)
            case _:
                return data
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path}: damaged {path.suffix} file ({error})") from error


def parse_idx(data: bytes, dimensions: int, source: str) -> np.ndarray:
    """An idx file of unsigned bytes as an array; `source` names it in errors."""
    header = 4 + 4 * dimensions
    magic = bytes([0, 0, 8, dimensions])
    if data[:4] != magic:
        raise DataError(
            f"{source}: begins with {data[:4].hex()}, expected {magic.hex()} "
            f"(idx, unsigned bytes, {dimensions} dimensions)"
        )
    shape = tuple(np.frombuffer(data[4:header].ljust(header - 4, b"\0"), dtype=">u4").tolist())
    expected = header + int(np.prod(shape, dtype=np.int64))
    if len(data) != expected:
        raise DataError(
            f"{source}: {len(data):,} bytes, expected {expected:,} for shape {shape}: "
            f"{'truncated' if len(data) < expected else 'too long'}"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)


def _split(folder: Path, files: dict[str, bytes], part: str) -> tuple[Tensor, Tensor]:
    image_name, label_name = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
    images = parse_idx(files[image_name], 3, str(folder / image_name))
    labels = parse_idx(files[label_name], 1, str(folder / label_name))
    if len(images) != len(labels) or not len(images):
        raise DataError(
            f"{folder / label_name}: {len(labels)} labels for {len(images)} images; "
            f"expected one label an image, and one image at least"
        )
    if labels.max() >= CLASSES:
        raise DataError(
            f"{folder / label_name}: label {labels.max()} is out of range; "
            f"expected 0 to {CLASSES - 1}"
        )
    return torch.from_numpy(images.copy()), torch.from_numpy(labels.astype(np.int64))
