"""Put the weights of finished runs into the package, and what they predict into the tests.

    python tools/ship_weights.py runs/fast_cifar10_seed0 --data-root ~/data

For each run this writes src/capsroute/models/files/<model>_r<iterations>.{safetensors,md}, the card
with the accuracy of what was packed, and tests/models/samples/<same name>.json, the answers and
probabilities for at most 200 test images. Weights of the same model and iterations are replaced.
The run's evidence must be in results/, where `capsroute reproduce` puts it: the card names it.
Images that are not inside the package go beside the answers, as one PNG.

With no run at all, the answers of everything that ships are written again.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from capsroute.data import load_dataset
from capsroute.experiments.shipping import ship
from capsroute.inference import Prediction, Predictor
from capsroute.models import model_info
from capsroute.models.pretrained import FILES

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "tests" / "models" / "samples"
MOST = 200
TOLERANCE = 1e-3  # of a probability; another machine rounds differently, by far less than this
PER_ROW = 20
IN_THE_PACKAGE = ("diverse_multimnist",)
ORIGINS = {
    "diverse_multimnist": "generated from the MNIST test digits inside the package",
    "cifar10": "test images of CIFAR-10 (Krizhevsky, 2009), numbered as in its test batch",
    "cifar100": "test images of CIFAR-100 (Krizhevsky, 2009), numbered as in its test file",
}


def write_sample(weights: Path, data_root: Path | None) -> None:
    """What a shipped file answers for some test images of its dataset, and those images."""
    predictor = Predictor.load(weights, device="cpu")
    data = model_info(predictor.name).dataset
    test = load_dataset(data, root=data_root).test
    targets = test.render(torch.arange(len(test))[:, None])[1]
    rows = choose(targets)
    images = test.render(rows[:, None])[0]
    answers = predictor.predict([as_picture(image) for image in images], len(predictor.class_names))
    truths = [names_of(target, predictor.class_names) for target in targets[rows]]
    records = [
        as_record(*parts, predictor.multilabel)
        for parts in zip(rows.tolist(), truths, answers, strict=True)
    ]
    right = sum(set(record["truth"]) == set(record["answer"]) for record in records)
    about = {
        "data": data,
        "origin": ORIGINS[data],
        "rule": rule(targets),
        "tolerance": TOLERANCE,
        "accuracy": 100 * right / len(records),
    }
    SAMPLES.mkdir(exist_ok=True)
    (SAMPLES / f"{weights.stem}.json").write_text(one_image_a_line(about, records))
    if data not in IN_THE_PACKAGE:
        write_sheet(images, SAMPLES / f"{data}.png")


def choose(targets: Tensor) -> Tensor:
    """Rows of the first images of each class, class by class; with several labels, the first."""
    if targets.ndim == 2:
        return torch.arange(min(MOST, len(targets)))
    classes = targets.unique()
    return torch.cat([(targets == k).nonzero()[: MOST // len(classes), 0] for k in classes])


def rule(targets: Tensor) -> str:
    if targets.ndim == 2:
        return f"the first {MOST} test images"
    return f"the first {MOST // len(targets.unique())} test images of each class"


def names_of(target: Tensor, names: list[str]) -> list[str]:
    """Of one class, or of those that a row of zeros and ones marks."""
    return [names[k] for k in (target.nonzero().flatten() if target.ndim else [target])]


def as_record(row: int, truth: list[str], answer: Prediction, multilabel: bool) -> dict[str, Any]:
    probabilities = {name: round(p, 4) for name, p in answer.ranked if p > TOLERANCE / 2}
    close = {"too_close_to_call": True} if too_close(answer, multilabel) else {}
    labels = {"truth": truth, "answer": answer.labels, **close}
    return {"row": row, **labels, "probabilities": probabilities}


def too_close(answer: Prediction, multilabel: bool) -> bool:
    """Whether probabilities within the tolerance could give another answer."""
    first, second, *_ = ranked = [p for _, p in answer.ranked]
    if multilabel:
        return any(abs(p - 0.5) <= TOLERANCE for p in ranked)
    return first - second <= 2 * TOLERANCE


def one_image_a_line(about: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """JSON whose differences can be read."""
    head = json.dumps(about, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(line)}" for line in records)
    return f'{head},\n "images": [\n{lines}\n ]\n}}\n'


def as_picture(image: Tensor) -> Image.Image:
    """uint8 (channels, height, width), one channel or three."""
    pixels = image.permute(1, 2, 0).numpy()
    return Image.fromarray(np.ascontiguousarray(pixels.squeeze(-1) if len(image) == 1 else pixels))


def write_sheet(images: Tensor, path: Path) -> None:
    """Images (n, 3, side, side) in rows of 20, losslessly."""
    count, channels, height, width = images.shape
    grid = images.view(count // PER_ROW, PER_ROW, channels, height, width).permute(2, 0, 3, 1, 4)
    sheet = grid.reshape(channels, count // PER_ROW * height, PER_ROW * width)
    as_picture(sheet).save(path, optimize=True)


@contextmanager
def measuring(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar, where there is a terminal: some minutes on a CPU."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"measuring {what}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="*", help="folders of finished runs")
    parser.add_argument("--data-root", type=Path, help="where datasets are looked for")
    options = parser.parse_args()
    for run in options.runs:
        try:
            with measuring(run.name) as progress:
                weights = ship(
                    run, ROOT / "results", data_root=options.data_root, progress=progress
                )
        except (ValueError, OSError) as error:
            parser.error(str(error))
        write_sample(weights, options.data_root)
        print(f"{run} -> {weights} ({weights.stat().st_size:,} bytes)")
    for weights in [] if options.runs else sorted(FILES.glob("*.safetensors")):
        write_sample(weights, options.data_root)
        print(f"{weights} -> {SAMPLES / weights.stem}.json")


if __name__ == "__main__":
    main()
