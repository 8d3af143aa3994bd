"""Measure what the hottest pixels of each heat map cost the shipped ResNet model's answers.

    python tools/map_deletion.py                    # minutes on a CPU
    python tools/map_deletion.py --part choice      # the images that `grid` was chosen on

On 100 of the 200 CIFAR-10 test images that tests/models/samples keeps, ten of each class. Writes
results/deletion/<experiment>_<part>.json and, from `test`, the table of docs/explain.md.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from PIL import Image

from capsroute.experiments.cards import study_name
from capsroute.experiments.evidence import write_measurement
from capsroute.explain.deletion import SHARE, Deletion, measure_deletion
from capsroute.files import write_whole
from capsroute.inference import Predictor
from capsroute.models.weights import read_metadata

ROOT = Path(__file__).parents[1]
SHEET = ROOT / "tests" / "models" / "samples" / "cifar10.png"
RESULTS = ROOT / "results" / "deletion"
MODEL = "inverted_resnet_cifar10"
MAPS = ["grid", "fields", "contribution", "contribution_by_pixel"]
SIDE, HALF = 32, 10  # pixels of an image; images of a class in either part


def read_images(predictor: Predictor, part: str) -> torch.Tensor:
    """A row of the sheet is a class: its first half to choose on, its second to test."""
    first = 0 if part == "choice" else HALF
    with Image.open(SHEET) as sheet:
        corners = [
            (SIDE * column, SIDE * row)
            for row in range(sheet.height // SIDE)
            for column in range(first, first + HALF)
        ]
        pictures = [sheet.crop((x, y, x + SIDE, y + SIDE)) for x, y in corners]
    return torch.stack([predictor.prepare(picture) for picture in pictures])


def table(maps: dict[str, Deletion]) -> str:
    heads = ["map", "hottest", "misplaced", "coldest", "all but the hottest"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, found in maps.items():
        costs = (found.hottest, found.misplaced, found.coldest, found.kept)
        cells = [f"`{name}`", *(f"{100 * cost:.0f} %" for cost in costs)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=("test", "choice"), default="test")
    part = parser.parse_args().part
    predictor = Predictor.load(MODEL, device="cpu")
    model = predictor.model
    assert model is not None and predictor.checkpoint is not None  # weights, not an exported file
    images = read_images(predictor, part)
    described = read_metadata(predictor.checkpoint)
    maps = measure_deletion(model, images, MAPS)
    result = {
        "model": model.name,
        "iterations": model.iterations,
        "weights_sha256": described["sha256"],
        "images": len(images),
        "part": part,
        "share_blurred": SHARE,
        "maps": {name: asdict(found) for name, found in maps.items()},
    }
    path = RESULTS / f"{study_name(predictor.checkpoint, described)}_{part}.json"
    write_measurement(path, result, next(model.parameters()).device, sys.argv)
    if part == "test":
        write_whole(RESULTS / "table.md", table(maps).encode())
    print(table(maps), end="")


if __name__ == "__main__":
    main()
