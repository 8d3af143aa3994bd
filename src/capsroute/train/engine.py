"""Training, straight down: build, resume, loop, evaluate, save. The folder is the run."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capsroute.data import Dataset
from capsroute.models.weights import save_model
from capsroute.train.build import Equipment, Runtime, assemble, load_data
from capsroute.train.checkpoint import RunFolder, restore_rng, rng_state
from capsroute.train.config import Config
from capsroute.train.data_record import check_data, check_listing, record_data, unknown_images_note
from capsroute.train.distributed import Processes, processes
from capsroute.train.interruption import Stop, stop_signals
from capsroute.train.log import RunLog
from capsroute.train.metrics import Glance, averages
from capsroute.train.provenance import origin, summarize
from capsroute.train.reporting import Reporter

LOOK_EVERY = 50  # steps between looks at the running loss


class DivergedError(Exception):
    """The loss, or the weights, are not finite any more; `origins` are the run's, in order."""

    def __init__(self, message: str, origins: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.origins = origins


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
        return _train(config, RunFolder(out), runtime, reporter, dataset, job, stop)


def _train(
    config: Config,
    folder: RunFolder,
    runtime: Runtime,
    reporter: Reporter,
    dataset: Dataset | None,
    job: Processes,
    stop: Stop,
) -> dict[str, Any]:
    """Apart from `train`, so that the model is gone when the processes part."""
    if job.world == 1:  # several must end together, which they agree on after a step
        stop.idle_since = 0
    folder.check(config)
    if job.same("whether the run is finished", folder.summary.exists()):
        check_listing(folder, config.data.data)
        reporter.message(f"{folder.path} is finished; nothing was trained")
        return folder.read_summary() if job.first else {}
    if dataset is None:
        dataset = load_data(config, reporter)
    check_data(folder, dataset)
    if note := unknown_images_note(folder, dataset):
        reporter.message(note)
    title, board = config.experiment, runtime.tensorboard
    log = RunLog(folder, title, tensorboard=board) if job.first else None
    fresh = not folder.state.exists()
    parts = assemble(config, dataset, runtime, job, fresh=fresh, tell=reporter.message)
    run = _Run(config, folder, parts, log, reporter, job, stop)
    try:
        if job.first:  # nothing is written before the parts are known to fit
            folder.claim(config)
            record_data(folder, dataset)
        job.barrier()
        run.resume()
        run.loop()
        return run.finish()
    finally:
        run.close()


class _Run:
    """A run under way: where it is, and what comes next."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        parts: Equipment,
        log: RunLog | None,
        reporter: Reporter,
        job: Processes,
        stop: Stop,
    ) -> None:
        self.config, self.folder, self.log, self.reporter = config, folder, log, reporter
        self.parts, self.job, self.stop = parts, job, stop
        self.model, self.train_step = parts.model, parts.train_step
        self.steps, self.epoch_steps = parts.steps, parts.batches.steps_per_epoch
        self.glance, self.rate = Glance(), 0.0
        self.step, self.seconds = 0, 0.0
        self.saved_step, self.evaluation_due = -1, False
        self.origins = [origin(job.device)]  # none twice, this process's last

    def resume(self) -> None:
        """Go back to the last checkpoint; metrics after it will be measured again.

        A checkpoint is taken before the evaluation of its step, which is then still to be done.
        """
        torch.manual_seed(self.config.seed + 1_000_003 * (1 + self.job.rank))
        if (state := self.folder.load_state()) is not None:
            self.train_step.load_state_dict(state)
            self.step, self.seconds = state["step"], state["seconds"]
            self.saved_step = self.step
            if self.stop.idle_since is not None:
                self.stop.idle_since = self.step
            self.evaluation_due = state.get("evaluation_due", False)  # unknown to older versions
            here = self.origins[-1]
            before = state.get("origins", [dict.fromkeys(here)])  # as are these
            self.origins = [*(there for there in before if there != here), here]
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
            (self.parts.captured or self.parts.uncaptured)(self.step)
            self.step += 1
            self.stop.idle_since = None
            self.reporter.step(self.step)
            last = self.step == self.steps
            stopping = self.must_stop(self.step)
            self.evaluation_due = last or self.step % eval_every == 0
            save = last or stopping or self.step % checkpoint_every == 0
            if save or self.evaluation_due:
                if self.job.device.type == "cuda":  # its work counts too
                    torch.cuda.synchronize(self.job.device)
                self.seconds += time.perf_counter() - started
                self.look(self.seconds)
                if save:  # first: an evaluation may take longer than a run has left
                    self.save(rng_state(self.job.device))
                if stopping:
                    raise self.stop.interrupted(self.step)
                if self.evaluation_due:
                    self.evaluate()
                started = time.perf_counter()
            elif self.step % LOOK_EVERY == 0:
                # several processes must look together, so they wait; a captured run is one process
                so_far = self.seconds + time.perf_counter() - started
                self.look(so_far, wait=self.parts.captured is None)

    def must_stop(self, count: int) -> bool:
        """Whether a signal came to any process, asked with a count of steps or of batches.

        Signals reach processes at different times; they agree now and then, and stop together.
        """
        agree_every = 10 if self.job.world > 1 and self.job.device.type == "cuda" else 1
        return count % agree_every == 0 and self.job.any(bool(self.stop.received))

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
                "Try a lower `--lr`, `--clip 1` or `--dtype float32`, in a new folder",
                self.origins,
            )
        if wait or self.parts.captured is None:  # else the host is ahead of what it would count
            self.rate = self.parts.batches.images_before(self.step) / max(seconds, 1e-9)
        self.reporter.progress(self.step, *averages(*sums), self.rate)

    def evaluate(self) -> None:
        """Measure, write a line of metrics, draw the curves, start the averages anew.

        If it is cut, nothing is written but a checkpoint from which it begins again.
        """
        rng = rng_state(self.job.device)  # random initial poses draw from it
        totals, epoch = self.train_step.totals, self.step / self.epoch_steps
        loss, accuracy = averages(*self.job.sum(totals.sums.clone()).tolist())
        record: dict[str, Any] = {
            "step": self.step,
            "epoch": epoch,
            "lr": self.parts.moment(self.step - 1).lr,
            "train_loss": loss,
            "train_accuracy": accuracy,
        }
        self.job.share(self.train_step.buffers())
        for name, held in self.parts.held_out.items():
            measured = (None, None) if held is None else held.measure(epoch, self.must_stop)
            if measured is None:
                if self.saved_step != self.step:
                    self.save(rng)
                raise self.stop.interrupted(self.step)
            record |= {f"{name}_loss": measured[0], f"{name}_accuracy": measured[1]}
        rate = self.parts.batches.images_before(self.step) / self.seconds
        record |= {"seconds": self.seconds, "images_per_second": rate}
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
            position = {"step": self.step, "evaluation_due": self.evaluation_due, "rng": everyones}
            so_far = {"seconds": self.seconds, "totals": totals, "origins": self.origins}
            self.folder.save_state(self.train_step.state_dict() | position | so_far)
            save_model(self.model, self.folder.model, weights=self.train_step.weights())
        self.saved_step = self.step
        self.job.barrier()

    def finish(self) -> dict[str, Any]:
        """The run in a few numbers; the last file to be written, so it means that all are there."""
        summary: dict[str, Any] = {}
        if self.log is not None:
            save_model(self.model, self.folder.model, weights=self.train_step.weights())
            records, device = self.log.records, self.job.device
            summary = summarize(self.config, self.model, records, device, self.origins)
            summary["resolved"] = self.parts.resolved
            self.folder.write_summary(summary)
        self.job.barrier()  # no process ends while another may still need it
        return summary

    def close(self) -> None:
        self.parts.release()
        if self.log is not None:
            self.log.close()
        self.folder.release()
