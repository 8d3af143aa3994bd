"""Measure what bfloat16 does to the gradient of an inverted capsule network, and where.

    python tools/gradient_rounding.py inverted_resnet_cifar100 --data-root ~/data
    python tools/gradient_rounding.py inverted_resnet_cifar100 --untrained --data-root ~/data

A training step's gradient, in float32, is compared with that of the same images where everything
is in bfloat16, or the backbone alone, or the primary capsules and the routing alone; and, for
scale, with the gradient of other images. Writes results/gradient_rounding/<name>.json, with the
name of the experiment that the weights are of. `capsroute report` shows it.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from capsroute import create_model
from capsroute.data import Augment, TrainBatches, load_dataset
from capsroute.devices import choose_device
from capsroute.experiments.cards import study_name
from capsroute.experiments.evidence import write_measurement
from capsroute.experiments.studies import ROUNDING
from capsroute.models import model_info
from capsroute.models.factory import load_model
from capsroute.models.inverted import InvertedCapsNet
from capsroute.models.sources import find_checkpoint
from capsroute.models.weights import read_metadata
from capsroute.train.config import OptimConfig
from capsroute.train.step import Loss, choose_loss

RESULTS = Path(__file__).parents[1] / "results" / ROUNDING
PARTS = ("backbone", "primary", "capsules", "classifier")
ROUNDED: Mapping[str, tuple[str, ...]] = {
    "everything": ("backbone", "primary", "capsules"),
    "the backbone": ("backbone",),
    "the capsules": ("primary", "capsules"),
}
BATCH, BATCHES = 128, 8
Gradient = dict[str, Tensor]


def _in_dtype(forward: Callable[..., Any], device: str, rounded: bool) -> Callable[..., Any]:
    """A part's forward pass that ignores in what dtype the rest of the model is."""

    def call(x: Tensor, **_: Any) -> Any:  # `finish`: a part that ends in its own dtype is finished
        with torch.autocast(device, torch.bfloat16, enabled=rounded):
            return forward(x if rounded else x.float())

    return call


@contextmanager
def rounding(model: InvertedCapsNet, rounded: tuple[str, ...]) -> Iterator[None]:
    """Within, the parts named compute as bfloat16 training does, all others in float32."""
    device = next(model.parameters()).device.type
    parts: dict[str, nn.Module] = {name: getattr(model, name) for name in PARTS[:-1]}
    for name, part in parts.items():
        part.forward = _in_dtype(part.forward, device, name in rounded)
    try:
        yield
    finally:
        for part in parts.values():
            del part.forward


def gradient(model: InvertedCapsNet, loss: Loss, batch: tuple[Tensor, Tensor]) -> Gradient:
    """Of the loss, all parameters of a part in one vector."""
    images, targets = batch
    model.zero_grad()
    loss(model(images).float(), targets, 0).backward()
    return {
        part: torch.cat([p.grad.flatten() for p in getattr(model, part).parameters()])
        for part in PARTS
    }


def compare(
    model: InvertedCapsNet, loss: Loss, batches: list[tuple[Tensor, Tensor]]
) -> dict[str, dict[str, dict[str, float]]]:
    """By what is rounded and by part, averages over batches.

    `error` is the length of the difference from the exact gradient, `along` the component in its
    direction, both in units of its length: unbiased rounding leaves `along` at 1.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    with rounding(model, ()):
        exact = [gradient(model, loss, batch) for batch in batches]
    for name, rounded in ROUNDED.items():
        with rounding(model, rounded):
            found[name] = _relative([gradient(model, loss, b) for b in batches], exact)
    found["other images"] = _relative(*zip(*pairwise(exact), strict=True))
    return found


def _relative(others: Any, exact: Any) -> dict[str, dict[str, float]]:
    pairs = list(zip(others, exact, strict=True))
    return {
        part: {
            "error": mean(float((o[part] - e[part]).norm() / e[part].norm()) for o, e in pairs),
            "along": mean(float(o[part] @ e[part] / e[part].norm() ** 2) for o, e in pairs),
        }
        for part in PARTS
    }


def _load(options: argparse.Namespace) -> tuple[InvertedCapsNet, str, dict[str, Any]]:
    """The model, what its file is called, and what traces its weights."""
    if options.untrained:
        torch.manual_seed(0)
        model: Any = create_model(options.model)
        name, traced = f"{model.name}_r{model.iterations}_untrained", {"seed": 0}
    else:
        weights = find_checkpoint(options.model)
        described = read_metadata(weights)
        model = load_model(weights)
        name, traced = study_name(weights, described), {"weights_sha256": described["sha256"]}
    if not isinstance(model, InvertedCapsNet):
        raise ValueError(f"`model` must route by inverted attention, got {model.name}")
    return model, name, {"model": model.name, "iterations": model.iterations, **traced}


def measure(options: argparse.Namespace) -> Path:
    model, name, traced = _load(options)
    device = choose_device(options.device)
    train = load_dataset(model_info(model.name).dataset, root=options.data_root).train
    augment = Augment(padding=4, flip=True) if model.name.partition("_cifar")[1] else None
    batches = TrainBatches(train.to(device), BATCH, augment=augment)
    found = compare(
        model.to(device).train(),
        choose_loss(OptimConfig(), model),
        [batches.batch(step) for step in range(options.batches)],
    )
    traced |= {"batch_size": BATCH, "batches": options.batches}
    return write_measurement(RESULTS / f"{name}.json", {**traced, "bf16": found}, device, sys.argv)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="a run's folder, a checkpoint or a name of the registry")
    parser.add_argument("--untrained", action="store_true", help="at the initial weights")
    parser.add_argument("--batches", type=int, default=BATCHES, help=f"(default: {BATCHES})")
    parser.add_argument("--data-root", type=Path, help="where datasets are looked for")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    try:
        print(measure(parser.parse_args()))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
