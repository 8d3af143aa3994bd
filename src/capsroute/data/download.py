"""Fetch datasets, and check those that are there.

A transfer goes into `<file>.part` and resumes from there, in this call or the next; only a file
whose digest is right takes its final name. Archives are unpacked into a temporary folder first,
so that a half-unpacked dataset is never seen.
"""

from __future__ import annotations

import hashlib
import http
import http.client
import os
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from capsroute.data import cifar, mnist
from capsroute.data.errors import DataError, MissingDataError
from capsroute.nearest import nearest

Progress = Callable[[str, int, int | None], None]
"""Called with a file's name, the bytes that are there, and the total where it is known."""

ATTEMPTS = 5
TIMEOUT_S = 30
CHUNK = 1 << 18
PAUSE_S = 1.0
"""Longer by this much before each further attempt."""
_TRANSIENT = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


@dataclass(frozen=True)
class Remote:
    """A file on a server, and where under the root it, or what it holds, belongs."""

    url: str
    md5: str
    folder: str
    unpack: bool

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]


_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FASHION_FOLDER = "FashionMNIST/raw"
FASHION_MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}

# the binary CIFARs: no pickle to distrust
REMOTES: dict[str, tuple[Remote, ...]] = {
    "cifar10": (
        Remote(
            _CIFAR + "cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            "cifar-10-batches-bin",
            unpack=True,
        ),
    ),
    "cifar100": (
        Remote(
            _CIFAR + "cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            "cifar-100-binary",
            unpack=True,
        ),
    ),
    "fashion_mnist": tuple(
        Remote(_FASHION + file, md5, FASHION_FOLDER, unpack=False)
        for file, md5 in FASHION_MD5.items()
    ),
}

IN_THE_PACKAGE = ("mnist", "diverse_multimnist")


class Check(NamedTuple):
    """What `verify` found about one file."""

    file: str
    ok: bool
    detail: str


def download(name: str, root: str | Path, progress: Progress | None = None) -> Path:
    """Fetch dataset `name` into the folder `root` unless it is there and whole.

    Returns the folder that holds the dataset's files.
    """
    if name in IN_THE_PACKAGE:
        raise DataError(f"`{name}` needs no download: MNIST is inside the package")
    if name not in REMOTES:
        raise DataError(f"`{name}` cannot be downloaded{nearest(name, REMOTES)}")
    root = Path(root)
    remotes = REMOTES[name]
    target = root / remotes[0].folder
    if all(check.ok for check in verify(name, root)):
        return target
    for remote in remotes:
        _make_folder(target)
        path = (root if remote.unpack else target) / remote.name
        if not (path.is_file() and _md5(path) == remote.md5):
            _fetch(remote, path, progress or (lambda file, done, total: None))
        if remote.unpack:
            _unpack(path, root, remote.folder)
            path.unlink()
    return target


def verify(name: str, root: str | Path) -> list[Check]:
    """Check every file of dataset `name` under `root` against its published digest."""
    if name in IN_THE_PACKAGE:
        return list(_verify_packed_mnist())
    if name == "fashion_mnist":
        return list(_verify_fashion(Path(root)))
    if name in cifar.DISTRIBUTIONS:
        return list(_verify_cifar(name, Path(root)))
    choices = (*IN_THE_PACKAGE, "fashion_mnist", *cifar.DISTRIBUTIONS)
    raise DataError(f"no digests are known for `{name}`{nearest(name, choices)}")


def _verify_packed_mnist() -> Iterator[Check]:
    for file in mnist.MNIST_SHA1:
        path = mnist.PACKED / f"{file}.xz"
        try:
            mnist.check_packed(file, mnist.read_idx_bytes(mnist.PACKED, file))
        except DataError as error:
            yield Check(str(path), False, str(error))
        else:
            yield Check(str(path), True, "sha1 ok")


def _verify_fashion(root: Path) -> Iterator[Check]:
    folder = mnist_folder(root)
    for file, md5 in FASHION_MD5.items():
        path = folder / file
        if path.is_file():
            found = _md5(path)
            yield Check(str(path), found == md5, "md5 ok" if found == md5 else f"md5 {found}")
        elif path.with_suffix("").is_file():
            yield Check(str(path.with_suffix("")), False, "unpacked: only the .gz has a digest")
        else:
            yield Check(str(path), False, f"missing from {folder}")


def mnist_folder(root: Path) -> Path:
    """Where Fashion-MNIST's files lie: in torchvision's layout, or in the root itself."""
    return root if mnist.find_idx(root, "train-images-idx3-ubyte") else root / FASHION_FOLDER


def _verify_cifar(name: str, root: Path) -> Iterator[Check]:
    try:
        found = cifar.find(name, root)
        files = list(cifar.read_files(found))
    except DataError as error:
        yield Check(str(root), False, str(error))
        return
    for file, data in files:
        source = str(found.path / file)
        if data is None:
            yield Check(source, False, f"missing from {found.path}")
            continue
        try:
            cifar.check_digest(found.form, file, data, source)
        except DataError as error:
            yield Check(source, False, str(error))
        else:
            yield Check(source, True, f"{found.form.algorithm} ok")


def _fetch(remote: Remote, path: Path, progress: Progress) -> None:
    """Bring `path` here, resuming what an earlier attempt left in `path.part`."""
    part = path.with_name(path.name + ".part")
    trouble: Exception | None = None
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE_S * attempt)
        try:
            _transfer(remote, part, progress)
        except urllib.error.HTTPError as error:
            error.close()
            trouble = error
            if error.code < 500:
                break  # the server will not change its mind
        except _TRANSIENT as error:
            trouble = error
        else:
            _accept(remote, part, path)
            return
    kept = part.stat().st_size if part.is_file() else 0
    raise MissingDataError(
        f"{remote.url}: {trouble} ({kept:,} bytes are kept in {part}; the same command resumes)"
    ) from trouble


def _transfer(remote: Remote, part: Path, progress: Progress) -> None:
    """Append to `part` what it lacks; an error when the connection ends too early."""
    done = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(remote.url, headers={"Range": f"bytes={done}-"})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and done:
            error.close()
            return  # all of it is here; its digest will tell
        raise
    with response:
        resumes = response.status == http.HTTPStatus.PARTIAL_CONTENT
        done = done if resumes else 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        with part.open("ab" if resumes else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                progress(remote.name, done, total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended after {done:,} of {total:,} bytes")


def _accept(remote: Remote, part: Path, path: Path) -> None:
    """Give a whole transfer its final name, or refuse it."""
    digest = _md5(part)
    if digest != remote.md5:
        part.unlink()  # resuming it would never end well
        raise DataError(f"{remote.url}: md5 {digest}, expected {remote.md5}; it was not kept")
    part.replace(path)


def _unpack(archive: Path, root: Path, folder: str) -> None:
    """Unpack `folder` from `archive` into `root`, each file whole or not at all."""
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=root) as scratch:
        try:
            with tarfile.open(archive) as tar:
                # the `data` filter refuses links and paths that lead outside, and devices
                tar.extractall(scratch, filter="data")
        except (tarfile.TarError, OSError, EOFError) as error:
            raise DataError(f"{archive}: refused to unpack it ({error})") from error
        files = [path for path in Path(scratch, folder).glob("*") if path.is_file()]
        if not files:
            raise DataError(f"{archive}: expected a folder {folder} with files in it")
        for path in files:
            path.replace(root / folder / path.name)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise DataError(f"{folder}: a file is in the way of this folder") from error


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
