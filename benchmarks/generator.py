"""How fast DiverseMultiMNIST is generated on a CPU: draws, placement, float images, batch by batch.

    python benchmarks/generator.py

Two threads, batches of 128, the median of 5 runs of 200 batches.
"""

import json
import platform
import statistics
import time

import torch

from capsroute.data import TrainBatches, load_dataset

BATCH, BATCHES, RUNS, THREADS = 128, 200, 5, 2


def main() -> None:
    torch.set_num_threads(THREADS)
    batches = TrainBatches(load_dataset("diverse_multimnist").train, BATCH)
    batches.batch(0)
    rates = []
    for run in range(RUNS):
        start = time.perf_counter()
        for step in range(run * BATCHES, (run + 1) * BATCHES):
            batches.batch(step)
        rates.append(BATCH * BATCHES / (time.perf_counter() - start))
    print(
        json.dumps(
            {
                "images_per_second": round(statistics.median(rates)),
                "lowest": round(min(rates)),
                "batch": BATCH,
                "threads": THREADS,
                "torch": torch.__version__,
                "machine": platform.machine(),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
