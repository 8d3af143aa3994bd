"""Jobs through submitit: its local executor runs, interrupts and requeues them like a cluster."""

import os
import re
import signal
import time

import pytest

from capsroute.cli.progress import LineReporter
from capsroute.experiments.evidence import read_evidence
from capsroute.experiments.reproduce import Job
from capsroute.experiments.slurm import Cluster, Task, submit
from capsroute.train.build import Runtime
from capsroute.train.interruption import Interrupted
from capsroute.train.reporting import Reporter
from shell import children_of
from small_experiments import register_tiny

LOCAL = Cluster(local=True, gpus=0, minutes=5)


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)


@pytest.fixture
def long_job(monkeypatch, tmp_path):
    """A run of some seconds, so that there is time to interrupt it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    register_tiny(monkeypatch, tmp_path / "data", steps=600, eval_every=200, checkpoint_every=600)
    return Job.of("tiny", 0, tmp_path / "runs", tmp_path / "results")


@pytest.mark.slow
# the processes are meant to outlive the command that submits them
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_job_that_is_out_of_time_queues_again_and_goes_on(long_job):
    (number,) = submit([long_job], LOCAL, Runtime(device="cpu"), LineReporter)
    metrics = long_job.run / "metrics.jsonl"
    wait_for(lambda: metrics.is_file() and metrics.stat().st_size)
    (task,) = children_of(number)
    os.kill(task, signal.SIGUSR2)  # what Slurm sends before it takes a job's machine away
    wait_for(lambda: long_job.status() == "done")
    log = (long_job.runs / "slurm" / f"{number}_0_log.out").read_text()
    stopped = int(re.search(r"resuming after step (\d+) of 600", log)[1])
    assert "Requeued job" in log and 200 <= stopped < 600
    assert stopped % 200  # saved when it was asked to stop, not at an evaluation before
    steps = [record["step"] for record in read_evidence(long_job.evidence).metrics]
    assert steps == [200, 400, 600]


def test_a_job_that_is_cancelled_is_not_queued_again(monkeypatch, tmp_path):
    register_tiny(monkeypatch, tmp_path / "data")
    job = Job.of("tiny", 0, tmp_path / "runs", tmp_path / "results")
    queued = []
    before = signal.signal(signal.SIGUSR2, lambda signum, frame: queued.append(signum))
    try:
        with pytest.raises(Interrupted):
            Task(job, Runtime(device="cpu"), lambda: SignalAfter(3, signal.SIGTERM))()
        assert job.status() == "cut" and queued == []
        signal.signal(signal.SIGUSR2, lambda signum, frame: queued.append(signum))
        with pytest.raises(Interrupted):
            Task(job, Runtime(device="cpu"), lambda: SignalAfter(6, signal.SIGUSR2))()
        assert queued == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


class SignalAfter(Reporter):
    def __init__(self, step, signum):
        self.when, self.signum = step, signum

    def step(self, done):
        if done == self.when:
            signal.raise_signal(self.signum)


def test_what_is_asked_of_slurm(monkeypatch, tmp_path):
    """The batch file, as submitit hands it to sbatch."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name, answer in (("srun", ""), ("sbatch", "Submitted batch job 17")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {answer}\n")
        (tmp_path / name).chmod(0o755)
    job = Job.of("cnn_cifar10", 1, tmp_path / "runs", tmp_path / "results")
    cluster = Cluster(partition="long", gpus=2, minutes=90, options={"account": "mine"})
    assert submit([job], cluster, Runtime(), Reporter) == ["17"]
    text = (tmp_path / "runs" / "slurm" / "17_submission.sh").read_text()
    for option in ("partition=long", "gpus-per-node=2", "time=90", "account=mine", "requeue"):
        assert f"#SBATCH --{option}\n" in text
    assert "#SBATCH --job-name=cnn_cifar10_seed1\n" in text and "--signal=USR2@90" in text


def test_no_cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    job = Job.of("cnn_cifar10", 1, tmp_path / "runs", tmp_path / "results")
    with pytest.raises(ValueError, match="must be given on a Slurm cluster") as caught:
        submit([job], Cluster(), Runtime(), Reporter)
    assert "\n" not in str(caught.value)
