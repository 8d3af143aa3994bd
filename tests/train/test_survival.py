"""Runs that are killed go on as if nothing had happened; so do runs of several processes."""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from commands import metrics, options, run, start

from capsroute.cli import main
from shell import children_of


def begun(arguments, processes=1):
    """A run that has said its first word: Python and PyTorch are loaded, its work begins."""
    process = start(arguments, processes)
    assert process.stdout.readline()
    return process


def kill_after(arguments, seconds):
    """Start the run and kill it in its work; returns whether it had finished before."""
    process = begun(arguments)
    try:
        process.communicate(timeout=seconds)
        return True
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return False


def test_killed_at_ten_random_moments(image_folder, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = begun(options(image_folder, whole))
    started = time.monotonic()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    duration = time.monotonic() - started
    seed = random.randrange(10**6)
    moments = random.Random(seed)
    kills = after_a_checkpoint = 0
    while kills < 10 or after_a_checkpoint < 3:
        finished = kill_after(options(image_folder, killed), moments.uniform(0, duration))
        kills += not finished
        after_a_checkpoint += not finished and (killed / "state.pt").exists()
        if finished:  # too late to be killed: that run was whole, begin another
            assert_same(killed, whole, seed)
            shutil.rmtree(killed)
    run(options(image_folder, killed))
    assert_same(killed, whole, seed)


def assert_same(out, whole, seed):
    """The same metrics but for times, the same weights to the bit, the same files."""
    assert metrics(out) == metrics(whole), f"seed {seed}"
    weights = [(folder / "model.safetensors").read_bytes() for folder in (out, whole)]
    assert weights[0] == weights[1], f"seed {seed}"
    names = [{path.name for path in folder.iterdir()} for folder in (out, whole)]
    assert names[0] == names[1], f"seed {seed}"


def wait_until_saved(process, folder):
    while not (folder / "state.pt").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def test_a_signal_saves_and_says_how_to_resume(image_folder, tmp_path):
    statuses = {signal.SIGTERM: 143, signal.SIGINT: 130}
    endless = {"steps": 100_000, "eval_every": 100_000}
    processes = {
        signum: start(options(image_folder, tmp_path / signum.name, **endless))
        for signum in statuses
    }
    for signum, process in processes.items():
        wait_until_saved(process, tmp_path / signum.name)
        process.send_signal(signum)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == statuses[signum]
        assert f"Resume with capsroute train --data {image_folder}" in output


def test_two_processes_reach_the_losses_of_one(image_folder, tmp_path):
    changes = {"steps": 12, "eval_every": 3, "optimizer": "sgd", "lr": 0.05, "batch_size": 7}
    main(["train", *options(image_folder, tmp_path / "one", **changes)])
    run(options(image_folder, tmp_path / "two", **changes), processes=2)
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert [record["step"] for record in two] == [3, 6, 9, 12]
    for alone, together in zip(one, two, strict=True):
        assert together["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-4)
        assert together["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-4)


def test_two_processes_stopped_between_evaluations_go_on(image_folder, tmp_path):
    """Torchrun passes the signal on; sums over both processes survive in one checkpoint."""
    changes = {"steps": 240, "eval_every": 80, "checkpoint_every": 100_000, "batch_size": 7}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(options(image_folder, whole, **changes), processes=2)
    job = start(options(image_folder, cut, **changes), processes=2)
    lines = cut / "metrics.jsonl"
    while not (lines.exists() and lines.stat().st_size):
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    assert job.returncode != 0 and output.count("Resume with the same torchrun command") == 1
    assert 80 < torch.load(cut / "state.pt", weights_only=True)["step"] < 240
    run(options(image_folder, cut, **changes), processes=2)
    assert metrics(cut) == metrics(whole)


def test_a_killed_worker_ends_the_job_and_the_same_command_resumes_it(image_folder, tmp_path):
    arguments = options(image_folder, tmp_path / "run", steps=200, checkpoint_every=10)
    job = start(arguments, processes=2)
    wait_until_saved(job, tmp_path / "run")
    os.kill(children_of(job.pid)[-1], signal.SIGKILL)
    job.communicate(timeout=120)
    assert job.returncode != 0
    output = run(arguments, processes=2)
    assert "resuming after step" in output
    assert [record["step"] for record in metrics(tmp_path / "run")] == list(range(10, 201, 10))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux lists its threads")
@pytest.mark.parametrize("changes", [{}, {"lr": 1e30}], ids=["finished", "diverged"])
def test_no_thread_outlives_a_job_of_two(image_folder, tmp_path, changes):
    """One that lets go of a tensor while Python shuts down aborts its process, now and then."""
    program = [str(Path(__file__).with_name("threads_left.py"))]
    arguments = options(image_folder, tmp_path / "run", steps=4, eval_every=4, **changes)
    output = run(arguments, processes=2, program=program)
    assert output.count("left: []") == 2, output
    assert ("not finite" in output) is bool(changes)
