"""A run and its folder of images, which may change while the run is cut or when it is done."""

import dataclasses
import json
import shutil
import signal

import pytest
from PIL import Image

from capsroute.data import load_dataset
from capsroute.train.build import Runtime
from capsroute.train.checkpoint import RunFolder
from capsroute.train.data_record import changed_since, unknown_images_note
from capsroute.train.engine import train
from capsroute.train.interruption import Interrupted
from capsroute.train.reporting import Reporter


class Listens(Reporter):
    """Keeps the messages, and stops a run after a step if asked to."""

    def __init__(self, stop_at=None):
        self.stop_at, self.told = stop_at, []

    def step(self, done):
        if done == self.stop_at:
            signal.raise_signal(signal.SIGTERM)

    def message(self, text):
        self.told.append(text)


def run(config, out, stop_at=None):
    listener = Listens(stop_at)
    train(config, out, Runtime(device="cpu"), listener)
    return listener.told


@pytest.fixture
def images(tmp_path, own_folder):
    return own_folder(tmp_path / "stripes", images=6, side=24)


@pytest.fixture
def own(config, images):
    """The size of the images is worked out from them."""
    data = dataclasses.replace(config.data, data=str(images), image_size=None)
    return dataclasses.replace(config, data=data, steps=4, eval_every=4)


@pytest.fixture
def cut(own, tmp_path):
    with pytest.raises(Interrupted):
        run(own, tmp_path / "run", stop_at=2)
    return tmp_path / "run"


def one_more(images):
    shutil.copy(images / "class0" / "0.png", images / "class0" / "new.png")


def renamed_class(images):
    (images / "class2").rename(images / "aaa")


def one_class_fewer(images):
    shutil.rmtree(images / "class2")


def renamed_image(images):
    (images / "class1" / "3.png").rename(images / "class1" / "three.png")


def broken_image(images):
    (images / "class1" / "3.png").write_bytes(b"no image")


def larger_images(images):
    for path in images.rglob("*.png"):
        with Image.open(path) as image:
            image.resize((28, 26)).save(path)


def one_in_colour(images):
    Image.new("RGB", (24, 24)).save(images / "class0" / "0.png")


CHANGES = [
    (one_more, "it holds 19 images and held 18"),
    (renamed_class, "class 0 is 'aaa' and was 'class0'"),
    (one_class_fewer, "it has 2 classes and had 3"),
    (renamed_image, "some of its images have other names"),
    (broken_image, "1 of its files cannot be read, 0 could not"),
    (larger_images, "its images are 26×28 pixels and were 24×24"),
    (one_in_colour, "its images have 3 channels and had 1"),
]


@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_a_cut_run_does_not_go_on_with_other_images(own, cut, images, change, told):
    before = (cut / "state.pt").read_bytes()
    change(images)
    with pytest.raises(ValueError, match="`data` must be as it was") as caught:
        run(own, cut)
    assert str(caught.value) == (
        f"`data` must be as it was when the run in {cut} began, but {told}: "
        "restore it, or begin another run with --out"
    )
    assert (cut / "state.pt").read_bytes() == before


def test_a_cut_run_goes_on_when_its_images_are_back(own, cut, images):
    (images / "class0" / "0.png").rename(images / "kept.png")
    with pytest.raises(ValueError, match="it holds 17 images and held 18"):
        run(own, cut)
    (images / "kept.png").rename(images / "class0" / "0.png")
    run(own, cut)
    assert (cut / "summary.json").exists()


@pytest.mark.parametrize(("change", "told"), CHANGES[:4])  # what names tell, for none is opened
def test_a_finished_run_on_other_images_is_not_finished(own, images, tmp_path, change, told):
    out = tmp_path / "run"
    run(own, out)
    assert run(own, out) == [f"{out} is finished; nothing was trained"]
    change(images)
    with pytest.raises(ValueError, match=told):
        run(own, out)


def test_a_finished_run_whose_images_are_gone_is_finished(own, images, tmp_path):
    run(own, tmp_path / "run")
    shutil.rmtree(images)
    assert run(own, tmp_path / "run") == [f"{tmp_path / 'run'} is finished; nothing was trained"]


def test_a_run_that_never_began_takes_the_images_of_now(own, images, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(RuntimeError, match="ended"):
        train(own, out, Runtime(device="cpu"), EndsAtOnce())
    one_more(images)
    run(own, out)
    assert json.loads((out / "data.json").read_text())["images"] == 19


class EndsAtOnce(Reporter):
    def start(self, done, steps, steps_per_epoch):
        raise RuntimeError("ended")


def test_a_run_of_an_older_version_goes_on_and_says_what_it_cannot_know(own, cut, images):
    (cut / "data.json").unlink()
    one_more(images)
    dataset = load_dataset(str(images))
    assert changed_since(RunFolder(cut), dataset) is None
    note = unknown_images_note(RunFolder(cut), dataset)
    assert note == (
        f"{cut} does not say which images it held out (older versions chose others): "
        "it may have been trained on some that it is tested on"
    )
    assert note in run(own, cut)
    assert not (cut / "data.json").exists()  # nobody knows what it began with


def test_what_a_run_is_trained_on_is_kept_beside_its_config(own, cut, images):
    record = json.loads((cut / "data.json").read_text())
    assert len(record.pop("names_sha256")) == 64
    assert record == {
        "classes": ["class0", "class1", "class2"],
        "image_size": [24, 24],
        "channels": 1,
        "unreadable": 0,
        "images": 18,
    }
    dataset = load_dataset(str(images), validation=0.2)
    assert changed_since(RunFolder(cut), dataset) is None
    assert unknown_images_note(RunFolder(cut), dataset) is None
    renamed_image(images)
    changed = changed_since(RunFolder(cut), load_dataset(str(images)))
    assert changed == "some of its images have other names"


def test_a_record_that_is_none_is_told(own, cut):
    (cut / "data.json").write_text('{"classes": ["a"]}')
    with pytest.raises(ValueError, match=r"data.json must be a run's data.json: 'image_size'"):
        run(own, cut)
