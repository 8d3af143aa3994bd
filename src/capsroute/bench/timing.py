"""Medians over many calls, and the most memory held meanwhile."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from capsroute.bench.cases import Case, prepare
from capsroute.train.build import Runtime
from capsroute.train.capture import WARM_UP

SETTLE = 0.3  # seconds of work before timing


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call; peak memory of the GPU's tensors, unknown on a CPU."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    peak_mib: float | None


def time_case(case: Case, device: torch.device, *, repeats: int, compile: bool) -> Timing:
    """Build, warm up, time `repeats` calls, and leave nothing behind."""
    _clean(device)
    try:
        runtime = Runtime(str(device), compile="yes" if compile else "no")
        return _time(prepare(case, device, runtime), device, repeats)
    finally:
        _clean(device)


def _time(function: Callable[[], None], device: torch.device, repeats: int) -> Timing:
    for _ in range(WARM_UP):
        function()
    peak = _peak_while_captured(function, device) if device.type == "cuda" else None
    ready = time.perf_counter() + SETTLE
    while time.perf_counter() < ready:  # clocks rise under load
        function()
    timings = _time_cuda if device.type == "cuda" else _time_cpu
    p20, median, p80 = np.percentile(timings(function, repeats), [20, 50, 80])
    return Timing(float(median), float(p20), float(p80), peak)


def _peak_while_captured(function: Callable[[], None], device: torch.device) -> float:
    """MiB that the step itself holds: warm-up also holds what compilers and cuDNN try out.

    Replays allocate nothing, so the call that captures is the one to look at.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    return torch.cuda.max_memory_allocated(device) / 2**20


def _clean(device: torch.device) -> None:
    torch.compiler.reset()  # no case takes over what another one compiled, or its memory
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # every stream that ever ran keeps one, 32 MiB each
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _time_cuda(function: Callable[[], None], repeats: int) -> list[float]:
    """By the device's own clock; the host runs ahead, so its delays do not count."""
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        function()
        mark.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in pairwise(marks)]


def _time_cpu(function: Callable[[], None], repeats: int) -> list[float]:
    timings = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        timings.append(1e3 * (time.perf_counter() - start))
    return timings
