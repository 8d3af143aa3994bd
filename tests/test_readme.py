"""The Python in README and docs runs as it stands; the README's links lead somewhere."""

import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from capsroute.models import registry
from capsroute.models.pretrained import pretrained_path

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


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_python_of_a_page_runs(page, readers_folder):
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(block, namespace)


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", README))
def test_links(target):
    assert target.startswith("http") or (ROOT / target).exists()


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150
