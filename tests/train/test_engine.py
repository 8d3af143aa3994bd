"""The engine: what a run leaves behind, and that it goes on where it stopped."""

import dataclasses
import json
import shutil
import signal

import pytest
import torch
from commands import metrics

from capsroute import create_model
from capsroute.data import Augment
from capsroute.models.factory import load_model
from capsroute.models.weights import read_metadata
from capsroute.train import build
from capsroute.train.build import Runtime, batch_norm_note, build_model, load_data, train_batches
from capsroute.train.checkpoint import RunFolder
from capsroute.train.config import DataConfig, ModelConfig, OptimConfig, load_config
from capsroute.train.distributed import Processes
from capsroute.train.engine import DivergedError, train
from capsroute.train.held_out import HeldOut
from capsroute.train.interruption import Interrupted
from capsroute.train.metrics import MetricsFile
from capsroute.train.optim import learning_rate
from capsroute.train.reporting import Reporter
from capsroute.train.step import TrainStep

CPU = Runtime(device="cpu")


def run(config, out, reporter=None):
    return train(config, out, CPU, reporter or Reporter())


def weights(out):
    return (out / "model.safetensors").read_bytes()


class StopAt(Reporter):
    """Raises the signal of a user at one step."""

    def __init__(self, step, signum=signal.SIGTERM):
        self.at, self.signum = step, signum

    def step(self, done):
        if done == self.at:
            signal.raise_signal(self.signum)


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """The run that nothing stopped, to be compared with; whoever changes it takes `finished`."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(config, out)
    return out


@pytest.fixture
def finished(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "finished")


def test_checkpoints_come_when_they_are_due_and_not_at_every_evaluation(
    config, tmp_path, monkeypatch
):
    saved = []
    original = RunFolder.save_state

    def save_state(self, state):
        saved.append(state["step"])
        original(self, state)

    monkeypatch.setattr(RunFolder, "save_state", save_state)
    long = dataclasses.replace(config, steps=10, eval_every=2, checkpoint_every=4)
    run(long, tmp_path / "run")
    assert saved == [4, 8, 10] and len(metrics(tmp_path / "run")) == 5


def test_a_run_leaves_its_files(config, tmp_path):
    out = tmp_path / "run"
    summary = run(config, out)
    files = {path.name for path in out.iterdir()}
    assert files == {
        "config.json",
        "data.json",
        "metrics.jsonl",
        "model.safetensors",
        "state.pt",
        "summary.json",
        "curves.png",
    }
    assert load_config(out / "config.json") == config
    records = metrics(out)
    assert [record["step"] for record in records] == [6, 12]
    assert all(record["val_accuracy"] is not None for record in records)
    used = [learning_rate(config.optim, step, 12, 1) for step in (5, 11)]
    assert [record["lr"] for record in records] == used
    assert json.loads((out / "summary.json").read_text()) == summary
    for key in ("experiment", "model", "dataset", "iterations", "seed", "params", "epochs"):
        assert summary[key] is not None, key
    assert summary["test_accuracy_best"] >= summary["test_accuracy_last"]
    resolved = summary["resolved"]  # what the config leaves open
    assert "resumed_from" not in summary
    assert config.optim.loss == "auto" and resolved["loss"] == "cross_entropy"
    assert (resolved["device"], resolved["compile"], resolved["capture"]) == ("cpu", False, False)
    assert resolved["processes"] == 1 and len(resolved["image_size"]) == 2
    model = load_model(out / "model.safetensors")
    assert model.class_names == ["class0", "class1", "class2"]
    assert read_metadata(out / "model.safetensors")["model"] == "inverted_small_multimnist"


def test_a_finished_run_is_not_run_again(config, finished):
    before = weights(finished)
    assert run(config, finished, StopAt(1)) == json.loads((finished / "summary.json").read_text())
    assert weights(finished) == before


@pytest.mark.parametrize("stop", [1, 4, 5, 6, 9, 11])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_goes_on_bit_for_bit(config, whole, tmp_path, stop, signum):
    with pytest.raises(Interrupted) as caught:
        run(config, tmp_path / "stopped", StopAt(stop, signum))
    assert caught.value.signum == signum and caught.value.step == stop
    run(config, tmp_path / "stopped")
    assert weights(tmp_path / "stopped") == weights(whole)
    assert metrics(tmp_path / "stopped") == metrics(whole)


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_other_optimizers_go_on_bit_for_bit_too(config, tmp_path, optimizer):
    optim = dataclasses.replace(config.optim, optimizer=optimizer, nesterov=True)
    config = dataclasses.replace(config, optim=optim)
    run(config, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(config, tmp_path / "stopped", StopAt(5))
    run(config, tmp_path / "stopped")
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")


class StopInEvaluation:
    """Raises a user's signal in a batch of evaluation, counted from 0 over all evaluations."""

    def __init__(self, monkeypatch, at=None):
        original, self.done = HeldOut._add, 0

        def add(held_out, images, targets):
            original(held_out, images, targets)
            self.done += 1
            if at == self.done - 1:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(HeldOut, "_add", add)


@pytest.fixture(scope="module")
def evaluated_in_many_batches(config, tmp_path_factory):
    """A config, its run that nothing stopped, and how many batches its evaluations had."""
    config = dataclasses.replace(config, eval_batch_size=2)
    out = tmp_path_factory.mktemp("many_batches") / "run"
    with pytest.MonkeyPatch.context() as patch:
        batches = StopInEvaluation(patch)
        run(config, out)
    assert batches.done >= 8
    return config, out, batches.done


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("checkpoint_every", [0, 100])
@pytest.mark.parametrize(("share", "step"), [(0.0, 6), (0.4, 6), (0.5, 12), (0.8, 12)])
def test_a_run_stopped_while_it_is_evaluated_goes_on_bit_for_bit(
    evaluated_in_many_batches, tmp_path, monkeypatch, share, step, checkpoint_every, staged
):
    config, whole, batches = evaluated_in_many_batches
    if staged:
        monkeypatch.setattr(build, "capture_note", lambda split, job, runtime: None)
    config = dataclasses.replace(config, checkpoint_every=checkpoint_every)
    stopped = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop = StopInEvaluation(patch, at=int(share * batches))
        with pytest.raises(Interrupted) as caught:
            run(config, stopped)
    assert stop.done == int(share * batches) + 1  # not a batch more
    assert caught.value.signum == signal.SIGINT and caught.value.step == step
    assert [record["step"] for record in metrics(stopped)] == list(range(6, step, 6))
    run(config, stopped)
    assert weights(stopped) == weights(whole)
    assert metrics(stopped) == metrics(whole)


def test_a_run_stopped_in_the_evaluation_it_resumed_with_goes_on(
    config, whole, tmp_path, monkeypatch
):
    out = tmp_path / "stopped"
    with pytest.raises(Interrupted):
        run(config, out, StopAt(6))
    with monkeypatch.context() as patch:
        StopInEvaluation(patch, at=0)
        with pytest.raises(Interrupted) as caught:
            run(config, out)
    assert caught.value.step == 6 and metrics(out) == []
    run(config, out)
    assert weights(out) == weights(whole)
    assert metrics(out) == metrics(whole)


def test_a_run_killed_after_its_evaluation_measures_it_again_not_twice(config, whole, tmp_path):
    """The checkpoint is older than the line of metrics; random poses must draw the same numbers."""
    config = dataclasses.replace(config, checkpoint_every=6)

    class KillAt(Reporter):
        def step(self, done):
            if done == 7:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "killed", KillAt())
    assert len(metrics(tmp_path / "killed")) == 1
    run(config, tmp_path / "killed")
    assert weights(tmp_path / "killed") == weights(whole)
    assert metrics(tmp_path / "killed") == metrics(whole)


def test_a_checkpoint_of_an_older_version_was_evaluated_already(config, tmp_path):
    """There, the evaluation came first, and its averages were forgotten before the checkpoint."""
    with pytest.raises(Interrupted):
        run(config, tmp_path / "run", StopAt(6))
    folder = RunFolder(tmp_path / "run")
    state = torch.load(folder.state, weights_only=True)
    del state["evaluation_due"]
    folder.save_state(state)
    folder.metrics.write_text(json.dumps({"step": 6, "epoch": 1.0, "test_accuracy": 99.0}) + "\n")
    with pytest.raises(Interrupted):
        run(config, tmp_path / "run", StopAt(7))
    assert [record["test_accuracy"] for record in metrics(tmp_path / "run")] == [99.0]


def test_a_run_names_every_place_it_was_made_in(config, tmp_path, monkeypatch):
    """None twice, the last one as that of the whole run."""
    out, places = tmp_path / "run", []
    for commit, stop in (("a", 2), ("b", 3), ("a", 5), ("c", 7)):
        place = {"device": "a CPU", "torch": "2.13", "commit": commit, "dirty": False}
        monkeypatch.setattr("capsroute.train.engine.origin", lambda device, place=place: place)
        places.append(place)
        with pytest.raises(Interrupted):
            run(config, out, StopAt(stop))
    summary = run(config, out)
    assert summary["resumed_from"] == [places[1], places[0]]
    assert places[-1].items() <= summary.items()


def test_what_an_older_version_did_not_keep_is_unknown(config, tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Interrupted):
        run(config, folder.path, StopAt(6))
    state = torch.load(folder.state, weights_only=True)
    here = state.pop("origins")[0]
    folder.save_state(state)
    summary = run(config, folder.path)
    assert summary["resumed_from"] == [dict.fromkeys(here)] and here.items() <= summary.items()


def test_the_first_signal_is_told_once(config, tmp_path):
    told = []

    class Listens(StopAt):
        def stopping(self, signum):
            told.append(signum)

    with pytest.raises(Interrupted):
        run(config, tmp_path / "run", Listens(3, signal.SIGINT))
    assert told == [signal.SIGINT]


class SignalInStep:
    """Raises a user's signal in the middle of a step, counted from 0."""

    def __init__(self, monkeypatch, step, signum):
        original, self.finished = TrainStep.__call__, []

        def cut(train_step, images, targets, share, now, whole):
            if now.step == step:
                signal.raise_signal(signum)
            original(train_step, images, targets, share, now, whole)
            self.finished.append(now.step)

        monkeypatch.setattr(TrainStep, "__call__", cut)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_first_step_does_not_wait_for_it(
    config, whole, tmp_path, monkeypatch, signum
):
    out, handler = tmp_path / "run", signal.getsignal(signum)
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="before the first step"):
        SignalInStep(patch, 0, signum)
        run(config, out)
    assert not (out / "state.pt").exists() and signal.getsignal(signum) is handler
    with monkeypatch.context() as patch, pytest.raises(Interrupted) as caught:
        steps = SignalInStep(patch, 2, signum)  # with something to save: the step is finished
        run(config, out)
    assert steps.finished == [0, 1, 2] and caught.value.step == 3
    with monkeypatch.context() as patch, pytest.raises(Interrupted) as caught:
        steps = SignalInStep(patch, 3, signum)
        run(config, out)
    assert steps.finished == [] and caught.value.step == 3
    assert torch.load(out / "state.pt", weights_only=True)["step"] == 3
    run(config, out)
    assert weights(out) == weights(whole)


def test_a_deadline_waits_for_the_first_step(config, tmp_path, monkeypatch):
    SignalInStep(monkeypatch, 0, signal.SIGALRM)
    with pytest.raises(Interrupted) as caught:
        run(config, tmp_path / "run")
    assert caught.value.step == 1 and (tmp_path / "run" / "state.pt").exists()


def test_metrics_after_the_last_checkpoint_are_measured_again_not_twice(config, whole, tmp_path):
    out = tmp_path / "cut"
    with pytest.raises(Interrupted):
        run(config, out, StopAt(5))
    # as if killed after the evaluation's line but before its checkpoint, in mid-write of another
    with (out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "test_accuracy": 99.0}) + '\n{"step": 12, "te')
    run(config, out)
    assert metrics(out) == metrics(whole)


def test_another_seed_is_another_run(whole, tmp_path, with_changes):
    run(with_changes(seed=1), tmp_path / "run")
    assert weights(tmp_path / "run") != weights(whole)


def test_accumulation_changes_nothing_but_rounding(with_changes, config, tmp_path):
    plain = dataclasses.replace(config.model, initial_poses=None)
    summaries = []
    for pieces in (1, 4):
        optim = dataclasses.replace(config.optim, accumulate=pieces, optimizer="sgd", lr=0.05)
        changed = with_changes(model=plain, optim=optim)
        run(changed, tmp_path / f"run{pieces}")
        summaries.append(metrics(tmp_path / f"run{pieces}"))
    for one, many in zip(*summaries, strict=True):
        assert one["train_loss"] == pytest.approx(many["train_loss"], rel=1e-4)


def test_the_average_of_the_weights_is_what_is_evaluated_and_saved(whole):
    saved = load_model(whole / "model.safetensors").state_dict()
    state = torch.load(whole / "state.pt", weights_only=True)
    assert all(torch.equal(saved[key], value) for key, value in state["average"].items())
    assert any(not torch.equal(saved[key], value) for key, value in state["model"].items())


def test_bfloat16_follows_float32(with_changes, config, tmp_path):
    plain = dataclasses.replace(config.model, initial_poses=None)
    for dtype in ("float32", "bfloat16"):
        run(with_changes(model=plain, dtype=dtype), tmp_path / dtype)
    exact, low = metrics(tmp_path / "float32"), metrics(tmp_path / "bfloat16")
    assert exact != low
    for one, other in zip(exact, low, strict=True):
        assert other["train_loss"] == pytest.approx(one["train_loss"], rel=0.05)


class PoisonAfter(Reporter):
    """Makes a weight infinite after some step, as an infinite gradient would."""

    def __init__(self, monkeypatch, step):
        original = TrainStep.__call__

        def poisoned(self, images, targets, share, now, whole):
            original(self, images, targets, share, now, whole)
            if now.step == step:
                with torch.no_grad():
                    next(self.bare.parameters()).fill_(float("inf"))

        monkeypatch.setattr(TrainStep, "__call__", poisoned)


@pytest.mark.parametrize("step", [4, 5, 7])
def test_weights_that_are_not_finite_stop_the_run_before_they_are_saved(
    config, tmp_path, monkeypatch, step
):
    """Checkpoints every 2 steps; a step's loss is finite until the weights are used again."""
    out = tmp_path / "run"
    with pytest.raises(DivergedError, match=r"not finite in step \d.*checkpoint is kept.*`--lr`"):
        run(config, out, PoisonAfter(monkeypatch, step))
    kept = torch.load(out / "state.pt", weights_only=True)
    assert kept["step"] == step // 2 * 2
    assert all(torch.isfinite(value).all() for value in kept["model"].values())
    assert load_model(out / "model.safetensors") is not None
    assert not (out / "summary.json").exists()


def test_a_wild_learning_rate_is_named_as_the_cause(config, tmp_path, with_changes):
    wild = dataclasses.replace(config.optim, optimizer="sgd", lr=1e30, lr_schedule="constant")
    with pytest.raises(DivergedError, match=r"not finite in step \d+.* lower `--lr`"):
        run(with_changes(optim=wild), tmp_path / "run")


@pytest.fixture(scope="module")
def stopped_once(config, tmp_path_factory):
    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Interrupted):
        run(config, out, StopAt(5))
    return out


class TestFolders:
    """Nothing is overwritten, and each refusal is one line."""

    def refused(self, config, out, message, error=ValueError):
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        with pytest.raises(error, match=message) as caught:
            run(config, out)
        assert "\n" not in str(caught.value)
        assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before

    def test_another_runs_folder(self, config, finished, with_changes):
        out = finished
        self.refused(with_changes(seed=3), out, "another run: `seed` is 0 there and 3 here")
        slower = dataclasses.replace(config.optim, lr=0.5)
        self.refused(with_changes(optim=slower), out, "`lr` is 0.001 there and 0.5 here.* --out$")
        weights = f", and `--pretrained {out}` to start from its weights$"
        self.refused(with_changes(steps=13), out, f"`steps` is 12 there and 13 here; .*{weights}")

    def test_what_follows_from_another_choice_is_not_blamed(self, finished, with_changes):
        """The name follows from data and model, the model from the weights to start from."""
        out = finished
        digits, other = DataConfig("mnist"), ModelConfig("cnn_cifar10")
        renamed = with_changes(experiment="other", model=other)
        self.refused(renamed, out, "run: `model` is 'inverted_small_multimnist' there and 'cnn_")
        pretrained = dataclasses.replace(other, pretrained="cnn_cifar10")
        renamed = dataclasses.replace(renamed, model=pretrained)
        self.refused(renamed, out, "run: `pretrained` is not given there and 'cnn_cifar10' here")
        renamed = dataclasses.replace(renamed, data=digits)
        self.refused(renamed, out, "run: `data` is '.*stripes' there and 'mnist' here")
        self.refused(with_changes(experiment="other"), out, "run: `experiment` is 'tiny' there")

    def test_a_folder_of_an_older_version(self, config, finished):
        """What its config does not name was as it is by default."""
        out = finished
        older = json.loads((out / "config.json").read_text())
        del older["data"]["cutmix"]
        (out / "config.json").write_text(json.dumps(older))
        run(config, out)
        mixed = dataclasses.replace(config, data=dataclasses.replace(config.data, cutmix=0.5))
        self.refused(mixed, out, "`cutmix` is 0.0 there and 0.5 here")

    def test_a_run_may_be_saved_more_or_less_often_when_it_goes_on(
        self, config, stopped_once, whole, tmp_path
    ):
        out = tmp_path / "run"
        shutil.copytree(stopped_once, out)
        run(dataclasses.replace(config, checkpoint_every=100), out)
        assert metrics(out)[-1]["train_loss"] == metrics(whole)[-1]["train_loss"]

    @pytest.mark.parametrize("seed", [0, 3])  # the same run, and another
    def test_a_folder_in_use(self, config, tmp_path, with_changes, seed):
        folder = RunFolder(tmp_path / "run")
        folder.claim(config)
        self.refused(with_changes(seed=seed), tmp_path / "run", "that no other process is running")
        folder.release()

    def test_a_folder_that_another_run_took_after_it_was_looked_at(
        self, config, whole, tmp_path, with_changes
    ):
        late, out = with_changes(seed=3), tmp_path / "run"
        folder = RunFolder(out)
        folder.check(late)
        shutil.copytree(whole, out)
        with pytest.raises(ValueError, match="another run: `seed` is 0 there and 3 here"):
            folder.claim(late)
        folder.release()
        assert load_config(out / "config.json") == config

    def test_a_folder_whose_run_never_began_is_free(self, config, tmp_path, with_changes):
        folder = RunFolder(tmp_path / "run")
        folder.claim(with_changes(seed=7))
        folder.release()
        run(config, tmp_path / "run")
        assert load_config(tmp_path / "run" / "config.json") == config

    def test_a_config_that_is_not_one(self, config, tmp_path):
        (tmp_path / "config.json").write_text("[]")
        self.refused(config, tmp_path, r"must be a run's config.json, got list")

    def test_a_folder_with_other_files(self, config, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        self.refused(config, tmp_path, "it holds other files")

    def test_a_file(self, config, tmp_path):
        file = tmp_path / "file"
        file.write_text("")
        with pytest.raises(ValueError, match="it is a file"):
            run(config, file)

    @pytest.fixture
    def stopped(self, stopped_once, tmp_path):
        return shutil.copytree(stopped_once, tmp_path / "run")

    def test_a_truncated_checkpoint(self, config, stopped):
        data = (stopped / "state.pt").read_bytes()
        (stopped / "state.pt").write_bytes(data[: len(data) // 2])
        self.refused(config, stopped, "is damaged")

    @pytest.mark.parametrize("where", [0.2, 0.5, 0.8])
    def test_a_flipped_bit(self, config, stopped, where):
        data = bytearray((stopped / "state.pt").read_bytes())
        data[int(where * len(data))] ^= 0x10
        (stopped / "state.pt").write_bytes(data)
        self.refused(config, stopped, "is damaged")

    def test_a_checkpoint_that_would_run_code(self, config, stopped, tmp_path):
        class Attack:
            def __reduce__(self):
                return (open, (str(tmp_path / "owned"), "w"))

        torch.save({"step": 3}, stopped / "state.pt")
        self.refused(config, stopped, "it is no checkpoint of a run")
        torch.save({"step": Attack()}, stopped / "state.pt")
        self.refused(config, stopped, "is damaged")
        assert not (tmp_path / "owned").exists()

    def test_a_full_disk_keeps_the_last_checkpoint(self, config, stopped, monkeypatch):
        good = (stopped / "state.pt").read_bytes()

        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(torch, "save", full)
        with pytest.raises(OSError, match=r"could not write a checkpoint .* one before is kept"):
            run(config, stopped)
        assert (stopped / "state.pt").read_bytes() == good
        assert not list(stopped.glob(".*tmp*"))


@pytest.mark.parametrize(
    ("name", "world", "said"),
    [
        ("resnet18_cifar10", 2, True),
        ("resnet18_cifar10", 1, False),
        ("inverted_simple_cifar10", 2, False),
    ],
)
def test_several_cpu_processes_are_told_about_batch_norm(name, world, said):
    with torch.device("meta"):
        model = create_model(name)
    note = batch_norm_note(model, Processes(0, world, torch.device("cpu")))
    assert (note is not None) == said


@pytest.fixture
def batches_of():
    """Of a config, as the only process gets them."""

    def make(config):
        data = load_data(config, Reporter())
        return train_batches(config, data, data.train, Processes(0, 1, torch.device("cpu")))

    return make


def test_weights_and_order_follow_the_seed(config, with_changes, batches_of):
    data, configs = load_data(config, Reporter()), (config, config, with_changes(seed=1))
    first, again, other = (build_model(each, data).state_dict() for each in configs)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["backbone.0.weight"], other["backbone.0.weight"])
    first, again, other = (batches_of(each).plan(0) for each in configs)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_images_are_augmented_as_asked(config, with_changes, batches_of):
    asked = {"padding": 3, "flip": True, "cutout": 5, "crop": 20}
    data = dataclasses.replace(config.data, **asked)
    assert batches_of(with_changes(data=data)).augment == Augment(**asked)


def test_images_of_a_short_last_batch_are_counted(with_changes, tmp_path, batches_of):
    config = with_changes(batch_size=7)
    run(config, tmp_path / "run")
    batches = batches_of(config)
    assert batches.global_size(batches.steps_per_epoch - 1) == 3
    for record in MetricsFile(tmp_path / "run" / "metrics.jsonl").read():
        seen = sum(map(batches.global_size, range(record["step"])))
        assert record["images_per_second"] * record["seconds"] == pytest.approx(seen)


def test_a_model_is_measured_in_its_mode_for_that(config, tmp_path, monkeypatch):
    measured, trained = [], []
    add, step = HeldOut._add, TrainStep.__call__

    def watched_add(self, *batch):
        measured.append(self.model.training)
        add(self, *batch)

    def watched_step(self, *batch):
        trained.append(self.bare.training)
        step(self, *batch)

    monkeypatch.setattr(HeldOut, "_add", watched_add)
    monkeypatch.setattr(TrainStep, "__call__", watched_step)
    run(config, tmp_path / "run")
    assert set(measured) == {False} and trained == [True] * 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"seed": 2**63}, r"`seed` must be below 2\*\*63, got 9223372036854775808"),
        ({"steps": 0}, "`steps` must be at least 1, got 0"),
        ({"optim": OptimConfig(lr=-1.0)}, "`lr` must be finite and not negative, got -1.0"),
        ({"optim": OptimConfig(ema=1.0)}, r"`ema` must be in \[0, 1\), got 1.0"),
        ({"optim": OptimConfig(lr=float("nan"))}, "`lr` must be finite and not negative, got nan"),
        ({"sync_bn": True, "model": ModelConfig(bn_group=16)}, "`bn_group` must not be given"),
        ({"sync_bn": True, "optim": OptimConfig(accumulate=2)}, "`accumulate` must be 1 with"),
        ({"optim": OptimConfig(nesterov=True, momentum=0.0)}, "`momentum` must be above 0 with"),
        ({"optim": OptimConfig(accumulate=9)}, r"`accumulate` must be between 1 and .* got 9"),
        ({"optim": OptimConfig(accumulate=0)}, "`accumulate` must be at least 1, got 0"),
        ({"optim": OptimConfig(milestones=(3, -1))}, r"`milestones` must not be negative, got"),
        ({"optim": OptimConfig(capsule_decay=-1.0)}, "`capsule_decay` must be finite and not"),
        ({"data": DataConfig(image_size=0)}, "`image_size` must be at least 1, got 0"),
        ({"data": DataConfig(padding=-1)}, "`padding` must be at least 0, got -1"),
        ({"data": DataConfig(cutout=-1)}, "`cutout` must be at least 0, got -1"),
        ({"data": DataConfig(crop=0)}, "`crop` must be at least 1, got 0"),
        ({"data": DataConfig(cutmix=1.5)}, r"`cutmix` must be in \[0, 1\], got 1.5"),
        ({"data": DataConfig(validation=1.0)}, r"`validation` must be in \[0, 1\), got 1.0"),
        ({"model": ModelConfig(bn_group=0)}, "`bn_group` must be at least 1, got 0"),
        ({"model": ModelConfig(iterations=0)}, "`iterations` must be between 1 and 100, got 0"),
        ({"model": ModelConfig(iterations=101)}, "`iterations` must be between 1 and 100, got 101"),
    ],
)
def test_configs_are_checked(with_changes, change, message):
    with pytest.raises(ValueError, match=message):
        with_changes(**change)


def test_losses_that_do_not_fit_are_refused(with_changes, config, tmp_path):
    lengths = ModelConfig("dynamic_simple_cifar10")
    smoothed = OptimConfig(label_smoothing=0.1)
    with pytest.raises(ValueError, match="`label_smoothing` must be 0 with the margin loss"):
        run(with_changes(model=lengths, optim=smoothed), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    unknown = with_changes(model=ModelConfig("inverted_smal_multimnist"))
    with pytest.raises(ValueError, match="did you mean 'inverted_small_multimnist'"):
        run(unknown, tmp_path / "other")


def test_tensorboard_files(config, tmp_path, with_changes):
    pytest.importorskip("tensorboard")
    train(with_changes(steps=2), tmp_path / "run", Runtime("cpu", tensorboard=True), Reporter())
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))


def test_mixed_images_train_and_whole_ones_are_measured(config, tmp_path, with_changes):
    still = dataclasses.replace(config.optim, lr=0.0)
    model = dataclasses.replace(config.model, initial_poses=None)
    for name, share in (("mixed", 1.0), ("whole", 0.0)):
        data = dataclasses.replace(config.data, cutmix=share)
        run(with_changes(data=data, optim=still, model=model), tmp_path / name)
    mixed, whole = (metrics(tmp_path / name)[-1] for name in ("mixed", "whole"))
    assert mixed["train_loss"] != whole["train_loss"]
    assert mixed["test_loss"] == whole["test_loss"]  # with the same weights, the same images


def test_digits_that_overlap_already_are_not_mixed(config, tmp_path, with_changes):
    digits = DataConfig("diverse_multimnist", cutmix=0.5)
    with pytest.raises(ValueError, match="`cutmix` must be 0 where images have several classes"):
        run(with_changes(data=digits), tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
# torch's own internals warn while compiling
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_compiled_run_follows_the_eager_one(config, tmp_path, with_changes):
    plain = dataclasses.replace(config.model, initial_poses=None)
    short = with_changes(model=plain, steps=4, eval_every=2)
    run(short, tmp_path / "eager")
    train(short, tmp_path / "compiled", Runtime("cpu", compile="yes"), Reporter())
    pairs = zip(metrics(tmp_path / "eager"), metrics(tmp_path / "compiled"), strict=True)
    for eager, other in pairs:
        for key in ("train_loss", "val_loss", "test_loss"):
            assert other[key] == pytest.approx(eager[key], rel=1e-3), key
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    other_seed = dataclasses.replace(short, seed=short.seed + 1)
    train(other_seed, tmp_path / "another", Runtime("cpu", compile="yes"), Reporter())
    # a run like the last one in its process has nothing to compile
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled > 0
