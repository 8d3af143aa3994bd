"""Put the weights of finished runs into the package, and what they predict into the tests.

    python tools/ship_weights.py runs/fast_cifar10_seed0 --data-root ~/data

For each run this writes src/capsroute/models/files/<model>_r<iterations>.{safetensors,md}, the card
with the accuracy of what was packed, and tests/models/samples/<same name>.json, the predictions for
at most 200 test images. Images that are not inside the package go beside it, as one PNG.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from capsroute.data import load_dataset
from capsroute.experiments.shipping import ship
from capsroute.models import model_info
from capsroute.models.weights import load_model

SAMPLES = Path(__file__).parents[1] / "tests" / "models" / "samples"
MOST = 200
CLEAR = 1e-3  # scores round differently on another machine, by far less than this
PER_ROW = 20
ORIGINS = {
    "diverse_multimnist": "generated from the MNIST test digits inside the package",
    "cifar10": "test_batch of the CIFAR-10 dataset (Krizhevsky, 2009)",
    "cifar100": "test set of the CIFAR-100 dataset (Krizhevsky, 2009)",
}


def write_sample(weights: Path, data_root: Path | None) -> None:
    """The predictions of a shipped file for the first test images of its dataset."""
    model = load_model(weights).eval()
    data = model_info(model.name).dataset
    test = load_dataset(data, root=data_root).test
    images, _ = test.render(torch.arange(min(MOST, len(test)))[:, None])
    with torch.no_grad():
        scores = model(images / 255.0)
    rows = clear_cut(scores, model.task.multilabel)
    if model.task.multilabel:
        answers = [row.nonzero().flatten().tolist() for row in scores[rows] > 0]
    else:
        answers = scores[rows].argmax(1).tolist()
    sample = {"data": data, "origin": ORIGINS[data], "rows": rows.tolist(), "predictions": answers}
    SAMPLES.mkdir(exist_ok=True)
    (SAMPLES / f"{weights.stem}.json").write_text(json.dumps(sample) + "\n")
    if data != "diverse_multimnist":
        write_sheet(images, SAMPLES / f"{data}.png")


def clear_cut(scores: Tensor, multilabel: bool) -> Tensor:
    """Rows whose answer no rounding can change."""
    if multilabel:
        margins = scores.abs().amin(1)
    else:
        first, second = scores.topk(2, dim=1).values.unbind(1)
        margins = first - second
    return (margins > CLEAR).nonzero().flatten()


def write_sheet(images: Tensor, path: Path) -> None:
    """Images (n, 3, side, side) in rows of 20, losslessly."""
    count, channels, height, width = images.shape
    grid = images.view(count // PER_ROW, PER_ROW, channels, height, width).permute(0, 3, 1, 4, 2)
    pixels = grid.reshape(count // PER_ROW * height, PER_ROW * width, channels).numpy()
    Image.fromarray(np.ascontiguousarray(pixels)).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--data-root", type=Path, help="where datasets are looked for")
    options = parser.parse_args()
    for run in options.runs:
        weights = ship(run, data_root=options.data_root)
        write_sample(weights, options.data_root)
        print(f"{run} -> {weights} ({weights.stat().st_size:,} bytes)")


if __name__ == "__main__":
    main()
