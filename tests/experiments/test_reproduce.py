"""What is missing runs, what was cut goes on, what is done stays; the clock stops a run cleanly."""

import json
import shutil
import signal
import time
from unittest.mock import Mock

import pytest
import torch

from capsroute.experiments import list_experiments
from capsroute.experiments.evidence import read_evidence
from capsroute.experiments.reproduce import Job, jobs, reproduce, select
from capsroute.train.build import Runtime
from capsroute.train.engine import DivergedError
from capsroute.train.interruption import Interrupted, stop_after
from capsroute.train.reporting import Reporter
from small_experiments import register_tiny, write_evidence

CPU = Runtime(device="cpu")


class StopAt(Reporter):
    """Sends this process a signal after a step, as a scheduler would."""

    def __init__(self, step, signum=signal.SIGTERM):
        self.when, self.signum, self.resumed_after = step, signum, None

    def start(self, done, steps, steps_per_epoch):
        self.resumed_after = done

    def step(self, done):
        if done == self.when:
            signal.raise_signal(self.signum)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    register_tiny(monkeypatch, tmp_path / "data")
    return Job.of("tiny", 3, tmp_path / "runs", tmp_path / "results")


def test_a_run_ends_with_its_evidence(tiny):
    assert tiny.status() == "not run"
    assert reproduce(tiny, CPU, Reporter()) == "done" == tiny.status()
    names = {path.name for path in tiny.evidence.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "summary.json"}
    assert tiny.evidence.parts[-2:] == ("tiny", "seed3") and tiny.run.name == "tiny_seed3"
    for name in names:
        assert (tiny.evidence / name).read_bytes() == (tiny.run / name).read_bytes()
    result = read_evidence(tiny.evidence)
    assert result.seed == result.summary["seed"] == 3 and not result.departures()
    assert [record["step"] for record in result.metrics] == [6, 12]


def test_a_run_that_was_cut_goes_on_from_three_files_carried_elsewhere(tiny, tmp_path):
    with pytest.raises(Interrupted):
        reproduce(tiny, CPU, StopAt(7))
    assert tiny.status() == "cut" and not tiny.evidence.exists()
    there = Job(tiny.config, tmp_path / "carried", tmp_path / "their_results")
    there.run.mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl", "state.pt"):
        shutil.copy(tiny.run / name, there.run / name)
    watching = StopAt(None)
    assert there.reached() == "epoch 1.4"  # seven steps, of five in an epoch
    assert reproduce(there, CPU, watching) == "done" and watching.resumed_after == 7
    reproduce(tiny, CPU, Reporter())
    carried, stayed = (read_evidence(job.evidence).metrics for job in (there, tiny))
    assert [record["test_loss"] for record in carried] == [r["test_loss"] for r in stayed]


def test_how_far_a_run_came_that_was_cut(tiny):
    with pytest.raises(Interrupted):
        reproduce(tiny, CPU, StopAt(4))  # before the first evaluation, in step 6
    assert tiny.reached() == "step 4"
    with pytest.raises(Interrupted):
        reproduce(tiny, CPU, StopAt(10))
    assert tiny.reached() == "epoch 2"
    state = tiny.run / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])  # which the run will report when it goes on
    assert tiny.reached() == "epoch 1.2"
    state.unlink()
    assert tiny.reached() == "epoch 1.2"
    (tiny.run / "metrics.jsonl").unlink()
    assert tiny.reached() == "step 0"


def test_a_resumed_run_that_diverged_names_where_it_began(tiny, monkeypatch, tmp_path):
    job = Job(tiny.config, tmp_path / "runs", tmp_path / "results")
    began, here = {"device": "elsewhere"}, {"device": "here"}
    error = DivergedError("not finite", [began, here])
    monkeypatch.setattr("capsroute.experiments.reproduce.train", Mock(side_effect=error))
    job.run.mkdir(parents=True)
    (job.run / "config.json").write_text(job.config.to_json())
    (job.run / "metrics.jsonl").write_text("")
    assert reproduce(job, CPU, Reporter()) == "diverged"
    evidence = json.loads((job.evidence / "diverged.json").read_text())
    assert evidence["device"] == "here" and evidence["resumed_from"] == [began]


def test_a_run_that_diverged_has_ended(tiny, monkeypatch, tmp_path):
    job = Job(tiny.config, tmp_path / "runs", tmp_path / "results")
    nothing = torch.tensor(float("nan"))
    monkeypatch.setattr("capsroute.losses.cross_entropy", lambda s, *_, **__: s.sum() * nothing)
    assert reproduce(job, CPU, Reporter()) == "diverged" == job.status()
    evidence = json.loads((job.evidence / "diverged.json").read_text())
    assert "not finite" in evidence["error"] and evidence["seed"] == 3 and evidence["torch"]
    assert read_evidence(job.evidence).diverged


def test_the_clock_stops_a_run_as_a_signal_does(monkeypatch, tmp_path):
    register_tiny(monkeypatch, tmp_path / "data", steps=100_000, eval_every=100_000)
    job = Job.of("tiny", 0, tmp_path / "runs", tmp_path / "results")
    before = signal.getsignal(signal.SIGALRM)
    started = time.monotonic()
    with stop_after(1.0), pytest.raises(Interrupted) as stopped:
        reproduce(job, CPU, Reporter())
    assert stopped.value.signum == signal.SIGALRM and job.status() == "cut"
    assert time.monotonic() - started < 10
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_alarm_that_rings_between_runs_rings_again_in_the_next(monkeypatch, tmp_path):
    register_tiny(monkeypatch, tmp_path / "data", steps=100_000, eval_every=100_000)
    job = Job.of("tiny", 0, tmp_path / "runs", tmp_path / "results")
    with stop_after(0.01), pytest.raises(Interrupted):
        time.sleep(0.1)
        reproduce(job, CPU, Reporter())


def test_names_and_patterns_keep_their_order():
    chosen = select(["fast_cifar100", "inverted_resnet_cifar10_r*", "fast_*"])
    assert chosen[0] == "fast_cifar100" and chosen[-1] == "fast_cifar10" and len(chosen) == 4
    assert select(["*"]) == list_experiments()
    with pytest.raises(ValueError, match="no experiment matches 'fast_cifar'; did you mean"):
        select(["fast_cifar"])


def test_a_job_for_every_seed(tmp_path):
    made = jobs(["fast_cifar10", "cnn_cifar10"], [0, 2], tmp_path / "runs", tmp_path / "results")
    names = ["fast_cifar10_seed0", "fast_cifar10_seed2", "cnn_cifar10_seed0", "cnn_cifar10_seed2"]
    assert [job.name for job in made] == names
    write_evidence(tmp_path / "results", "fast_cifar10", [90.0, 91.0], seed=2)
    assert [job.status() for job in made] == ["not run", "done", "not run", "not run"]
