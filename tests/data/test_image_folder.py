import os

import numpy as np
import pytest
import torch
from PIL import Image

from capsroute.data import (
    DataError,
    EvalBatches,
    MissingDataError,
    list_image_folder,
    load_dataset,
    load_image_folder,
)
from capsroute.data.decoding import decode, to_mode
from capsroute.data.image_folder import FolderSplit
from capsroute.inference import Predictor
from capsroute.models import create_model

RED = (200, 30, 40)


def save(path, image: Image.Image | np.ndarray, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(path, **options)


def solid(mode="RGB", size=(12, 10), color=RED) -> Image.Image:
    return Image.new(mode, size, color)


@pytest.fixture
def pets(tmp_path):
    """Three cats and two dogs of 12×10 pixels (width × height)."""
    for i in range(3):
        save(tmp_path / "cat" / f"{i}.png", solid(color=(i, 0, 0)))
    for i in range(2):
        save(tmp_path / "dog" / f"{i}.bmp", solid(color=(0, i, 0)))
    return tmp_path


def test_plain_folder(pets):
    (pets / "cat" / "notes.txt").write_text("not an image")
    (pets / ".cache").mkdir()
    (pets / "readme.md").write_text("neither is this")
    folder = load_image_folder(pets)
    assert folder.class_names == ("cat", "dog")
    assert folder.image_size == (10, 12) and folder.channels == 3
    assert folder.test is None and folder.validation is None and folder.skipped == ()
    assert folder.train.targets.tolist() == [0, 0, 0, 1, 1]
    assert folder.train.images.shape == (5, 3, 10, 12)
    assert folder.train.images[:, 0, 0, 0].tolist() == [0, 1, 2, 0, 0]


@pytest.mark.parametrize(
    "parts",
    [
        ("train", "test"),
        ("train", "val"),
        ("train", "test", "val"),
        ("train", "valid"),
        ("Train", "Test"),
        ("TRAIN", "test", "Validation"),
    ],
)
def test_split_layout(tmp_path, parts):
    for i, part in enumerate(parts):
        for name in ("a", "b"):
            save(tmp_path / part / name / "x.png", solid(color=(i, 0, 0)))
    folder = load_image_folder(tmp_path)
    assert folder.class_names == ("a", "b")
    assert folder.test.images[0, 0, 0, 0] == 1
    assert (folder.validation is None) == (len(parts) == 2)
    assert folder.passed_over == ()


@pytest.mark.parametrize("surplus", ["dev", "holdout", "training", "valid"])
def test_a_folder_beside_train_is_never_dropped(tmp_path, surplus):
    for part in ("train", "val", surplus):
        for name in ("a", "b"):
            save(tmp_path / part / name / "x.png", solid())
    message = (
        rf"{surplus}: a folder beside train, .*; expected one each of train, test and val \(or"
    )
    with pytest.raises(DataError, match=message):
        load_image_folder(tmp_path)


def test_a_folder_without_images_beside_train(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / "train" / name / "x.png", solid())
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "labels.csv").write_text("")
    save(tmp_path / "__MACOSX" / "train" / "a" / "._x.png", solid())  # where a Mac packed it
    assert load_image_folder(tmp_path).class_names == ("a", "b")


def test_images_that_are_passed_over_are_counted(pets):
    for path in ("cat/1.heic", "cat/old/2.HEIC", "readme.md"):
        (pets / path).parent.mkdir(exist_ok=True)
        (pets / path).write_bytes(b"")
    save(pets / "loose.png", solid())
    before = list_image_folder(pets)
    assert before.images == 5 and load_image_folder(pets).skipped == ()
    counts = "2 files of a format that is not read (.heic), 1 file in no class's folder"
    assert load_dataset(pets).skipped_lines() == [f"left out {counts}"]
    break_two(pets)
    lines = load_dataset(pets).skipped_lines(most=1)
    assert len(lines) == 2 and lines[1] == (
        f"left out 2 files that could not be read, 1 of them not named here, {counts}"
    )


def test_a_class_called_train(tmp_path):
    for name in ("train", "truck"):
        save(tmp_path / name / "x.png", solid())
    assert load_image_folder(tmp_path).class_names == ("train", "truck")


def test_a_class_called_train_with_folders_of_its_own(tmp_path):
    for path in ("Train/steam", "Train/diesel", "Truck"):
        save(tmp_path / path / "x.png", solid())
    assert load_image_folder(tmp_path).class_names == ("Train", "Truck")


def test_a_class_without_training_images(tmp_path):
    for path in ("train/a", "train/b", "test/c"):
        save(tmp_path / path / "x.png", solid())
    with pytest.raises(DataError, match=r"class `c` has no training folder; expected one of a, b"):
        load_image_folder(tmp_path)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (solid("L", color=77), (77, 77, 77)),
        (solid("1", color=1), (255, 255, 255)),
        (solid(), RED),
        (solid("RGBA", color=(*RED, 255)), RED),
        (solid("RGBA", color=(9, 9, 9, 0)), (255, 255, 255)),
        (solid("LA", color=(80, 255)), (80, 80, 80)),
        (solid().convert("P", palette=Image.Palette.ADAPTIVE), RED),
        (Image.fromarray(np.full((10, 12), 257 * 99, np.uint16)), (99, 99, 99)),
    ],
    ids=["L", "1", "RGB", "RGBA", "transparent", "LA", "P", "16 bit"],
)
def test_modes(tmp_path, image, expected):
    save(tmp_path / "x.png", image)
    pixels = decode(tmp_path / "x.png", (10, 12), 3)
    assert pixels.shape == (3, 10, 12) and pixels.dtype == np.uint8
    assert np.abs(pixels[:, 5, 5].astype(int) - expected).max() <= 2


def test_16_bits_are_scaled_to_8_exactly():
    levels = np.arange(256, dtype=np.uint16)[None]
    assert np.array_equal(to_mode(Image.fromarray(257 * levels), "L"), levels)
    assert np.array_equal(to_mode(Image.fromarray(257 * levels[:, :-1] + 256), "L"), levels[:, :-1])


def test_a_jpeg_is_decoded_for_training_as_for_prediction(tmp_path):
    """At a fraction of its size, and never below what is needed."""
    pixels = np.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=np.uint8)
    photograph = Image.fromarray(pixels).resize((400, 500), Image.Resampling.BICUBIC)
    save(tmp_path / "x.jpg", photograph)
    model = create_model("inverted_small_multimnist", image_size=28, in_channels=3)
    predictor = Predictor.from_model(model)
    with Image.open(tmp_path / "x.jpg") as file:
        expected = predictor.prepare(file)
    found = decode(tmp_path / "x.jpg", (28, 28), 3)
    assert np.array_equal(found, (255 * expected).round().byte().numpy())


def test_transparent_palette_lies_on_white(tmp_path):
    image = solid("P", color=0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    save(tmp_path / "x.png", image, transparency=b"\x00\xff")
    assert decode(tmp_path / "x.png", (10, 12), 3).min() == 255


@pytest.mark.parametrize("suffix", ["jpg", "webp", "gif", "tiff", "bmp", "ppm"])
def test_formats(tmp_path, suffix):
    save(tmp_path / f"x.{suffix}", solid())
    pixels = decode(tmp_path / f"x.{suffix}", (10, 12), 3)
    assert np.abs(pixels[:, 5, 5].astype(int) - RED).max() <= 6


def test_exif_rotation_is_applied(tmp_path):
    image = solid(size=(12, 10), color=(0, 0, 0))
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise to show
    save(tmp_path / "x.png", image, exif=exif)
    pixels = decode(tmp_path / "x.png", (12, 10), 3)
    assert pixels[0, 0, 9] == 255


def test_proportions_are_kept(tmp_path):
    """Twice as wide as high: the middle square remains."""
    image = np.zeros((20, 40, 3), np.uint8)
    image[:, 10:30] = 255
    save(tmp_path / "x.png", image)
    assert decode(tmp_path / "x.png", (20, 20), 3).min() == 255


def test_grey_images_have_one_channel(tmp_path):
    save(tmp_path / "a" / "x.png", solid("L", color=3))
    save(tmp_path / "b" / "x.png", Image.fromarray(np.full((10, 12), 40_000, np.uint16)))
    assert load_image_folder(tmp_path).channels == 1
    save(tmp_path / "b" / "y.png", solid())
    assert load_image_folder(tmp_path).channels == 3


def test_sizes(pets):
    assert load_image_folder(pets, image_size=8).image_size == (8, 8)
    assert load_image_folder(pets, image_size=(8, 6)).train.images.shape[2:] == (8, 6)
    save(pets / "cat" / "large.png", solid(size=(300, 200)))
    assert load_image_folder(pets).image_size == (10, 10)
    with pytest.raises(ValueError, match=r"`image_size` \(=0\) must be positive"):
        load_image_folder(pets, image_size=0)


def test_large_images_are_brought_to_64(tmp_path):
    for name in "ab":
        save(tmp_path / name / "x.jpg", solid(size=(300, 200)))
    assert load_image_folder(tmp_path).image_size == (64, 64)


def break_two(pets) -> None:
    (pets / "cat" / "0.png").write_bytes(b"not an image at all")
    path = pets / "dog" / "0.bmp"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("memory_limit", [1 << 20, 0], ids=["in memory", "on demand"])
def test_broken_files_are_named_and_skipped(pets, memory_limit):
    break_two(pets)
    folder = load_image_folder(pets, memory_limit=memory_limit)
    assert [skipped.path.name for skipped in folder.skipped] == ["0.png", "0.bmp"]
    assert all(skipped.reason and "\n" not in skipped.reason for skipped in folder.skipped)
    assert folder.train.targets.tolist() == [0, 0, 1]


def test_strict_makes_a_broken_file_an_error(pets):
    break_two(pets)
    with pytest.raises(DataError, match=r"0.png: .*2 broken in all"):
        load_image_folder(pets, strict=True)


def test_a_folder_that_cannot_be_listed_is_named(pets, monkeypatch):
    scan = os.scandir

    def scandir(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    (pets / "dog" / "locked").mkdir()
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"dog/locked: no permission to read it"):
        load_image_folder(pets)


def test_a_class_of_broken_files_only(pets):
    for path in (pets / "dog").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="dog: no image in it can be read"):
        load_image_folder(pets)


def test_nothing_but_broken_files(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"x.png: .*every other image"):
        load_image_folder(tmp_path)


def test_floating_point_images_are_skipped(pets):
    save(pets / "cat" / "f.tiff", Image.fromarray(np.zeros((10, 12), np.float32)))
    (skipped,) = load_image_folder(pets).skipped
    assert "floating-point" in skipped.reason


def test_formats_that_need_other_programs_are_not_opened(pets):
    save(pets / "cat" / "x.eps", solid())
    (pets / "cat" / "x.eps").rename(pets / "cat" / "x.png")
    (skipped,) = load_image_folder(pets).skipped
    assert skipped.path.name == "x.png"


def test_on_demand_gives_the_same_images(pets):
    in_memory = load_image_folder(pets).train
    on_demand = load_image_folder(pets, memory_limit=100).train
    assert isinstance(on_demand, FolderSplit) and not on_demand.resident
    for expected, found in zip(EvalBatches(in_memory, 2), EvalBatches(on_demand, 2), strict=True):
        assert torch.equal(expected[0], found[0]) and torch.equal(expected[1], found[1])
    assert on_demand.subset(torch.tensor([4, 0])).targets.tolist() == [1, 0]
    assert len(on_demand.to("cpu")) == 5


def test_a_file_that_vanishes_later(pets):
    split = load_image_folder(pets, memory_limit=100).train
    (pets / "dog" / "1.bmp").unlink()
    with pytest.raises(DataError, match=r"1.bmp could be read at first"):
        list(EvalBatches(split, 2))


def test_empty_class_folder(pets):
    (pets / "eel").mkdir()
    with pytest.raises(DataError, match=r"eel: empty class folder; expected images"):
        load_image_folder(pets)


def test_one_class_only(tmp_path):
    save(tmp_path / "cat" / "x.png", solid())
    with pytest.raises(DataError, match=r"one class only, `cat`; expected two classes at least"):
        load_image_folder(tmp_path)


def test_no_classes(tmp_path):
    save(tmp_path / "x.png", solid())
    with pytest.raises(DataError, match=r"no sub-folders; expected two classes"):
        load_image_folder(tmp_path)


def test_a_file_instead_of_a_folder(tmp_path):
    save(tmp_path / "x.png", solid())
    with pytest.raises(DataError, match=r"x.png is a file; expected a folder"):
        load_image_folder(tmp_path / "x.png")


def test_no_such_folder(tmp_path):
    with pytest.raises(MissingDataError, match=r"nowhere: no such folder"):
        load_image_folder(tmp_path / "nowhere")


def test_a_listing_tells_that_images_came_went_or_were_renamed(pets):
    (pets / "dog" / "broken.bmp").write_bytes(b"no image")
    before = list_image_folder(pets)
    assert before.class_names == ("cat", "dog") and before.images == 6
    assert load_image_folder(pets).listing == before
    assert load_image_folder(pets).train_names == (
        "cat/0.png",
        "cat/1.png",
        "cat/2.png",
        "dog/0.bmp",
        "dog/1.bmp",
    )
    (pets / "cat" / "2.png").rename(pets / "cat" / "3.png")
    renamed = list_image_folder(pets)
    assert renamed.images == 6 and renamed.digest != before.digest
    (pets / "cat" / "3.png").rename(pets / "cat" / "2.png")
    assert list_image_folder(pets) == before
    (pets / "cat" / "2.png").unlink()
    assert list_image_folder(pets).images == 5
