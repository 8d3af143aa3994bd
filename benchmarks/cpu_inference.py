"""What routing costs on a CPU: inference beside the backbone alone, and memory of a training step.

    python benchmarks/cpu_inference.py

One run, two threads. Prints the medians and the ratio for `inverted_resnet_cifar10` with 2
iterations at batch 16, where the backbone alone is the same backbone with average pooling and a
linear layer; then the peak memory of a training step with 4 iterations at batch 32, above what the
process held with the model built (its own process, since a peak cannot be taken back).
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from capsroute import create_model

MIB = 2**20


def median_ms(run: Callable[[], object], repeats: int = 30) -> float:
    for _ in range(5):
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


@torch.no_grad()
def inference() -> dict[str, float]:
    model = create_model("inverted_resnet_cifar10", iterations=2).eval()
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    backbone = nn.Sequential(model.normalize, model.backbone, head).eval()
    images = torch.rand(16, 3, 32, 32)
    # interleaved, so that a noisy moment hits both
    pairs = [
        (median_ms(lambda: backbone(images), 10), median_ms(lambda: model(images), 10))
        for _ in range(5)
    ]
    alone = statistics.median(pair[0] for pair in pairs)
    routed = statistics.median(pair[1] for pair in pairs)
    return {"backbone_ms": alone, "model_ms": routed, "ratio": routed / alone}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


def training_memory() -> float:
    """MiB that a training step peaks above the built model (its gradients are part of the step)."""
    model = create_model("inverted_resnet_cifar10", iterations=4)
    before = peak_mib()
    images, targets = torch.rand(32, 3, 32, 32), torch.randint(10, (32,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()
    return peak_mib() - before


def main() -> None:
    torch.set_num_threads(2)
    if sys.argv[1:] == ["--training-memory"]:
        print(training_memory())
        return
    results: dict[str, object] = {
        "torch": torch.__version__,
        "threads": 2,
        **inference(),
    }
    child = [sys.executable, __file__, "--training-memory"]
    results["training_step_4_iterations_batch_32_mib"] = float(
        subprocess.run(child, capture_output=True, text=True, check=True).stdout
    )
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
