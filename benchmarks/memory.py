"""Memory of routing on a GPU: forward and backward pass through a model's capsule layers.

    python benchmarks/memory.py > benchmarks/memory.csv

Peak above what lies there before (weights, primary capsules), in MiB, for each batch and number of
iterations; with every vote stored (`reference`, as the paper's formula reads) and without. Beside
it what there is to hold: the poses that all iterations make, the weights' gradients, and the votes
that one iteration would store. bf16, nothing compiled. Where git does not work, CAPSROUTE_COMMIT
names the commit.
"""

import csv
import sys
from typing import Any

import torch
from torch import Tensor

from capsroute.experiments.costs import MEMORY_COLUMNS
from capsroute.models import create_model
from capsroute.ops.schedule import light_cone
from capsroute.train.provenance import versions

CASES = [
    ("inverted_resnet_cifar10", batch, iterations)
    for batch in (32, 128, 512)
    for iterations in (1, 2, 4, 10)
]
CASES += [("inverted_matrix_multimnist_wide", 128, iterations) for iterations in (1, 2, 3)]
MIB = 2**20
TOO_MUCH = 100 * 2**30  # bytes of votes that nobody waits for


def main() -> None:
    writer = csv.DictWriter(sys.stdout, MEMORY_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    where = {"device": torch.cuda.get_device_name(), **versions()}
    for impl in ("auto", "reference"):
        for model, batch, iterations in CASES:
            try:
                sizes = measure(model, impl, batch, iterations)
            except torch.cuda.OutOfMemoryError:
                continue
            case = {"model": model, "batch": batch, "iterations": iterations, "impl": impl}
            if sizes is not None:
                writer.writerow({**case, **sizes, **where})


def measure(name: str, impl: str, batch: int, iterations: int) -> dict[str, str] | None:
    """Peak, poses, weights and votes in MiB; None if the votes would not fit."""
    model: Any = create_model(name, iterations=iterations, impl=impl).cuda()
    poses, votes = shapes(model, batch)
    if impl == "reference" and sum(votes) * iterations > TOO_MUCH:
        return None
    images = torch.rand(2, model.in_channels, *model.image_size, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        primary = model.primary(model.backbone(images))
    primary = primary[:1].repeat(batch, *[1] * (primary.ndim - 1)).requires_grad_()
    route(model.capsules, primary[:1].detach().requires_grad_())  # kernels compile before
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    route(model.capsules, primary)
    peak = torch.cuda.max_memory_allocated() - before
    counts = light_cone(iterations, len(poses))
    made = sum(size * count for size, count in zip(poses, counts, strict=True))
    weights = sum(weight.nbytes for weight in model.capsules.parameters())
    sizes = {"peak": peak, "poses": made, "weights": weights, "votes": sum(votes)}
    return {f"{what}_mib": f"{size / MIB:.0f}" for what, size in sizes.items()}


def route(capsules: torch.nn.Module, primary: Tensor) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        top = capsules(primary)
    top.float().square().sum().backward()
    primary.grad = None
    for weight in capsules.parameters():
        weight.grad = None


def shapes(model: Any, batch: int) -> tuple[list[int], list[int]]:
    """Bytes of each layer's poses, and of the votes of one iteration, in bf16."""
    device = model.capsules.layers[0].weight.device
    with torch.no_grad():
        routing = model.route(torch.rand(1, model.in_channels, *model.image_size, device=device))
    poses = [2 * batch * history[-1].numel() for history in routing.poses]
    children = [layer.weight.shape[:-3].numel() for layer in model.capsules.layers]
    return poses, [size * count for size, count in zip(poses, children, strict=True)]


if __name__ == "__main__":
    main()
