"""tools/tune_recipe.py: which runs it plans, and that none starts before all are known to fit."""

import csv
import sys
from dataclasses import asdict, dataclass, replace

import pytest
import torch

from capsroute.experiments import preset
from capsroute.experiments.origins import check_tuning
from capsroute.experiments.studies import OLD_TUNING_COLUMNS, TUNING_COLUMNS
from capsroute.train.config import ModelConfig
from capsroute.train.engine import DivergedError
from capsroute.train.provenance import origin
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
        return dict.fromkeys(TUNING_COLUMNS, "") | row | {"val_accuracy": 90.0}

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


@pytest.fixture
def trained(tool, monkeypatch):
    """Where runs say they were made; those at a learning rate of 9 diverge."""
    here = origin(torch.device("cpu")) | {"commit": "a" * 40, "dirty": False}

    def train(config, *_):
        if config.optim.lr == 9:
            raise DivergedError("the loss is not finite in step 1", [here | {"torch": "2"}, here])
        return here | {"val_accuracy": 94.567, "train_seconds": 81.2}

    monkeypatch.setattr(tool, "train", train)
    return here


def test_rows_say_where_they_were_measured_diverged_or_not(tool, trained, monkeypatch, tmp_path):
    folder = tmp_path / "tuning"
    call(tool, monkeypatch, folder, "optim.lr=9")
    with (folder / "fast_cifar10.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["val_accuracy"] for row in rows] == ["94.57", ""]
    for row in rows:
        assert {name: row[name] for name in ("device", "python", "torch", "capsroute")} == {
            name: trained[name] for name in ("device", "python", "torch", "capsroute")
        }
        assert (row["commit"], row["dirty"]) == ("a" * 40, "False")
    assert check_tuning(tmp_path) == []


def test_a_file_from_before_rows_named_versions_goes_on(tool, trained, monkeypatch, tmp_path):
    path = tmp_path / "tuning" / "fast_cifar10.csv"
    path.parent.mkdir()
    old = dict.fromkeys(OLD_TUNING_COLUMNS, "1") | {"device": "NVIDIA H200", "commit": "b" * 40}
    path.write_text(f"{','.join(old)}\n{','.join(old.values())}\n")
    call(tool, monkeypatch, path.parent)
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["commit"], first["torch"]) == ("b" * 40, "")
    assert (second["commit"], second["torch"]) == ("a" * 40, trained["torch"])
    assert check_tuning(tmp_path) == []


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


def test_a_row_is_known_whatever_does_not_change_it(tool):
    config = preset("fast_cifar10").config

    @dataclass(frozen=True)
    class Later(ModelConfig):
        added: str | None = None

    later = Later(**asdict(config.model))
    for same in (
        replace(config, checkpoint_every=7),
        replace(config, data=replace(config.data, data_root="elsewhere")),
        replace(config, model=later),
    ):
        assert tool.digest(same) == tool.digest(config)
    for other in (
        replace(config, seed=1),
        replace(config, model=replace(later, added="mixed")),
        replace(config, model=replace(config.model, windows="mixed")),
        replace(config, optim=replace(config.optim, nesterov=False)),
    ):
        assert tool.digest(other) != tool.digest(config)
