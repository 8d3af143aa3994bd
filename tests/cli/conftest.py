"""The command line in this process, apart from whatever this machine holds."""

import pytest

from capsroute.cli import main


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    """No dataset of this machine's, a wide terminal, and a folder to write to."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("CAPSROUTE_DATA", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)


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
