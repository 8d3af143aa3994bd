"""Staged steps against steps fed one by one; on a GPU, graphs against no graphs."""

import dataclasses

import pytest
import torch

from capsroute.train import build
from capsroute.train.build import Runtime
from capsroute.train.capture import AHEAD, Graphs
from capsroute.train.checkpoint import RunFolder
from capsroute.train.distributed import Processes
from capsroute.train.engine import train
from capsroute.train.interruption import Interrupted
from capsroute.train.metrics import Glance, MetricsFile
from capsroute.train.reporting import Reporter


def weights(out):
    return RunFolder(out).load_state()["model"]


def losses(out):
    return [record["train_loss"] for record in MetricsFile(out / "metrics.jsonl").read()]


@pytest.fixture
def staged(monkeypatch):
    """Makes the CPU go through the staged steps, whose graphs are plain functions there."""
    monkeypatch.setattr(build, "capture_note", lambda split, job, runtime: None)


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2, "clip": 1.0, "warmup": 0.2}])
def test_staged_steps_change_nothing(config, tmp_path, monkeypatch, changes):
    optim = dataclasses.replace(config.optim, **changes)
    long = dataclasses.replace(
        config, steps=AHEAD + 9, eval_every=20, checkpoint_every=0, optim=optim
    )
    runtime = Runtime("cpu")
    train(long, tmp_path / "fed", runtime, Reporter())
    monkeypatch.setattr(build, "capture_note", lambda split, job, runtime: None)
    train(long, tmp_path / "staged", runtime, Reporter())
    one, other = weights(tmp_path / "fed"), weights(tmp_path / "staged")
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert losses(tmp_path / "staged") == losses(tmp_path / "fed")


def test_staged_steps_resume_in_the_middle(config, tmp_path, staged):
    runtime = Runtime("cpu")
    long = dataclasses.replace(config, steps=12, eval_every=6, checkpoint_every=4)

    class StopAtSeven(Reporter):
        def step(self, done):
            if done == 7:
                import signal

                signal.raise_signal(signal.SIGTERM)

    train(long, tmp_path / "whole", runtime, Reporter())
    with pytest.raises(Interrupted):
        train(long, tmp_path / "cut", runtime, StopAtSeven())
    train(long, tmp_path / "cut", runtime, Reporter())
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_function_stays_a_function_on_a_cpu():
    def function():
        raise AssertionError

    assert Graphs(torch.device("cpu")).replay(function) is function


def test_a_glance_waits_for_nothing_and_needs_not_to_on_a_cpu():
    assert Glance()(torch.tensor([1.0, 2.0])) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("asked", "device", "world", "decided"),
    [
        ("auto", "cuda", 1, "yes"),
        ("auto", "cuda", 2, "no"),
        ("auto", "cpu", 1, "no"),
        ("yes", "cpu", 1, "yes"),
        ("no", "cuda", 1, "no"),
    ],
)
def test_models_are_compiled_on_one_gpu_unless_said_otherwise(asked, device, world, decided):
    job = Processes(0, world, torch.device(device))
    assert Runtime(compile=asked).resolve(job).compile == decided


@pytest.mark.gpu
class TestOnTheCard:
    @pytest.fixture
    def config(self, config):
        """Poses that start at zero: what is compared shall depend on no random stream."""
        model = dataclasses.replace(config.model, initial_poses=None)
        return dataclasses.replace(config, model=model)

    @pytest.fixture(autouse=True)
    def exact_convolutions(self, monkeypatch):
        """Two runs must not differ by the algorithms that cuDNN happens to find fastest."""
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)

    @pytest.fixture
    def runtimes(self):
        return Runtime("cuda", compile="no"), Runtime("cuda", compile="no", capture=False)

    @pytest.mark.parametrize("optimizer", ["sgd", "adam", "muon"])
    def test_graphs_follow_the_plain_steps(self, config, tmp_path, runtimes, optimizer):
        optim = dataclasses.replace(
            config.optim, optimizer=optimizer, lr=1e-3, ema=0.9, lr_schedule="cosine"
        )
        long = dataclasses.replace(config, steps=AHEAD + 9, eval_every=20, optim=optim)
        for name, runtime in zip(("graphs", "plain"), runtimes, strict=True):
            train(long, tmp_path / name, runtime, Reporter())
        assert losses(tmp_path / "graphs") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
    @pytest.mark.filterwarnings("ignore::UserWarning:torch")
    @pytest.mark.parametrize("optimizer", ["sgd", "adam", "muon"])
    def test_what_is_compiled_follows_too(self, config, tmp_path, runtimes, optimizer):
        """As a run is by default: steps and evaluation compiled, then captured."""
        optim = dataclasses.replace(
            config.optim, optimizer=optimizer, lr=1e-3, ema=0.9, lr_schedule="cosine"
        )
        long = dataclasses.replace(config, steps=40, eval_every=10, optim=optim)
        train(long, tmp_path / "default", Runtime("cuda"), Reporter())
        train(long, tmp_path / "plain", runtimes[1], Reporter())
        assert losses(tmp_path / "default") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode")
    def test_nothing_waits_inside_an_epoch(self, config, tmp_path, runtimes, monkeypatch):
        """Every wait for the device between warm-up and evaluation is an error."""
        long = dataclasses.replace(config, steps=200, eval_every=200, checkpoint_every=200)

        class Strict(Reporter):
            def step(self, done):
                if done == 10:
                    torch.cuda.set_sync_debug_mode("error")
                if done == 190:
                    torch.cuda.set_sync_debug_mode("default")

        try:
            train(long, tmp_path / "run", runtimes[0], Strict())
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_resumes(self, config, tmp_path, runtimes):
        long = dataclasses.replace(config, steps=24, eval_every=6, checkpoint_every=6)

        class StopAtNine(Reporter):
            def step(self, done):
                if done == 9:
                    import signal

                    signal.raise_signal(signal.SIGTERM)

        train(long, tmp_path / "whole", runtimes[0], Reporter())
        with pytest.raises(Interrupted):
            train(long, tmp_path / "cut", runtimes[0], StopAtNine())
        train(long, tmp_path / "cut", runtimes[0], Reporter())
        assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)
