"""The Triton kernels on a CPU, at tiny odd shapes: output and every gradient against fp64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
CHECKS = Path(__file__).with_name("triton_interpreter_checks.py")


def test_kernels_in_the_interpreter():
    # triton reads the variable when it is imported, so the checks run in a process of their own
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(CHECKS)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_the_library_does_not_import_triton():
    code = (
        "import sys, capsroute.ops.inverted, capsroute.ops.inverted.triton\n"
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
