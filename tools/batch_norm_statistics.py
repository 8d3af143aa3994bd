"""Measure runs once more with BatchNorm statistics taken from many training images.

    python tools/batch_norm_statistics.py runs/inverted_resnet_cifar10_r2_seed* --data-root ~/data

The paper's recipe keeps running statistics of the first 16 images of each batch alone. Here they
are replaced by averages over augmented training images, the weights as they are. Writes
results/batch_norm/<run>.json: the accuracy on the test images before and after.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from capsroute.data import Augment, EvalBatches, TrainBatches, load_dataset
from capsroute.devices import choose_device
from capsroute.files import write_whole
from capsroute.inference import Predictor
from capsroute.models import model_info
from capsroute.models.base import ImageClassifier
from capsroute.models.weights import load_model, read_metadata
from capsroute.train.metrics import correct
from capsroute.train.provenance import device_name, versions

RESULTS = Path(__file__).parents[1] / "results" / "batch_norm"
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


def measure(run: Path, options: argparse.Namespace) -> Path:
    weights = Predictor.load(run, device="cpu").checkpoint
    assert weights is not None  # a run's folder holds weights, not an exported file
    device = choose_device(options.device)
    model = load_model(weights).to(device)
    data = load_dataset(model_info(model.name).dataset, root=options.data_root)
    test = EvalBatches(data.test.to(device), BATCH)
    train = TrainBatches(data.train.to(device), BATCH, augment=Augment(padding=4, flip=True))
    before = accuracy(model, test)
    if not take_statistics(model, train.batch, options.images // BATCH):
        raise SystemExit(f"`runs` must have BatchNorm, got {run} of {model.name}")
    found = {
        "command": shlex.join(["python", "tools/batch_norm_statistics.py", *sys.argv[1:]]),
        "run": run.name,
        "weights_sha256": read_metadata(weights)["sha256"],
        "images": options.images // BATCH * BATCH,
        "accuracy_as_trained": before,
        "accuracy": accuracy(model, test),
        "device": device_name(device),
        **versions(),
    }
    path = RESULTS / f"{run.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(found, indent=1) + "\n").encode())
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--images", type=int, default=IMAGES, help=f"(default: {IMAGES})")
    parser.add_argument("--data-root", type=Path, help="where datasets are looked for")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options = parser.parse_args()
    for run in options.runs:
        print(measure(run, options))


if __name__ == "__main__":
    main()
