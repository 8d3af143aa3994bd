import io
from pathlib import Path

import pytest
import small_cifar
import torch
from PIL import Image
from test_mnist import write_set

from capsroute.data import (
    DataError,
    MissingDataError,
    cifar,
    contact_sheet,
    default_root,
    list_datasets,
    load_dataset,
)


@pytest.fixture
def cifar_root(monkeypatch, tmp_path):
    for name, forms in cifar.DISTRIBUTIONS.items():
        small_cifar.write(name, tmp_path, forms[0])
        small_cifar.trust(monkeypatch, name, tmp_path, forms[0])
    return tmp_path


@pytest.fixture
def pets(tmp_path):
    for i in range(10):
        for name, red in (("cat", 0), ("dog", 100)):
            (tmp_path / name).mkdir(exist_ok=True)
            Image.new("RGB", (9, 8), (red + i, 0, 0)).save(tmp_path / name / f"{i}.png")
    return tmp_path


def test_names():
    assert list_datasets() == (
        "cifar10",
        "cifar100",
        "mnist",
        "fashion_mnist",
        "diverse_multimnist",
    )


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar(cifar_root, name, classes):
    dataset = load_dataset(name, root=cifar_root)
    assert (dataset.name, dataset.task) == (name, "multiclass")
    assert len(dataset.class_names) == classes
    assert dataset.image_size == (32, 32) and dataset.channels == 3
    assert dataset.validation is None
    assert len(dataset.test) == small_cifar.PER_FILE


def test_root_comes_from_the_environment(monkeypatch, cifar_root):
    monkeypatch.setenv("CAPSROUTE_DATA", str(cifar_root))
    assert default_root() == cifar_root
    assert len(load_dataset("cifar10").test) == small_cifar.PER_FILE
    monkeypatch.delenv("CAPSROUTE_DATA")
    monkeypatch.setenv("HOME", "/somewhere")
    assert str(default_root()) == "/somewhere/.cache/capsroute"


def test_mnist_with_validation():
    dataset = load_dataset("mnist", validation=0.1, seed=3)
    assert dataset.image_size == (28, 28) and dataset.channels == 1
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (
        54_000,
        6_000,
        10_000,
    )
    shares = torch.bincount(dataset.validation.targets) / torch.bincount(dataset.train.targets)
    assert torch.allclose(shares, torch.full((10,), 1 / 9), atol=1e-3)


def test_diverse_multimnist_with_validation(mnist):
    dataset = load_dataset("diverse_multimnist", validation=0.05)
    assert dataset.task == "multilabel"
    assert dataset.image_size == (36, 36) and dataset.channels == 1
    assert len(dataset.train) == 60_000 and len(dataset.test) == 10_000
    assert len(dataset.validation) == 3_000
    assert dataset.test.targets.shape == (10_000, 10)
    # the training digits are those that no validation image shows
    assert len(dataset.train.labels) - 1 == 57_000
    # nor are they drawn alike: which images show one digit follows from the seed alone
    shown = [split.targets[:100].sum(1) for split in (dataset.validation, dataset.test)]
    assert not torch.equal(*shown)


def test_fashion_mnist(tmp_path):
    write_set(tmp_path / "FashionMNIST" / "raw", suffix=".gz")
    dataset = load_dataset("fashion_mnist", root=tmp_path)
    assert dataset.class_names[9] == "Ankle boot" and len(dataset.train) == 3
    write_set(tmp_path / "flat")
    assert len(load_dataset("fashion_mnist", root=tmp_path / "flat").train) == 3


def test_fashion_mnist_missing(tmp_path):
    with pytest.raises(MissingDataError, match=r"not found in .*capsroute data download fashion"):
        load_dataset("fashion_mnist", root=tmp_path)


def test_a_folder_of_idx_files(tmp_path):
    write_set(tmp_path / "kuzushiji")
    dataset = load_dataset(tmp_path / "kuzushiji")
    assert dataset.name == "kuzushiji" and dataset.channels == 1 and len(dataset.test) == 3


def test_a_folder_of_images(pets):
    (pets / "dog" / "broken.png").write_bytes(b"")
    dataset = load_dataset(str(pets), validation=0.25, seed=1)
    assert dataset.class_names == ("cat", "dog") and dataset.image_size == (8, 9)
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (12, 4, 4)
    assert [skipped.path.name for skipped in dataset.skipped] == ["broken.png"]
    reds = [
        red
        for split in (dataset.train, dataset.validation, dataset.test)
        for red in split.images[:, 0, 0, 0].tolist()
    ]
    assert len(set(reds)) == 20
    other = load_dataset(str(pets), validation=0.25, seed=2)
    assert torch.equal(other.test.images, dataset.test.images)
    assert not torch.equal(other.validation.images, dataset.validation.images)
    with pytest.raises(DataError, match=r"broken.png"):
        load_dataset(pets, strict=True)
    assert load_dataset(pets, image_size=5).image_size == (5, 5)


def test_deleting_an_image_makes_no_trained_image_a_test_image(pets):
    """But for one of its class, which may take the place of a test image that went."""

    def trained_and_tested():
        dataset = load_dataset(str(pets))
        assert dataset.drawn and dataset.listing is not None
        return [set(split.images[:, 0, 0, 0].tolist()) for split in (dataset.train, dataset.test)]

    trained = trained_and_tested()[0]
    (pets / "cat" / "0.png").unlink()
    assert len(trained & trained_and_tested()[1]) <= 1


def test_a_folder_with_all_three_parts(pets, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    for part in ("train", "val", "test"):
        (root / part).mkdir()
        for name in ("cat", "dog"):
            (root / part / name).symlink_to(pets / name)
    dataset = load_dataset(root)
    assert len(dataset.train) == len(dataset.validation) == len(dataset.test) == 20
    assert not dataset.drawn


def test_unknown_name():
    with pytest.raises(DataError, match=r"called `cifar-10`; did you mean 'cifar10'\?") as info:
        load_dataset("cifar-10")
    assert "\n" not in str(info.value)


def test_path_that_is_not_there(tmp_path):
    with pytest.raises(MissingDataError, match="no such folder"):
        load_dataset(str(tmp_path / "nowhere"))
    with pytest.raises(MissingDataError, match=r"^mnist: no such folder$"):
        load_dataset(Path("mnist"))  # a folder, not the dataset of that name


def test_path_that_is_a_file(tmp_path):
    (tmp_path / "x.zip").write_bytes(b"")
    with pytest.raises(DataError, match="is a file; expected a folder"):
        load_dataset(tmp_path / "x.zip")


def test_a_named_set_has_its_own_size(cifar_root):
    assert load_dataset("cifar10", root=cifar_root, image_size=32).image_size == (32, 32)
    with pytest.raises(ValueError, match=r"`image_size` \(=64\): cifar10 has 32×32 images"):
        load_dataset("cifar10", root=cifar_root, image_size=64)


@pytest.mark.parametrize("validation", [-0.1, 1.0])
def test_bad_validation(validation):
    with pytest.raises(ValueError, match=r"`validation` \(=.*must be in \[0, 1\)"):
        load_dataset("mnist", validation=validation)


def test_contact_sheet():
    images = torch.zeros(5, 1, 36, 36)
    images[1] = 1
    data = contact_sheet(images, ["0", "1 + 2", "a very long label indeed", "", "9"])
    with Image.open(io.BytesIO(data)) as sheet:
        assert sheet.format == "PNG"
        assert sheet.size == (3 * (72 + 6) + 6, 2 * (72 + 16 + 6) + 6)
        assert sheet.getpixel((6 + 36, 6 + 36)) == (0, 0, 0)
        assert sheet.getpixel((6 + 78 + 36, 6 + 36)) == (255, 255, 255)


def test_contact_sheet_of_bytes_in_colour():
    images = torch.tensor([10, 20, 30], dtype=torch.uint8).view(1, 3, 1, 1).expand(2, 3, 80, 90)
    data = contact_sheet(images, ["x", "y"])
    with Image.open(io.BytesIO(data)) as sheet:
        assert sheet.size == (2 * (90 + 6) + 6, 80 + 22 + 6)
        assert sheet.getpixel((50, 50)) == (10, 20, 30)


def test_contact_sheet_checks_its_input():
    with pytest.raises(ValueError, match=r"`images` has shape \(2, 2, 4, 4\)"):
        contact_sheet(torch.zeros(2, 2, 4, 4), ["", ""])
    with pytest.raises(ValueError, match=r"`labels` has 1 entries for 2 images"):
        contact_sheet(torch.zeros(2, 1, 4, 4), [""])
