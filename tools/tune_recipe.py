"""Compare changes to a recipe on a validation split: the test images are not looked at.

    python tools/tune_recipe.py fast_cifar10 --epochs 100 --data-root ~/data \\
        'data.cutmix=0.5' 'data.cutmix=0.5 data.cutout=0' 'model.bn_group=32'

Each change is one or several fields of the config, separated by spaces; the preset as it is comes
first. A fifth of the training images is held back, the accuracy on them after the last epoch
counts: of 10,000 images of CIFAR it has a standard error of about 0.2 points. Rows go to
results/tuning/<preset>.csv as they come; those that are there are not run again, by a digest of
what the config sets: what "as it is" means changes with the preset. Where the learning rate falls
in steps, it does so after the same shares of the run; it rises for as many steps as in the preset.
"""

import argparse
import csv
import dataclasses
import hashlib
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from capsroute.experiments import preset
from capsroute.experiments.studies import TUNING, TUNING_COLUMNS, TUNING_ORIGIN
from capsroute.files import write_whole
from capsroute.train.build import Runtime
from capsroute.train.config import WITHOUT_EFFECT, Config
from capsroute.train.engine import DivergedError, train
from capsroute.train.provenance import named
from capsroute.train.reporting import Reporter

RESULTS = Path(__file__).parents[1] / "results" / TUNING
HELD_BACK = 0.2
Row = dict[str, Any]


def with_change(config: Config, change: str) -> Config:
    """`data.cutmix=0.5 optim.lr=0.2`, values as in JSON."""
    for field in change.split():
        path, _, value = field.partition("=")
        part, _, name = path.rpartition(".")
        try:
            holder: Any = getattr(config, part) if part else config
            given = json.loads(value)
            given = tuple(given) if isinstance(given, list) else given
            holder = dataclasses.replace(holder, **{name: given})
        except (AttributeError, TypeError, json.JSONDecodeError):
            raise ValueError(
                "`changes` must be fields of a config with values as in JSON, such as "
                f"data.cutmix=0.5, got {field!r}"
            ) from None
        changed: dict[str, Any] = {part: holder}
        config = dataclasses.replace(config, **changed) if part else holder
    return config


def shortened(config: Config, epochs: int) -> Config:
    """With milestones at the same shares of the run: without a fall, only noise is compared.

    Warm-up keeps its length: a model that collapses in its first steps does so in any run.
    """
    if config.optim.lr_schedule != "step" or config.epochs is None:
        return config
    falls = tuple(round(fall * epochs / config.epochs) for fall in config.optim.milestones)
    warmup = min(1.0, config.optim.warmup * config.epochs / epochs)
    optim = dataclasses.replace(config.optim, milestones=falls, warmup=warmup)
    return dataclasses.replace(config, optim=optim)


def plan(options: argparse.Namespace, change: str) -> Config:
    config = with_change(shortened(preset(options.preset).config, options.epochs), change)
    data = dataclasses.replace(
        config.data, validation=HELD_BACK, data_root=options.data_root and str(options.data_root)
    )
    # evaluated once, at the end; the run's test accuracy is never read
    return dataclasses.replace(
        config,
        data=data,
        epochs=options.epochs,
        steps=None,
        seed=options.seed,
        eval_every=10**9,
    )


def digest(config: Config) -> str:
    """Of all that may change the result.

    Not where the data lies, how often a run is saved, or options that are not set: a new one would
    make another row of every row.
    """
    settings = dataclasses.asdict(config)
    settings["data"]["data_root"] = None
    settings |= dict.fromkeys(WITHOUT_EFFECT)
    for part in (settings, *(part for part in settings.values() if isinstance(part, dict))):
        for name in [name for name, value in part.items() if value is None]:
            del part[name]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def run(config: Config, change: str) -> Row:
    """A row; one without an accuracy if the run diverged."""
    row: Row = {
        "change": change or "as it is",
        "epochs": config.epochs,
        "seed": config.seed,
        "config": digest(config),
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = train(config, Path(folder) / "run", Runtime(), Reporter())
    except DivergedError as error:
        return dict.fromkeys(TUNING_COLUMNS, "") | row | where(named(error.origins))
    measured = {
        "val_accuracy": round(found["val_accuracy"], 2),
        "seconds": round(found["train_seconds"]),
    }
    return row | measured | where(found)


def where(found: dict[str, Any]) -> Row:
    return {name: found[name] for name in ("device", "commit", *TUNING_ORIGIN)}


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[Row]) -> None:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, TUNING_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, buffer.getvalue().encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("preset")
    parser.add_argument("changes", nargs="*", metavar="FIELD=VALUE…")
    parser.add_argument("--epochs", type=int, default=100, help="(default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--data-root", type=Path, help="where datasets are looked for")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after as many")
    parser.add_argument("--out", type=Path, default=RESULTS, help="(default: results/tuning)")
    options = parser.parse_intermixed_args()
    try:  # all of them, before the first one trains for minutes
        plans = {change: plan(options, change) for change in ["", *options.changes]}
    except ValueError as error:
        parser.error(str(error))
    path, start = options.out / f"{options.preset}.csv", time.monotonic()
    for change, config in plans.items():
        rows = read(path)
        if digest(config) in [row["config"] for row in rows]:
            continue
        if time.monotonic() - start > 60 * options.minutes:
            print(f"no time is left for: {change or 'as it is'}")
            return
        row = run(config, change)
        write(path, [*rows, row])
        print(f"{row['val_accuracy'] or 'diverged'}  {row['change']}", flush=True)


if __name__ == "__main__":
    main()
