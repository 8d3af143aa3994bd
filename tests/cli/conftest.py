"""The command line in this process, apart from whatever this machine holds."""

import pytest
import torch

from capsroute.cli import main
from capsroute.data import load_dataset


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    """No dataset of this machine's, a wide terminal, and a folder to write to."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("CAPSROUTE_DATA", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def few_test_images(monkeypatch):
    """`few_test_images("capsroute.cli.evaluate")`: 60 where that module loads a dataset."""

    def load(*arguments, **options):
        dataset = load_dataset(*arguments, **options)
        object.__setattr__(dataset, "test", dataset.test.subset(torch.arange(60)))
        return dataset

    return lambda module: monkeypatch.setattr(f"{module}.load_dataset", load)


@pytest.fixture
def run(capsys):
    """`run("models", "em_*")` -> (exit status, stdout, stderr)."""

    def call(*arguments):
        try:
            main([str(argument) for argument in arguments])
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call
