"""`capsroute --import MODULE`: models of one's own on the command line."""

import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from capsroute.experiments import presets
from capsroute.models import registry

PAGE = Path(__file__).parents[2] / "docs" / "new-routing.md"


@pytest.fixture(autouse=True)
def as_a_new_process(monkeypatch):
    """What a command imports and registers is gone with its process."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(presets, "_PRESETS", dict(presets._PRESETS))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for module in ("my_routing", "my_presets"):
        sys.modules.pop(module, None)


@pytest.fixture
def my_routing(tmp_path):
    """The page's code as its reader's module."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "my_routing.py").write_text("\n".join(code))


def test_a_routing_of_ones_own_in_every_command(my_routing, run, tmp_path):
    for name in ("a/0", "a/1", "b/0", "b/1"):
        path = tmp_path / "images" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (36, 36), 40).save(path)
    own = ("--import", "my_routing")
    training = ("--data", "images", "--model", "hesitant_digits", "--steps", 2)
    status, out, err = run(*own, "train", *training, "--out", "run")
    assert status == 0, err
    assert "capsroute --import my_routing predict run IMAGE" in out
    assert run("--import=my_routing", "models", "hesitant*")[0] == 0
    for command in (
        ("predict", "run", "images/a/0.png"),
        ("explain", "run", "images/a/0.png", "--out", "explained"),
        ("export", "run", "--to", "torch-export"),
    ):
        status, _, err = run(*own, *command)
        assert status == 0, (command, err)
    assert any((tmp_path / "explained").iterdir())


def test_a_preset_of_ones_own_is_repeated_and_reported(my_routing, run, tmp_path, few_test_images):
    few_test_images("capsroute.train.build")
    (code,) = re.findall(r'```python title="my_presets.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_presets.py").write_text(code.replace("steps=1000", "steps=2"))
    own = ("--import", "my_presets")
    status, _, err = run(*own, "reproduce", "trial", "--seeds", 0, 1)
    assert status == 0, err
    status, _, err = run(*own, "report")
    assert status == 0, err
    assert "[trial](results/trial)" in (tmp_path / "RESULTS.md").read_text()


def test_options_that_a_model_of_ones_own_does_not_take(my_routing, run):
    arguments = ("train", "--model", "hesitant_digits", "--no-layer-norm", "--out", "run")
    status, _, err = run("--import", "my_routing", *arguments)
    assert status == 2 and "hesitant_digits has no option `--layer-norm`" in err


def test_a_model_of_a_module_that_was_not_imported(my_routing, run):
    assert run("--import", "my_routing", "models", "hesitant_digits")[0] == 0
    registry._REGISTRY.pop("hesitant_digits")
    Image.new("L", (36, 36)).save("image.png")
    status, _, err = run("predict", "hesitant.safetensors", "image.png")
    assert status == 2 and err.count("\n") == 1
    assert "'hesitant_digits', which no imported module registers" in err
    assert "`capsroute --import MODULE`" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--import", "my_roting", "models"), "ModuleNotFoundError: No module named 'my_roting'"),
        (("--import", "broken", "models"), "`--import` broken: ZeroDivisionError"),
        (("models", "--import", "broken"), "capsroute --import MODULE models"),
        (("--import",), "`--import` must be followed by a module's name"),
        (("--import", "--help"), "`--import` must be followed by a module's name"),
    ],
)
def test_modules_that_cannot_be_imported_are_one_line(run, tmp_path, arguments, message):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    status, _, err = run(*arguments)
    assert status == 2 and message in err and err.count("\n") == 1
