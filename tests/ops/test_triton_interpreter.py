"""The Triton kernels on a CPU, at tiny odd shapes: output and every gradient against fp64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPTS = ("triton_interpreter_checks.py", "norm_checks.py", "vote_checks.py")


@pytest.fixture(scope="module")
def started():
    """All scripts at once. Triton reads the variable when it is imported: in processes of theirs.

    A thread each: two for these tiny tensors would wait for one another.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    folder = Path(__file__).parent
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = {
        name: subprocess.Popen([sys.executable, folder / name], env=environment, **pipes)
        for name in SCRIPTS
    }
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", SCRIPTS)
def test_kernels_in_the_interpreter(started, name):
    output, _ = started[name].communicate(timeout=300)
    assert started[name].returncode == 0, output
