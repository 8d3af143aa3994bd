"""Jobs for a cluster, through submitit (extra `slurm`): one for each experiment and seed.

A job that is preempted or out of time saves its checkpoint, queues itself again and goes on from
there, since the same run resumes.
"""

import importlib.util
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from capsroute.experiments.reproduce import Job, Status, reproduce
from capsroute.extras import install_hint
from capsroute.train.build import Runtime
from capsroute.train.interruption import Interrupted
from capsroute.train.reporting import Reporter

TIMEOUTS = 1000  # times that a job which ran out of time may queue again: as often as it takes


@dataclass(frozen=True)
class Cluster:
    """What a job asks for."""

    local: bool = False
    """Processes on this machine instead of jobs, to try it out."""
    partition: str | None = None
    gpus: int = 1
    minutes: int = 240
    options: Mapping[str, str] = field(default_factory=dict)
    """Other options of sbatch, by their long names."""


@dataclass(frozen=True)
class Task:
    """A job as submitit calls it, in a process of its own."""

    job: Job
    runtime: Runtime
    reporter: Callable[[], Reporter]

    def __call__(self) -> Status:
        queue_again = signal.getsignal(signal.SIGUSR2)  # what submitit does when time is short
        asked: list[int] = []

        def save_first(signum: int, frame: FrameType | None) -> None:
            asked.append(signum)
            signal.raise_signal(signal.SIGTERM)  # the engine's own way to stop

        signal.signal(signal.SIGUSR2, save_first)
        try:
            return reproduce(self.job, self.runtime, self.reporter())
        except Interrupted:
            if asked and callable(queue_again):
                queue_again(signal.SIGUSR2, None)  # does not return
            raise

    def checkpoint(self) -> Any:
        """What submitit queues in its place: the same, which resumes."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit(
    jobs: Sequence[Job], cluster: Cluster, runtime: Runtime, reporter: Callable[[], Reporter]
) -> list[str]:
    """Queue the jobs; returns their numbers. Logs go to `<runs>/slurm`."""
    if importlib.util.find_spec("submitit") is None:
        raise ValueError(f"`--slurm` needs submitit: {install_hint('slurm')}")
    import submitit

    numbers = []
    for job in jobs:
        runs, results = job.runs.resolve(), job.results.resolve()
        executor = _executor(submitit, runs / "slurm", cluster, job.name)
        here = replace(job, runs=runs, results=results)  # jobs may start in another folder
        numbers.append(executor.submit(Task(here, runtime, reporter)).job_id)
    return numbers


def _executor(submitit: Any, logs: Path, cluster: Cluster, name: str) -> Any:
    kind = "local" if cluster.local else "slurm"
    try:
        executor = submitit.AutoExecutor(
            logs, cluster=kind, **{f"{kind}_max_num_timeout": TIMEOUTS}
        )
    except RuntimeError as error:  # 'Could not detect "srun", are you indeed on a slurm cluster?'
        raise ValueError(f"`--slurm` must be given on a Slurm cluster: {error}") from None
    executor.update_parameters(name=name, timeout_min=cluster.minutes)
    if cluster.gpus:  # a cluster without GPUs refuses to be asked for none
        executor.update_parameters(gpus_per_node=cluster.gpus)
    if not cluster.local:
        options = {"requeue": True, **cluster.options}
        executor.update_parameters(
            slurm_partition=cluster.partition, slurm_additional_parameters=options
        )
    return executor
