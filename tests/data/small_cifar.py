"""Tiny files in the official CIFAR layouts, and the digest tables that go with them."""

import hashlib
import os
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from capsroute.data import cifar

PER_FILE = 4


def contents(name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pixels `(n, 3072)` and labels of each binary file."""
    generator = np.random.default_rng(0)
    return {
        file: (
            generator.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8),
            generator.integers(0, len(cifar.CLASS_NAMES[name]), PER_FILE),
        )
        for file in cifar.DISTRIBUTIONS[name][0].digests
    }


def binary_file(pixels: np.ndarray, labels: np.ndarray, label_column: int) -> bytes:
    coarse = np.full((len(labels), label_column), 7)
    return np.concatenate([coarse, labels[:, None], pixels], axis=1).astype(np.uint8).tobytes()


def python_file(pixels: np.ndarray, labels: np.ndarray, key: str) -> bytes:
    return pickle.dumps({"data": pixels, key: labels.tolist()}, protocol=4)


def write(name: str, root: Path, form: cifar.Distribution) -> None:
    folder = root / form.folder
    folder.mkdir(parents=True)
    for file, (pixels, labels) in contents(name).items():
        if form.label_key:
            data = python_file(pixels, labels, form.label_key)
            (folder / file.removesuffix(".bin")).write_bytes(data)
        else:
            (folder / file).write_bytes(binary_file(pixels, labels, form.label_column))


def pack(root: Path, form: cifar.Distribution) -> Path:
    """Turn the unpacked folder into its archive."""
    path = root / form.archive
    with tarfile.open(path, "w:gz") as archive:
        archive.add(root / form.folder, arcname=form.folder)
    for file in (root / form.folder).iterdir():
        file.unlink()
    (root / form.folder).rmdir()
    return path


def trust(monkeypatch, name: str, root: Path, form: cifar.Distribution) -> None:
    """Make the digests of the files that are there now the published ones."""
    digests = {
        file: hashlib.new(form.algorithm, (root / form.folder / file).read_bytes()).hexdigest()
        for file in form.digests
    }
    forms = tuple(
        replace(known, digests=digests) if known.folder == form.folder else known
        for known in cifar.DISTRIBUTIONS[name]
    )
    monkeypatch.setitem(cifar.DISTRIBUTIONS, name, forms)


class RunsCode:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)
