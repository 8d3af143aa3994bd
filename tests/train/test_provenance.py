"""Where a result was made: the device in words, the commit from git or as it was told."""

import pytest
import torch

from capsroute import create_model
from capsroute.train import provenance
from capsroute.train.config import Config
from capsroute.train.provenance import device_name, origin, summarize, versions
from shell import git

TOLD = "0123456789" * 4


@pytest.mark.parametrize(("threads", "words"), [(1, "CPU, 1 thread"), (3, "CPU, 3 threads")])
def test_a_cpu_is_named_with_its_threads(monkeypatch, threads, words):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert device_name(torch.device("cpu")).endswith(words)


def test_the_last_epoch_and_the_best_are_told_apart():
    cpu = torch.device("cpu")
    common = {"epoch": 1, "step": 9, "seconds": 2.0, "images_per_second": 4.0}
    records = [
        {**common, "test_accuracy": test, "val_accuracy": val}
        for test, val in ((70.0, 60.0), (90.0, 80.0), (75.0, 65.0))
    ]
    model = create_model("inverted_small_multimnist")
    summary = summarize(Config(), model, records, cpu, [origin(cpu)])
    assert (summary["test_accuracy_last"], summary["test_accuracy_best"]) == (75.0, 90.0)
    assert summary["val_accuracy"] == 65.0


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in a folder without git, with this module in it, and a commit that was told."""
    package = tmp_path / "src" / "capsroute"
    for name in ("train/provenance.py", "models/base.py"):
        (package / name).parent.mkdir(parents=True)
        (package / name).write_text("")
    monkeypatch.setattr(provenance, "__file__", str(package / "train" / "provenance.py"))
    monkeypatch.setenv("CAPSROUTE_COMMIT", TOLD)
    return package


def commit_and_changes():
    found = versions()
    return found["commit"], found["dirty"]


def test_git_knows_better_than_what_was_told(package, tmp_path):
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "results").write_text("beside the package")
    assert commit_and_changes() == (commit, False)
    (package / "models" / "base.py").write_text("changed")
    assert commit_and_changes() == (commit, True)


def test_without_git_the_commit_is_what_was_told(package, tmp_path, monkeypatch):
    assert commit_and_changes() == (TOLD, None)
    monkeypatch.setenv("PATH", str(tmp_path))  # not even the program
    assert commit_and_changes() == (TOLD, None)
    monkeypatch.delenv("CAPSROUTE_COMMIT")
    assert commit_and_changes() == (None, None)


def test_a_repository_around_an_installed_package_is_not_its_own(package, tmp_path):
    (tmp_path / ".gitignore").write_text("src\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".gitignore")
    git(tmp_path, "commit", "--quiet", "--message", "somebody else's")
    assert commit_and_changes() == (TOLD, None)
