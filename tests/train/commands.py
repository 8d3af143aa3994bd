"""`capsroute train` in processes of its own, as a user starts it. Not a test module."""

import json
import os
import subprocess
import sys

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
ENVIRONMENT["PYTHONFAULTHANDLER"] = "1"  # a process that aborts says where
TIMES = ("seconds", "images_per_second")


def options(folder, out, **changes):
    """A run of some 40 steps on a folder of small images."""
    chosen = {
        "data": folder,
        "out": out,
        "experiment": "tiny",
        "image_size": 24,
        "steps": 40,
        "batch_size": 8,
        "eval_every": 10,
        "checkpoint_every": 4,
        "eval_batch_size": 16,
        "device": "cpu",
        **changes,
    }
    return [part for key, v in chosen.items() for part in (f"--{key.replace('_', '-')}", str(v))]


def start(arguments, processes=1, program=("-m", "capsroute")):
    launcher = [*program]
    if processes > 1:
        several = f"--nproc-per-node={processes}"
        launcher = ["-m", "torch.distributed.run", "--standalone", several, *program]
    return subprocess.Popen(
        [sys.executable, *launcher, "train", *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(arguments, processes=1, **options):
    process = start(arguments, processes, **options)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def metrics(out):
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in TIMES} for record in records]
