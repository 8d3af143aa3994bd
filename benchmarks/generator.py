"""How fast DiverseMultiMNIST is generated: draws, placement, float images, batch by batch.

    python benchmarks/generator.py [cpu | cuda]

CPU: two threads, batches of 128, with their plans. GPU: batches of 128 compiled and captured, from
plans that lie there, as a training step makes them. The median of 5 runs of 200 batches.
"""

import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch

from capsroute.data import TrainBatches, load_dataset
from capsroute.train.build import Runtime, compiled
from capsroute.train.capture import WARM_UP, Graphs
from capsroute.train.provenance import versions

BATCH, BATCHES, RUNS, THREADS = 128, 200, 5, 2


def main() -> None:
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    torch.set_num_threads(THREADS)
    batches = TrainBatches(load_dataset("diverse_multimnist").train.to(device), BATCH)
    make = captured(batches, device) if device.type == "cuda" else following(batches)
    for _ in range(WARM_UP + 1):
        make()
    rates = [BATCH * BATCHES / seconds(make, device) for _ in range(RUNS)]
    on_gpu = device.type == "cuda"
    print(
        json.dumps(
            {
                "images_per_second": round(statistics.median(rates)),
                "lowest": round(min(rates)),
                "batch": BATCH,
                "threads": None if on_gpu else THREADS,
                "machine": torch.cuda.get_device_name() if on_gpu else platform.machine(),
                **versions(),
            },
            indent=1,
        )
    )


def following(batches: TrainBatches) -> Callable[[], None]:
    steps = itertools.count()

    def make() -> None:
        batches.batch(next(steps))

    return make


def captured(batches: TrainBatches, device: torch.device) -> Callable[[], None]:
    """Rendering as one CUDA graph; it always makes the same images, which takes as long."""
    plan = batches.plan(0).to(device)
    render = compiled(batches.render, Runtime(str(device), compile="yes"))
    images, targets = render(plan)

    def make() -> None:
        for held, made in zip((images, targets), render(plan), strict=True):
            held.copy_(made)  # or a compiler may find that nobody looks

    return Graphs(device).replay(make)


def seconds(make: Callable[[], object], device: torch.device) -> float:
    """Of `BATCHES` batches."""
    start = time.perf_counter()
    for _ in range(BATCHES):
        make()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
