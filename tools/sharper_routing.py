"""Measure trained models whose routing is made more decided, and how large their votes are.

    python tools/sharper_routing.py inverted_small_multimnist                # the weights that ship
    python tools/sharper_routing.py runs/inverted_resnet_cifar10_r2_seed0 --data-root ~/data

Writes results/sharper_routing/<name>.json. The name is the experiment of
the run that the weights are of, by its config or their card. `capsroute report` shows them.
"""

import argparse
import sys
from itertools import islice
from pathlib import Path

from capsroute.data import EvalBatches, load_dataset
from capsroute.devices import choose_device
from capsroute.experiments.cards import study_name
from capsroute.experiments.evidence import write_measurement
from capsroute.experiments.sharpness import FOLDER, sharper_routing, vote_scales
from capsroute.models import model_info
from capsroute.models.factory import load_model
from capsroute.models.inverted import InvertedCapsNet
from capsroute.models.sources import find_checkpoint
from capsroute.models.weights import read_metadata

RESULTS = Path(__file__).parents[1] / "results"
IMAGES, BATCH = 2000, 50


def measure(options: argparse.Namespace) -> Path:
    weights = find_checkpoint(options.model, options.trained)
    described = read_metadata(weights)
    device = choose_device(options.device)
    model = load_model(weights).to(device)
    if not isinstance(model, InvertedCapsNet):
        raise ValueError(f"`model` must route by inverted attention, got {model.name}")
    test = load_dataset(model_info(model.name).dataset, root=options.data_root).test.to(device)
    found = {
        "model": model.name,
        "trained_with": described["iterations"],
        "weights_sha256": described["sha256"],
        **vote_scales(model),
        **sharper_routing(model, lambda: islice(EvalBatches(test, BATCH), options.images // BATCH)),
    }
    path = RESULTS / FOLDER / f"{study_name(weights, described)}.json"
    return write_measurement(path, found, device, sys.argv)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="a run's folder, a checkpoint or a name whose weights ship")
    parser.add_argument("--trained", type=int, help="iterations of the weights that ship")
    parser.add_argument("--images", type=int, default=IMAGES, help=f"(default: {IMAGES})")
    parser.add_argument("--data-root", type=Path, help="where datasets are looked for")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    try:
        print(measure(parser.parse_args()))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
