"""Evidence: `results/<experiment>/seed<k>/{config.json, metrics.jsonl, summary.json}`.

Copied whole from a run's folder and never edited. A run that diverged has `diverged.json` in place
of a summary.
"""

import json
import shlex
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from capsroute.experiments.presets import list_experiments, preset
from capsroute.files import write_json, write_whole
from capsroute.models import model_info
from capsroute.train.config import Config, differences, load_config, read_json
from capsroute.train.provenance import device_name, versions

DIVERGED = "diverged.json"


@dataclass(frozen=True)
class Result:
    """One run's evidence."""

    folder: Path
    config: Config
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    """Of a run that diverged, without accuracies."""
    diverged: bool

    @property
    def experiment(self) -> str:
        return self.folder.parent.name

    @property
    def seed(self) -> int:
        return seed_of(self.folder)

    def number(self, field: str) -> float | None:
        """A field of the summary, `train_minutes` or `epoch_seconds`."""
        if field == "train_minutes":
            return self.summary["train_seconds"] / 60
        if field == "epoch_seconds":
            return self.epoch_seconds()
        return self.summary[field]

    def epoch_seconds(self) -> float | None:
        """Of training, the median between evaluations; so without what compiling takes."""
        pairs = list(pairwise(self.metrics))
        seconds = [(b["seconds"] - a["seconds"]) / (b["epoch"] - a["epoch"]) for a, b in pairs]
        return statistics.median(seconds) if seconds else None

    def departures(self) -> list[str]:
        return departures(self.config)


def departures(config: Config) -> list[str]:
    """Where a run's config (there) departs from the preset of its name (here), the seed apart."""
    if config.experiment not in list_experiments():
        return [f"there is no preset {config.experiment!r}"]
    planned = preset(config.experiment).config
    data = replace(planned.data, data_root=config.data.data_root)
    planned = replace(planned, seed=config.seed, data=data)
    return differences(_resolved(planned), json.loads(_resolved(config).to_json()))


def _resolved(config: Config) -> Config:
    """With the number of iterations, which is the model's own unless given."""
    own = model_info(config.model.model).task.iterations
    iterations = config.model.iterations or own
    return replace(config, model=replace(config.model, iterations=iterations))


@dataclass(frozen=True)
class Spread:
    """A number over several seeds."""

    mean: float
    std: float | None
    """Of the sample (n − 1); None for one seed."""
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """None where there is nothing to average."""
        known = list(values)
        if not known:
            return None
        std = statistics.stdev(known) if len(known) > 1 else None
        return cls(statistics.fmean(known), std, len(known))

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.std is None else f" ± {self.std:.2f}")


def seed_of(folder: Path) -> int:
    """`seed3` -> 3, or a ValueError."""
    number = folder.name.removeprefix("seed")
    if not (folder.name.startswith("seed") and number.isdigit()):
        raise ValueError(f"{folder} must be called seed<k>, k being the run's seed")
    return int(number)


def find_evidence(results: Path) -> list[Path]:
    """Folders of single runs, in the order of their names; not what Python or others left there."""
    if not results.is_dir():
        raise ValueError(f"`--results` must be a folder of results, got {results}: no such folder")
    experiments = [path for path in results.iterdir() if path.is_dir() and path.name != "figures"]
    runs = (run for experiment in experiments for run in experiment.iterdir() if run.is_dir())
    return sorted(run for run in runs if not run.name.startswith((".", "__")))


def read_evidence(folder: Path) -> Result:
    """One run's evidence, or a ValueError that names the file."""
    seed_of(folder)
    summary, failed = folder / "summary.json", folder / DIVERGED
    if not summary.is_file() and not failed.is_file():
        raise ValueError(f"{folder} must hold {summary.name} (or {failed.name})")
    metrics = _read_lines(folder / "metrics.jsonl")
    if summary.is_file() and not metrics:
        raise ValueError(f"{folder} must hold metrics.jsonl, a line for every evaluation")
    ended = summary if summary.is_file() else failed
    config = load_config(folder / "config.json")
    return Result(folder, config, metrics, read_json(ended), diverged=ended == failed)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must hold one JSON object a line: {error}") from None


def read_all(results: Path) -> dict[str, list[Result]]:
    """Evidence by experiment, seeds in order."""
    found: dict[str, list[Result]] = {}
    for folder in find_evidence(results):
        found.setdefault(folder.parent.name, []).append(read_evidence(folder))
    return {name: sorted(runs, key=lambda run: run.seed) for name, runs in found.items()}


def counted(runs: Iterable[Result]) -> list[Result]:
    """The runs that count for an experiment: finished, with its preset's config."""
    return [run for run in runs if not run.diverged and not run.departures()]


def diverged(runs: Iterable[Result]) -> list[Result]:
    """The runs that would count, had their loss stayed finite; averages leave them out."""
    return [run for run in runs if run.diverged and not run.departures()]


def spread(runs: Iterable[Result], field: str) -> Spread | None:
    """A field of the summaries (see `Result.number`), over the runs that count."""
    values = [run.number(field) for run in counted(runs)]
    return Spread.of(value for value in values if value is not None)


def copy_evidence(run: Path, evidence: Path, ended: str = "summary.json") -> None:
    """A run's files, the one that says it ended last: once it is there, all are."""
    evidence.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "metrics.jsonl", ended):
        if (run / name).is_file():  # a run may diverge before it was ever evaluated
            write_whole(evidence / name, (run / name).read_bytes())


def write_measurement(
    path: Path, found: dict[str, Any], device: torch.device, argv: Sequence[str]
) -> Path:
    """A file of results/ that is no run's: what a tool measured, where and by which command.

    `argv` is the tool's `sys.argv`.
    """
    command = ["python", f"tools/{Path(argv[0]).name}", *argv[1:]]
    traced = {"command": shlex.join(command), **found}
    traced |= {"device": device_name(device), **versions()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, traced)
    return path
