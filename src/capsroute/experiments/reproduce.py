"""One experiment and seed at a time: run what is missing, resume what was cut, skip what is done.

A run lives in a folder of its own under `runs`; when it has ended its evidence is copied whole to
`results`. To carry a cut run to another machine, take its config.json, metrics.jsonl and state.pt:
the other files are written again.
"""

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from capsroute.experiments.evidence import DIVERGED, copy_evidence, read_evidence
from capsroute.experiments.presets import list_experiments, preset
from capsroute.files import write_json
from capsroute.nearest import nearest
from capsroute.train.build import Runtime
from capsroute.train.checkpoint import RunFolder
from capsroute.train.config import Config
from capsroute.train.engine import DivergedError, train
from capsroute.train.metrics import MetricsFile
from capsroute.train.provenance import named
from capsroute.train.reporting import Reporter

Status = Literal["done", "diverged", "of another recipe", "cut", "not run"]


@dataclass(frozen=True)
class Job:
    """A run to be made, and the folders that it and its evidence go to."""

    config: Config
    runs: Path
    results: Path

    @classmethod
    def of(cls, experiment: str, seed: int, runs: Path, results: Path) -> "Job":
        return cls(replace(preset(experiment).config, seed=seed), runs, results)

    @property
    def name(self) -> str:
        return f"{self.config.experiment}_seed{self.config.seed}"

    @property
    def run(self) -> Path:
        return self.runs / self.name

    @property
    def evidence(self) -> Path:
        return self.results / self.config.experiment / f"seed{self.config.seed}"

    def status(self) -> Status:
        if any((self.evidence / name).is_file() for name in ("summary.json", DIVERGED)):
            found = read_evidence(self.evidence)  # or raise: broken evidence is not done
            if found.departures():
                return "of another recipe"
            return "diverged" if found.diverged else "done"
        return "cut" if RunFolder(self.run).has_progress() else "not run"

    def reached(self) -> str:
        """Of a run that was cut: the epoch of its last checkpoint; before any evaluation, the step.

        Without a checkpoint that can be read, its last evaluation.
        """
        folder = RunFolder(self.run)
        records, step = MetricsFile(folder.metrics).read(), folder.saved_step()
        if not records:
            return f"step {step or 0:,}"
        last = records[-1]
        epoch = last["epoch"] * (step or last["step"]) / last["step"]
        return f"epoch {round(epoch, 1):g}"


def select(patterns: Sequence[str]) -> list[str]:
    """Names of the experiments that match: in the order of the patterns, each once."""
    names: list[str] = []
    for pattern in patterns:
        found = fnmatch.filter(list_experiments(), pattern)
        if not found:
            raise ValueError(
                f"no experiment matches {pattern!r}{nearest(pattern, list_experiments())}"
            )
        names += [name for name in found if name not in names]
    return names


def jobs(names: Iterable[str], seeds: Iterable[int], runs: Path, results: Path) -> list[Job]:
    """Every seed of the first experiment, then of the next."""
    seeds = list(seeds)
    return [Job.of(name, seed, runs, results) for name in names for seed in seeds]


def reproduce(job: Job, runtime: Runtime, reporter: Reporter) -> Status:
    """Run a job, or go on with it, to its end.

    Raises `Interrupted` when it is stopped before, its checkpoint saved. A run whose loss is no
    number any more has ended too: that is its result, and the evidence says so.
    """
    try:
        train(job.config, job.run, runtime, reporter)
    except DivergedError as error:
        found = {
            "experiment": job.config.experiment,
            "seed": job.config.seed,
            "error": str(error),
            **named(error.origins),
        }
        write_json(job.run / DIVERGED, found)
        copy_evidence(job.run, job.evidence, DIVERGED)
    else:
        copy_evidence(job.run, job.evidence)
    return job.status()
