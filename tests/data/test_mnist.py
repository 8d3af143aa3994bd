import gzip
import hashlib
import lzma

import numpy as np
import pytest
import torch

from capsroute.data import DataError, MissingDataError, load_mnist
from capsroute.data import mnist as module
from small_idx import idx

NAMES = list(module.MNIST_SHA1)


def write_set(folder, labels=(3, 1, 4), size=(5, 6), suffix="") -> None:
    """Three training and three test images."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "t10k"):
        images = np.arange(3 * size[0] * size[1]).reshape(3, *size) % 256
        files = {"images-idx3": idx(images), "labels-idx1": idx(np.array(labels))}
        for kind, data in files.items():
            data = gzip.compress(data) if suffix else data
            (folder / f"{part}-{kind}-ubyte{suffix}").write_bytes(data)


@pytest.mark.parametrize("name", NAMES)
def test_packed_files_give_the_official_bytes(name):
    data = lzma.decompress((module.PACKED / f"{name}.xz").read_bytes())
    assert hashlib.sha1(data).hexdigest() == module.MNIST_SHA1[name]


def test_packed_set_is_small_and_its_origin_is_noted():
    assert sum(path.stat().st_size for path in module.PACKED.iterdir()) <= 10_000_000
    note = (module.PACKED / "README.md").read_text()
    assert "LeCun" in note and "CC BY-SA 3.0" in note


def test_packed_set(mnist):
    assert mnist.train_images.shape == (60_000, 28, 28)
    assert mnist.test_images.shape == (10_000, 28, 28)
    assert mnist.train_images.dtype == torch.uint8
    assert mnist.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert mnist.test_labels[:5].tolist() == [7, 2, 1, 0, 4]


def test_a_damaged_package_is_noticed(monkeypatch):
    monkeypatch.setitem(module.MNIST_SHA1, "t10k-labels-idx1-ubyte", "0" * 40)
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte.xz: sha1 a6d5.*expected 0000"):
        load_mnist()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_from_a_folder(tmp_path, suffix):
    write_set(tmp_path, suffix=suffix)
    arrays = load_mnist(tmp_path)
    assert arrays.train_images.shape == (3, 5, 6)
    assert arrays.test_labels.tolist() == [3, 1, 4]
    assert arrays.test_images.flatten()[:7].tolist() == list(range(7))


def test_missing_file_is_named_with_its_folder(tmp_path):
    write_set(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(MissingDataError, match=r"t10k-images-idx3-ubyte.*not found in .*") as info:
        load_mnist(tmp_path)
    assert str(tmp_path) in str(info.value)
    assert isinstance(info.value, FileNotFoundError)


def test_truncated_idx_file(tmp_path):
    write_set(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"105 bytes, expected 106 .*truncated"):
        load_mnist(tmp_path)
    path.write_bytes(path.read_bytes()[:7])
    with pytest.raises(DataError, match="truncated"):
        load_mnist(tmp_path)


def test_truncated_gz_file(tmp_path):
    write_set(tmp_path, suffix=".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"damaged \.gz file"):
        load_mnist(tmp_path)


def test_not_an_idx_file(tmp_path):
    write_set(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"<html>")
    with pytest.raises(DataError, match="begins with 3c68746d, expected 00000801"):
        load_mnist(tmp_path)


def test_label_out_of_range(tmp_path):
    write_set(tmp_path, labels=(3, 10, 4))
    with pytest.raises(DataError, match="label 10 is out of range; expected 0 to 9"):
        load_mnist(tmp_path)


def test_labels_and_images_must_match(tmp_path):
    write_set(tmp_path, labels=(3, 4))
    with pytest.raises(DataError, match="2 labels for 3 images"):
        load_mnist(tmp_path)


def test_sizes_must_match(tmp_path):
    write_set(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(np.zeros((3, 4, 4))))
    with pytest.raises(DataError, match="expected one size"):
        load_mnist(tmp_path)


def test_a_file_instead_of_a_folder(tmp_path):
    path = tmp_path / "mnist.zip"
    path.write_bytes(b"")
    with pytest.raises(DataError, match="is a file; expected a folder"):
        load_mnist(path)
