"""What `pip install` brings: the weights and their cards, and nothing of the tests."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from capsroute.models.pretrained import FILES

ROOT = Path(__file__).parents[2]
KEPT = ("pyproject.toml", "README.md", "LICENSE", "src", "tests")


@pytest.fixture
def checkout(tmp_path):
    """A copy, since building leaves files in the tree."""
    for name in KEPT:
        source = ROOT / name
        if source.is_dir():
            leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, tmp_path / name, ignore=leave)
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


def test_the_wheel_holds_the_weights_and_no_sample(checkout):
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation")
    subprocess.run([*build, "--outdir", "dist", "."], cwd=checkout, check=True, capture_output=True)
    (wheel,) = (checkout / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for path in FILES.iterdir():
            assert archive.read(f"capsroute/models/files/{path.name}") == path.read_bytes()
    outside = {name for name in names if not name.startswith("capsroute")}
    assert not outside and not {name for name in names if "cifar10.png" in name}
