"""Training, straight down: build, resume, loop, evaluate, save. The folder is the run."""

import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capsroute.data import Dataset
from capsroute.models.weights import save_model
from capsroute.train.build import (
    Runtime,
    batch_norm_note,
    build_model,
    capture_note,
    check_evaluation,
    compiled,
    load_data,
    start_from_pretrained,
    train_batches,
    wrap,
)
from capsroute.train.capture import CapturedSteps, Graphs
from capsroute.train.checkpoint import RunFolder, restore_rng, rng_state
from capsroute.train.config import Config
from capsroute.train.distributed import Processes, processes
from capsroute.train.held_out import HeldOut
from capsroute.train.interruption import Interrupted, stop_signals
from capsroute.train.log import RunLog
from capsroute.train.metrics import Glance, averages
from capsroute.train.optim import learning_rate
from capsroute.train.provenance import summarize
from capsroute.train.reporting import Reporter
from capsroute.train.step import Moment, TrainStep

LOOK_EVERY = 50  # steps between looks at the running loss


class DivergedError(Exception):
    """The loss, or the weights, are not finite any more."""


def train(
    config: Config,
    out: Path,
    runtime: Runtime,
    reporter: Reporter,
    dataset: Dataset | None = None,
) -> dict[str, Any]:
    """Run, or go on with, the run in folder `out`; returns its summary.

    `dataset` is the config's own, where the caller has read it already.
    """
    with processes(runtime.device) as job, stop_signals(reporter.stopping) as stop:
        folder = RunFolder(out)
        folder.check(config)
        if job.same("whether the run is finished", folder.summary.exists()):
            reporter.message(f"{out} is finished; nothing was trained")
            return folder.read_summary() if job.first else {}
        if dataset is None:
            dataset = load_data(config, reporter)
        run = _Run(config, folder, runtime, reporter, job, dataset, stop)
        try:
            if job.first:  # nothing is written before the parts are known to fit
                folder.claim(config)
            job.barrier()
            run.resume()
            run.loop()
            return run.finish()
        finally:
            run.close()


class _Run:
    """A run under way."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        runtime: Runtime,
        reporter: Reporter,
        job: Processes,
        dataset: Dataset,
        stop: list[int],
    ) -> None:
        self.stop = stop
        self.config, self.folder, self.reporter, self.job = config, folder, reporter, job
        runtime = runtime.resolve(job)
        title, board = config.experiment, runtime.tensorboard
        self.log = RunLog(folder, title, tensorboard=board) if job.first else None
        check_evaluation(config, dataset)
        self.model = build_model(config, dataset).to(job.device)
        if config.model.pretrained is not None and not folder.state.exists():
            reporter.message(start_from_pretrained(self.model, config.model))
        self.make_batches = partial(train_batches, config, dataset, dataset.train.to(job.device))
        self.batches = self.make_batches(job)
        self.epoch_steps = self.batches.steps_per_epoch
        if config.batch_size > (images := len(self.batches.split)):
            reporter.message(
                f"`batch_size` (={config.batch_size:,}) is more than the {images:,} training "
                "images: every step takes all of them"
            )
        self.steps = config.steps or config.epochs * self.epoch_steps
        wrapped = wrap(self.model, job, runtime, config)
        self.compile_part = partial(compiled, runtime=runtime)
        self.train_step = TrainStep(wrapped, self.model, config, job.world, self.compile_part)
        self.graphs, self.captured = None, None
        if (note := capture_note(self.batches.split, job, runtime)) is None:
            self.graphs = Graphs(job.device)
            render = self.compile_part(self.batches.render)
            self.captured = CapturedSteps(
                self.graphs, self.batches, render, self.train_step, self.moment, self.steps
            )
        elif note:
            reporter.message(note)
        parts = self.train_step, config, job, self.graphs, self.compile_part
        self.held_out = {
            name: None if split is None else HeldOut(split, *parts)
            for name, split in (("val", dataset.validation), ("test", dataset.test))
        }
        self.glance, self.rate = Glance(), 0.0
        self.step, self.seconds = 0, 0.0
        self.saved_step, self.evaluation_due = -1, False
        if note := batch_norm_note(self.model, job):
            reporter.message(note)

    def resume(self) -> None:
        """Go back to the last checkpoint; metrics after it will be measured again.

        A checkpoint is taken before the evaluation of its step, which is then still to be done.
        """
        torch.manual_seed(self.config.seed + 1_000_003 * (1 + self.job.rank))
        if (state := self.folder.load_state()) is not None:
            self.train_step.load_state_dict(state)
            self.step, self.seconds = state["step"], state["seconds"]
            self.saved_step = self.step
            self.evaluation_due = state.get("evaluation_due", False)  # unknown to older versions
            if self.job.first:  # the sums over all processes
                self.train_step.totals.sums.copy_(state["totals"])
            if self.job.rank < len(state["rng"]):
                restore_rng(state["rng"][self.job.rank])
        self.job.same("the last checkpoint", self.step)
        if self.log is not None:
            self.log.resume(self.step - 1 if self.evaluation_due else self.step)
        self.job.barrier()

    def loop(self) -> None:
        eval_every = self.config.eval_every or self.epoch_steps
        checkpoint_every = self.config.checkpoint_every or eval_every
        self.reporter.start(self.step, self.steps, self.epoch_steps)
        self.model.train()
        if self.evaluation_due:
            self.evaluate()
        started = time.perf_counter()
        while self.step < self.steps:
            self.one_step()
            self.reporter.step(self.step)
            last = self.step == self.steps
            stopping = self.must_stop(self.step)
            self.evaluation_due = last or self.step % eval_every == 0
            save = last or stopping or self.step % checkpoint_every == 0
            if save or self.evaluation_due:
                self.seconds += self.clock(started)
                self.look(self.seconds)
                if save:  # first: an evaluation may take longer than a run has left
                    self.save(rng_state(self.job.device))
                if stopping:
                    raise self.interrupted()
                if self.evaluation_due:
                    self.evaluate()
                started = time.perf_counter()
            elif self.step % LOOK_EVERY == 0:
                # several processes must look together, so they wait; a captured run is one process
                so_far = self.seconds + time.perf_counter() - started
                self.look(so_far, wait=self.captured is None)

    def must_stop(self, count: int) -> bool:
        """Whether a signal came to any process, asked with a count of steps or of batches.

        Signals reach processes at different times; they agree now and then, and stop together.
        """
        agree_every = 10 if self.job.world > 1 and self.job.device.type == "cuda" else 1
        return count % agree_every == 0 and self.job.any(bool(self.stop))

    def interrupted(self) -> Interrupted:
        return Interrupted(self.stop[0] if self.stop else signal.SIGTERM, self.step)

    def one_step(self) -> None:
        (self.captured or self.uncaptured_step)(self.step)
        self.step += 1

    def uncaptured_step(self, step: int) -> None:
        images, targets = self.batches.batch(step)
        size = self.batches.global_size(step)
        share = len(images) / size
        if share == 0.0:  # a last batch smaller than the job: go along with weight zero
            everyones = self.make_batches(Processes(0, 1, self.job.device))
            images, targets = (part[:1] for part in everyones.batch(step))
        self.train_step(images, targets, share, self.moment(step), self.batches.is_whole(size))

    def moment(self, step: int) -> Moment:
        lr = learning_rate(self.config.optim, step, self.steps, self.epoch_steps)
        return Moment(step, lr, step / self.epoch_steps)

    def clock(self, started: float) -> float:
        """Seconds since `started`, the device's work included."""
        if self.job.device.type == "cuda":
            torch.cuda.synchronize(self.job.device)
        return time.perf_counter() - started

    def look(self, seconds: float, wait: bool = True) -> None:
        """Show the running averages; stop if loss or weights are not finite in any process.

        Without waiting for a GPU, what is seen is some steps old.
        """
        tallies = self.train_step.tallies()
        numbers = tallies.tolist() if wait else self.glance(tallies)
        if numbers is None:
            return
        *sums, bad = numbers
        if wait and bad < 0 and not self.train_step.is_finite():
            bad = self.step - 1
        found = [step for step in self.job.gather(int(bad)) if step >= 0]
        if found:
            kept = "; the last good checkpoint is kept" if self.folder.state.exists() else ""
            raise DivergedError(
                f"loss or weights were not finite in step {min(found)}{kept} ({self.folder.path}). "
                "Try a lower `--lr`, `--clip 1` or `--dtype float32`, in a new folder"
            )
        if wait or self.captured is None:  # else the host is ahead of what it would count
            self.rate = self.images_seen() / max(seconds, 1e-9)
        self.reporter.progress(self.step, *averages(*sums), self.rate)

    def images_seen(self) -> int:
        epochs, rest = divmod(self.step, self.epoch_steps)
        size = len(self.batches.split)
        return epochs * size + min(rest * self.config.batch_size, size)

    def evaluate(self) -> None:
        """Measure, write a line of metrics, draw the curves, start the averages anew.

        If it is cut, nothing is written but a checkpoint from which it begins again.
        """
        rng = rng_state(self.job.device)  # random initial poses draw from it
        totals, epoch = self.train_step.totals, self.step / self.epoch_steps
        loss, accuracy = totals.averages(self.job.sum(totals.sums.clone()))
        record: dict[str, Any] = {
            "step": self.step,
            "epoch": epoch,
            "lr": self.moment(self.step - 1).lr,
            "train_loss": loss,
            "train_accuracy": accuracy,
        }
        self.job.share(self.train_step.buffers())
        for name, held in self.held_out.items():
            measured = (None, None) if held is None else held.measure(epoch, self.must_stop)
            if measured is None:
                if self.saved_step != self.step:
                    self.save(rng)
                raise self.interrupted()
            record |= {f"{name}_loss": measured[0], f"{name}_accuracy": measured[1]}
        record |= {"seconds": self.seconds, "images_per_second": self.images_seen() / self.seconds}
        totals.sums.zero_()
        self.evaluation_due = False
        self.reporter.evaluated(record)
        if self.log is not None:
            self.log.write(record, last=self.step == self.steps)

    def save(self, rng: dict[str, Tensor]) -> None:
        """The state first, whole; then the weights that a user takes away."""
        everyones = self.job.gather(rng)
        totals = self.job.sum(self.train_step.totals.sums.clone())
        if self.job.first:
            position = {"step": self.step, "evaluation_due": self.evaluation_due}
            so_far = {"seconds": self.seconds, "rng": everyones, "totals": totals}
            self.folder.save_state(self.train_step.state_dict() | position | so_far)
            save_model(self.model, self.folder.model, weights=self.train_step.weights())
        self.saved_step = self.step
        self.job.barrier()

    def finish(self) -> dict[str, Any]:
        """The run in a few numbers; the last file to be written, so it means that all are there."""
        summary: dict[str, Any] = {}
        if self.log is not None:
            save_model(self.model, self.folder.model, weights=self.train_step.weights())
            summary = summarize(self.config, self.model, self.log.records, self.job.device)
            self.folder.write_summary(summary)
        self.job.barrier()  # no process ends while another may still need it
        return summary

    def close(self) -> None:
        # they hold this run, and a pool of memory
        self.captured, self.graphs, self.held_out = None, None, {}
        if self.log is not None:
            self.log.close()
        self.folder.release()
