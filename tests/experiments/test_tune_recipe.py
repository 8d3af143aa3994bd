"""tools/tune_recipe.py: which runs it plans, and that none starts before all are known to fit."""

import sys
from dataclasses import replace

import pytest

from capsroute.experiments import preset
from load_tool import load_tool


@pytest.fixture
def tool():
    return load_tool("tune_recipe")


@pytest.fixture
def started(tool, monkeypatch):
    """Configs that would have been trained."""
    configs = []

    def run(config, change):
        configs.append(config)
        row = {"change": change or "as it is", "config": tool.digest(config)}
        return dict.fromkeys(tool.COLUMNS, "") | row | {"val_accuracy": 90.0}

    monkeypatch.setattr(tool, "run", run)
    return configs


def call(tool, monkeypatch, tmp_path, *arguments, name="fast_cifar10"):
    command = ["tune_recipe.py", name, *arguments, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    tool.main()


def test_changes_are_tried_once_on_a_validation_split(tool, started, monkeypatch, tmp_path):
    change = "data.cutmix=0.5 optim.lr=0.2 batch_size=256"
    for _ in range(2):  # the second time all rows are there
        call(tool, monkeypatch, tmp_path, change, "--epochs", "7")
    plain, changed = started
    own = preset("fast_cifar10").config
    assert plain.optim == own.optim and plain.data.cutmix == own.data.cutmix
    assert (changed.data.cutmix, changed.optim.lr, changed.batch_size) == (0.5, 0.2, 256)
    assert {(each.data.validation, each.epochs) for each in started} == {(0.2, 7)}
    rows = (tmp_path / "fast_cifar10.csv").read_text().splitlines()
    assert len(rows) == 3 and rows[2].startswith(change)


def test_as_it_is_means_another_run_once_the_preset_has_changed(
    tool, started, monkeypatch, tmp_path
):
    call(tool, monkeypatch, tmp_path)
    other = replace(preset("fast_cifar10").config, batch_size=64)
    monkeypatch.setattr(tool, "preset", lambda name: replace(preset(name), config=other))
    call(tool, monkeypatch, tmp_path)
    assert [config.batch_size for config in started] == [128, 64]


def test_the_learning_rate_of_a_shorter_run_falls_at_the_same_shares_and_rises_as_long(
    tool, started, monkeypatch, tmp_path
):
    change = "optim.milestones=[3,4]"
    options = (change, "--epochs", "70")
    call(tool, monkeypatch, tmp_path, *options, name="dynamic_vector_multimnist_r3")
    assert [each.optim.milestones for each in started] == [(30, 50), (3, 4)]
    assert [each.optim.warmup * each.epochs for each in started] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    "change", ["data.cutmx=0.5", "optim.lr=fast", "none.lr=1", "data.cutmix=7"]
)
def test_a_mistake_is_named_before_anything_is_trained(
    tool, started, monkeypatch, tmp_path, capsys, change
):
    with pytest.raises(SystemExit):
        call(tool, monkeypatch, tmp_path, "optim.lr=0.2", change)
    assert not started and not list(tmp_path.iterdir())
    named = change if "7" not in change else "`cutmix` must be in [0, 1], got 7"
    assert named in capsys.readouterr().err
