"""The Python in README and docs runs as it stands; the README's links lead somewhere."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from capsroute.experiments import list_experiments, preset
from capsroute.experiments.markers import MARKERS
from capsroute.inference import Predictor
from capsroute.models import registry
from capsroute.models.sources import pretrained_path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_python_blocks_run_one_after_another():
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 2
    namespace = {}
    for block in blocks:
        exec(block, namespace)
    assert namespace["scores"].shape == (8, 10)
    assert namespace["classes"].shape == (2, 10, 16)


@pytest.fixture
def readers_folder(tmp_path, monkeypatch):
    """Where pages suppose their reader: beside a trained run and pictures in `my_images`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))  # pages register models
    run = tmp_path / "runs" / "inverted_small_multimnist"
    run.mkdir(parents=True)
    shutil.copy(pretrained_path("inverted_small_multimnist"), run / "model.safetensors")
    for label in ("cat", "dog", "fox"):
        (tmp_path / "my_images" / label).mkdir(parents=True)
        for index in range(5):
            picture = Image.new("RGB", (40, 36), (50 * index, 90, 200))
            picture.save(tmp_path / "my_images" / label / f"{index}.png")


def unusual_pictures():
    """Names of files: transparent, of 16 bits, and a large JPEG that EXIF says to turn."""
    ramp = np.linspace(0, 65535, 60 * 90).reshape(60, 90)
    grey = (ramp // 257).astype(np.uint8)
    see_through = np.stack([grey, grey, grey.T.reshape(60, 90), grey[::-1]], axis=-1)
    exif = Image.Exif()
    exif[0x0112] = 6
    large = Image.fromarray(see_through[..., :3]).resize((900, 600))
    Image.fromarray(see_through).save("transparent.png")
    Image.fromarray(ramp.astype(np.uint16)).save("16_bits.png")
    large.save("turned.jpg", exif=exif)
    return ["transparent.png", "16_bits.png", "turned.jpg"]


def check_the_onnx_recipe(namespace):
    """Its pictures become what `capsroute predict` makes of them, and so does the answer."""
    predictor = Predictor.load("digits.onnx")
    for name in unusual_pictures():
        images = namespace["as_input"](Image.open(name))
        np.testing.assert_array_equal(images[0], predictor.prepare(Image.open(name)))
        (scores,) = namespace["session"].run(["scores"], {"images": images})
        (answer,) = predictor.predict([Image.open(name)], top_k=10)
        expected = [dict(answer.ranked)[digit] for digit in "0123456789"]
        np.testing.assert_allclose(1 / (1 + np.exp(-scores[0])), expected, rtol=1e-4, atol=1e-6)


CHECKS = {"predict-export": check_the_onnx_recipe}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_python_of_a_page_runs(page, readers_folder):
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(block, namespace)
    if page.stem in CHECKS:
        CHECKS[page.stem](namespace)


@pytest.mark.parametrize("target", re.findall(r"(?:\]\(|src=\")([^)#\"]+)", README))
def test_links(target):
    assert target.startswith("http") or (ROOT / target).exists()


PAPER = {
    f"{printed:.2f}" for name in list_experiments() if (printed := preset(name).paper_accuracy)
}
OTHERS = {
    "3.11": "Python",
    "2.11": "PyTorch",
    "2.0": "the licence",
    "2.3": "images of 10,000 that have the two most frequent digits, in percent: no measurement",
}
"""Numbers that are no result of ours."""


def unmarked(page):
    """Decimal numbers that no marker precedes, without code and links."""
    for marker in MARKERS.values():
        page = marker.sub("", page)
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    page = re.sub(r"\]\([^)]*\)|src=\"[^\"]*\"|`[^`\n]*`|<!--.*?-->", " ", page)
    return [number for number in re.findall(r"\d[\d,]*\.\d+", page) if number not in PAPER]


def test_every_number_that_was_measured_is_marked():
    assert set(unmarked(README)) == OTHERS.keys()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It gets 94.48 %.", ["94.48"]),
        ("| 94.48 | 95.14 | 1,234.5 |", ["94.48", "1,234.5"]),
        ("<!-- results: fast_cifar10 test_accuracy_last mean -->95.78 ± 0.15", ["0.15"]),
        ("<!-- bench: cnn_cifar10 train median_ms -->\n1.6 ms and 2.5", ["2.5"]),
        ("<!-- results: fast_cifar10 test_accuracy_last median -->95.78", ["95.78"]),
        ("`optim.lr=0.2` [here](docs/0.5.md)\n```sh\nsleep 1.5\n```", []),
    ],
)
def test_what_counts_as_unmarked(text, found):
    assert unmarked(text) == found


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150
