"""Measure how far the poses of trained models move when routing goes on for 50 iterations.

    python tools/pose_movement.py inverted_small_multimnist                # the weights that ship
    python tools/pose_movement.py runs/inverted_resnet_cifar10_r2_seed0 --data-root ~/data

Writes results/pose_movement/<name>_<initial poses>.json for poses that start at zero, as in
training, and at random. The name is the experiment of
the run that the weights are of, by its config or their card. `capsroute report` draws them.
"""

import argparse
import sys
from pathlib import Path

from capsroute.data import EvalBatches, load_dataset
from capsroute.devices import choose_device
from capsroute.experiments.cards import study_name
from capsroute.experiments.evidence import write_measurement
from capsroute.experiments.movement import FOLDER, pose_movement
from capsroute.models import model_info
from capsroute.models.factory import load_model
from capsroute.models.inverted import InvertedCapsNet
from capsroute.models.sources import find_checkpoint
from capsroute.models.weights import read_metadata

RESULTS = Path(__file__).parents[1] / "results"
IMAGES, BATCH = 1000, 50


def measure(options: argparse.Namespace, initial: str) -> Path:
    weights = find_checkpoint(options.model, options.trained)
    described = read_metadata(weights)
    device = choose_device(options.device)
    model = load_model(weights, iterations=options.iterations, initial_poses=initial).to(device)
    if not isinstance(model, InvertedCapsNet):
        raise ValueError(f"`model` must route by inverted attention, got {model.name}")
    test = load_dataset(model_info(model.name).dataset, root=options.data_root).test.to(device)
    batches = EvalBatches(test, BATCH)
    some = (batch for batch, _ in zip(batches, range(options.images // BATCH), strict=False))
    found = {
        "model": model.name,
        "trained_with": described["iterations"],
        "initial_poses": initial,
        "weights_sha256": described["sha256"],
        **pose_movement(model, some),
    }
    path = RESULTS / FOLDER / f"{study_name(weights, described)}_{initial}.json"
    return write_measurement(path, found, device, sys.argv)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="a run's folder, a checkpoint or a name whose weights ship")
    parser.add_argument("--trained", type=int, help="iterations of the weights that ship")
    parser.add_argument("--iterations", type=int, default=50, help="to route for (default: 50)")
    parser.add_argument("--images", type=int, default=IMAGES, help=f"(default: {IMAGES})")
    parser.add_argument("--data-root", type=Path, help="where datasets are looked for")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options = parser.parse_args()
    try:
        for initial in ("zeros", "random"):
            print(measure(options, initial))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
