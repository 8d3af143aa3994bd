"""Where a result came from: versions, device, commit."""

import os
import platform
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import capsroute
from capsroute.models.base import ImageClassifier, count_parameters
from capsroute.train.config import Config


def summarize(
    config: Config,
    model: ImageClassifier,
    records: list[dict[str, Any]],
    device: torch.device,
    origins: list[dict[str, Any]],
) -> dict[str, Any]:
    """summary.json; accuracies in percent, what is unknown is None.

    `origins` are the run's, in order.
    """
    last = records[-1]
    return {
        "experiment": config.experiment,
        "model": model.name,
        "dataset": config.data.data,
        "iterations": model.iterations,
        "seed": config.seed,
        "params": count_parameters(model),
        "epochs": last["epoch"],
        "steps": last["step"],
        "test_accuracy_last": last["test_accuracy"],
        "test_accuracy_best": max(record["test_accuracy"] for record in records),
        "val_accuracy": last["val_accuracy"],
        "train_seconds": last["seconds"],
        "images_per_second": last["images_per_second"],
        "peak_memory_mib": peak_memory_mib(device),
        "dtype": config.dtype,
        **named(origins),
    }


def named(origins: list[dict[str, Any]]) -> dict[str, Any]:
    """A run's last origin, and under `resumed_from` those before it, if there are any."""
    *earlier, last = origins
    return {**last, "resumed_from": earlier} if earlier else last


def origin(device: torch.device) -> dict[str, Any]:
    """What a run may find changed when it goes on: device, versions, commit."""
    return {"device": device_name(device), **versions()}


def versions() -> dict[str, Any]:
    """Python, PyTorch, CUDA, Triton, ours, and the commit that ours was made from."""
    commit, dirty = _git()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a class of its own, which checkpoints should not need
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "capsroute": capsroute.__version__,
        "commit": commit,
        "dirty": dirty,
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' * (threads != 1)}"


def peak_memory_mib(device: torch.device) -> float:
    """Of the GPU's tensors, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes there, KiB elsewhere


def _git() -> tuple[str | None, bool | None]:
    """(commit, whether the package departs from it) of this package's checkout, if it is one.

    Elsewhere the commit is CAPSROUTE_COMMIT, and nobody knows what has changed since.
    """
    here = Path(__file__).parent
    try:
        # an installed package may lie inside somebody else's repository, which tracks none of it
        run_git(here, "ls-files", "--error-unmatch", Path(__file__).name)
        # what lies beside the package, such as a run's results, does not change what it computes
        changed = run_git(here, "status", "--porcelain", "--", str(here.parent))
        return run_git(here, "rev-parse", "HEAD"), bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("CAPSROUTE_COMMIT") or None, None


def run_git(folder: Path, *arguments: str, given: str | None = None) -> str:
    """What git answers, `given` being its input; or an OSError or CalledProcessError."""
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
