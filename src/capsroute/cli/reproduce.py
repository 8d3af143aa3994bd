"""`capsroute reproduce`"""

import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.table import Table

from capsroute.cli import to_type
from capsroute.cli.errors import UsageError
from capsroute.cli.parsing import Flag, as_options, optional, parse
from capsroute.cli.progress import make_reporter
from capsroute.experiments import preset
from capsroute.experiments.evidence import Result, diverged, read_all, read_evidence, spread
from capsroute.experiments.reproduce import Job, jobs, reproduce, select
from capsroute.experiments.slurm import Cluster, submit
from capsroute.experiments.tables import all_tables
from capsroute.train.build import Runtime
from capsroute.train.checkpoint import RunFolder
from capsroute.train.interruption import Interrupted, stop_after

SAVING = 15.0  # seconds of a budget kept for the last checkpoint, or a tenth of it if that is less


@dataclass(frozen=True)
class Options:
    """Run the paper's experiments and our own; skip finished runs, resume interrupted ones.

    A run's folder is RUNS/<experiment>_seed<k>. When it is finished, its config, metrics and
    summary are copied to RESULTS/<experiment>/seed<k>, from which `capsroute report` makes tables.

    For example `capsroute reproduce --list`,
    `capsroute reproduce inverted_resnet_cifar10_r2 --seeds 0 1 2 --budget-minutes 9`,
    `capsroute reproduce 'inverted_simple_cifar10_r*' --slurm --partition gpu`.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME…]")] = ()
    """Experiments, or shell patterns that match several; '*' for all of them."""
    list: Flag = False
    """List every experiment: the paper's number (in brackets the authors' average, where it is
    known), ours, and which seeds are done."""
    seeds: tuple[int, ...] = (0,)
    """Seeds, with one run for each."""
    budget_minutes: Annotated[float | None, optional("M")] = None
    """Save and stop within this many minutes; the same command resumes."""
    results: Path = Path("results")
    """Folder for the evidence, which shows what is done."""
    runs: Path = Path("runs")
    """Folder for the runs until they are done."""
    data_root: Annotated[Path | None, optional("DIR")] = None
    """Where to look for datasets. (default: $CAPSROUTE_DATA or ~/.cache/capsroute)"""
    runtime: Annotated[Runtime, tyro.conf.arg(name="")] = field(default_factory=Runtime)
    slurm: Flag = False
    """Submit each run as its own job (needs the extra `slurm`); see docs/slurm.md."""
    local: Flag = False
    """With --slurm: use processes on this machine instead of jobs, to try it out."""
    partition: Annotated[str | None, optional("NAME")] = None
    """With --slurm: the partition. (default: the cluster's)"""
    gpus: int = 1
    """With --slurm: GPUs per job."""
    minutes: int = 240
    """With --slurm: minutes that a job may run before it is queued again."""
    sbatch: tuple[str, ...] = ()
    """With --slurm: other sbatch options, such as account=mine mem=32G."""


def main(arguments: list[str]) -> None:
    options = parse(Options, "reproduce", arguments, config=(tyro.conf.OmitArgPrefixes,))
    _check(options)
    if options.data_root is not None:  # not in the config, which is the same on every machine
        os.environ["CAPSROUTE_DATA"] = str(options.data_root.expanduser().resolve())
    if options.list:
        _list(options)
        return
    wanted = jobs(select(options.names), options.seeds, options.runs, options.results)
    found = [(job, job.status()) for job in wanted]
    missing = [job for job, status in found if status in ("cut", "not run")]
    in_the_way = [job for job, status in found if status == "of another recipe"]
    if done := len(wanted) - len(missing) - len(in_the_way):
        print(f"{done} of {len(wanted)} runs are done already")
    for job in in_the_way:
        _tell_of_departure(job)
    if in_the_way and not missing:
        sys.exit(2)
    if options.slurm:
        _submit(options, missing)
    else:
        _run(options, missing, to_type("reproduce", *arguments))


def _tell_of_departure(job: Job) -> None:
    departure = read_evidence(job.evidence).departures()[0]
    folders = [job.evidence, *([job.run] if RunFolder(job.run).has_progress() else [])]
    print(
        f"{job.name}: not run, since {job.evidence} is of another recipe ({departure}); "
        f"move {' and '.join(map(str, folders))} away first",
        file=sys.stderr,
    )


def _check(options: Options) -> None:
    if not options.names and not options.list:
        raise UsageError("which experiments? Name some ('*' is all of them), or look at --list")
    if not options.seeds:
        raise UsageError("`--seeds` must name one at least, got none")
    for name in ("local", "partition", "gpus", "minutes", "sbatch"):
        if not options.slurm and getattr(options, name) != getattr(Options, name):
            raise UsageError(f"`--{name}` must be given with `--slurm`, got it alone")
    if any(seed < 0 for seed in options.seeds):
        raise UsageError(f"`--seeds` must not be negative, got {min(options.seeds)}")
    if options.budget_minutes is not None and options.budget_minutes <= 0:
        raise UsageError(f"`--budget-minutes` must be above 0, got {options.budget_minutes:g}")
    if options.slurm and options.budget_minutes is not None:
        raise UsageError("`--budget-minutes` must not be given with `--slurm`: use `--minutes`")


def _run(options: Options, missing: list[Job], command: str) -> None:
    seconds = None if options.budget_minutes is None else 60.0 * options.budget_minutes
    deadline = None if seconds is None else time.monotonic() + seconds - min(SAVING, seconds / 10)
    alarm = nullcontext() if deadline is None else stop_after(deadline - time.monotonic())
    with alarm:
        for index, job in enumerate(missing):
            if deadline is not None and time.monotonic() >= deadline:
                _print_left(missing[index:], command)
                return
            try:
                _run_one(job, options.runtime)
            except Interrupted as stop:
                _print_left(missing[index:], command)
                if stop.signum != signal.SIGALRM:
                    sys.exit(128 + stop.signum)
                return


def _run_one(job: Job, runtime: Runtime) -> None:
    print(
        f"{job.name}: {'goes on' if job.status() == 'cut' else 'starts'} in {job.run}", flush=True
    )
    try:
        with as_options(Options), make_reporter() as reporter:
            status = reproduce(job, runtime, reporter)
    except torch.OutOfMemoryError:
        raise UsageError(f"{job.name}: the device is out of memory") from None
    print(f"{job.name}: {status}, evidence in {job.evidence}", flush=True)


def _print_left(left: list[Job], command: str) -> None:
    first = left[0]
    cut = f", {first.name} cut after a checkpoint" if first.status() == "cut" else ""
    runs = "1 run is" if len(left) == 1 else f"{len(left)} runs are"
    print(f"time to stop: {runs} left{cut}. Go on with {command}", flush=True)


def _submit(options: Options, missing: list[Job]) -> None:
    cluster = Cluster(
        options.local, options.partition, options.gpus, options.minutes, _pairs(options.sbatch)
    )
    numbers = submit(missing, cluster, options.runtime, make_reporter)
    for job, number in zip(missing, numbers, strict=True):
        print(f"{job.name}: job {number}, log in {options.runs / 'slurm'}")


def _pairs(options: tuple[str, ...]) -> dict[str, str]:
    for option in options:
        if "=" not in option:
            raise UsageError(f"`--sbatch` must be NAME=VALUE, got {option!r}")
    return dict(option.split("=", 1) for option in options)


def _list(options: Options) -> None:
    results = read_all(options.results) if options.results.is_dir() else {}
    chosen = set(select(options.names or ("*",)))
    for table in all_tables():
        names = [row.experiment for row in table.rows if row.experiment in chosen]
        if names:
            Console().print(_listing(table.title, names, results, options))


def _listing(
    title: str, names: list[str], results: dict[str, list[Result]], options: Options
) -> Table:
    table = Table(title=f"{title} ({len(names)})", title_justify="left")
    table.add_column("experiment", no_wrap=True)
    for heading in ("paper % (mean)", "last epoch %", "best epoch %"):
        table.add_column(heading, justify="right")
    table.add_column("runs")
    for name in names:
        runs = results.get(name, [])
        chosen = preset(name)
        paper, average = chosen.paper_accuracy, chosen.authors_average
        missing = "diverged" if diverged(runs) else "–"
        ours = [spread(runs, f"test_accuracy_{epoch}") for epoch in ("last", "best")]
        table.add_row(
            name,
            ("–" if paper is None else f"{paper:.2f}")
            + ("" if average is None else f" ({average:.2f})"),
            *(missing if value is None else str(value) for value in ours),
            _seeds(name, runs, options),
        )
    return table


def _seeds(name: str, runs: list[Result], options: Options) -> str:
    """What has been done, seed by seed, and what was asked about and has not."""
    known = {run.seed for run in runs} | set(options.seeds) | _cut_seeds(name, options.runs)
    parts: dict[str, list[str]] = {}
    for seed in sorted(known):
        job = Job.of(name, seed, options.runs, options.results)
        status = job.status()
        after = f" after {job.reached()}" if status == "cut" else ""
        parts.setdefault(status + after, []).append(str(seed))
    if list(parts) == ["not run"]:
        return "not run"
    return "; ".join(f"seed {' '.join(seeds)} {status}" for status, seeds in parts.items())


def _cut_seeds(name: str, runs: Path) -> set[int]:
    seeds = [path.name.removeprefix(f"{name}_seed") for path in runs.glob(f"{name}_seed*")]
    return {int(seed) for seed in seeds if seed.isdigit()}
