"""The Python in README and docs runs as it stands; the README's links lead somewhere."""

import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_python_of_a_page_runs(page):
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(block, namespace)


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", README))
def test_links(target):
    assert target.startswith("http") or (ROOT / target).exists()


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150
