"""Measure runs once more with BatchNorm statistics taken from many training images.

    python tools/batch_norm_statistics.py runs/inverted_resnet_cifar10_r2_seed* --data-root ~/data

The paper's recipe keeps running statistics of the first 16 images of each batch alone. Here they
are replaced by averages over training images, augmented as the recipe does it (CIFAR; digits are
not), the weights as they are. Writes results/batch_norm/<run>.json: the accuracy on the test images
before and after.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from capsroute.data import Augment, Dataset, EvalBatches, TrainBatches, load_dataset
from capsroute.devices import choose_device
from capsroute.experiments.evidence import write_measurement
from capsroute.experiments.studies import BATCH_NORM
from capsroute.models import model_info
from capsroute.models.base import ImageClassifier
from capsroute.models.factory import load_model
from capsroute.models.sources import find_checkpoint
from capsroute.models.weights import read_metadata
from capsroute.train.metrics import correct

RESULTS = Path(__file__).parents[1] / "results" / BATCH_NORM
IMAGES, BATCH = 10_000, 250


@torch.no_grad()
def accuracy(model: ImageClassifier, batches: EvalBatches) -> float:
    """Percent of the images."""
    model.eval()
    right = sum(int(correct(model, model(images), targets).sum()) for images, targets in batches)
    return 100.0 * right / len(batches.split)


@torch.no_grad()
def take_statistics(
    model: nn.Module, batch: Callable[[int], tuple[Tensor, Tensor]], steps: int
) -> int:
    """Make running statistics plain averages over `steps` batches; of how many layers."""
    model.eval()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # an average of all batches alike
        norm.train()
    for step in range(steps):
        model(batch(step)[0])
    return len(norms)


def with_plain_norms(weights: Path) -> ImageClassifier:
    """The model with BatchNorm over whole batches: statistics of groups are what is replaced."""
    options = read_metadata(weights)["config"]
    return load_model(weights, **({"bn_group": None} if "bn_group" in options else {}))


def training_batches(data: Dataset, device: torch.device) -> TrainBatches:
    """As the paper's recipe trains: crops and flips of CIFAR; digits, which have sides, as made."""
    augment = Augment(padding=4, flip=True) if data.name.startswith("cifar") else None
    return TrainBatches(data.train.to(device), BATCH, augment=augment)


def measure(run: Path, options: argparse.Namespace) -> Path:
    weights = find_checkpoint(run)
    device = choose_device(options.device)
    model = with_plain_norms(weights).to(device)
    data = load_dataset(model_info(model.name).dataset, root=options.data_root)
    test = EvalBatches(data.test.to(device), BATCH)
    train = training_batches(data, device)
    before = accuracy(model, test)
    if not take_statistics(model, train.batch, options.images // BATCH):
        raise ValueError(f"`runs` must have BatchNorm, got {run} of {model.name}")
    found = {
        "run": run.name,
        "weights_sha256": read_metadata(weights)["sha256"],
        "images": options.images // BATCH * BATCH,
        "accuracy_as_trained": before,
        "accuracy": accuracy(model, test),
    }
    return write_measurement(RESULTS / f"{run.name}.json", found, device, sys.argv)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--images", type=int, default=IMAGES, help=f"(default: {IMAGES})")
    parser.add_argument("--data-root", type=Path, help="where datasets are looked for")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options = parser.parse_args()
    try:
        for run in options.runs:
            print(measure(run, options))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
