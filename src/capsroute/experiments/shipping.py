"""From a finished run to weights inside the package, with a model card that says what they are."""

import tempfile
from pathlib import Path
from typing import Any

from capsroute.data import load_dataset
from capsroute.data.cifar import DISTRIBUTIONS
from capsroute.experiments.evidence import departures
from capsroute.files import write_whole
from capsroute.models.base import ImageClassifier
from capsroute.models.pretrained import FILES, pack
from capsroute.models.weights import load_model
from capsroute.progress import Progress
from capsroute.train.checkpoint import RunFolder
from capsroute.train.config import Config, load_config
from capsroute.train.evaluation import Evaluation, evaluate

WITHIN = 0.15
"""Points by which packed weights may differ from their run. Measured in bfloat16 and in float32,
about 15 of 10,000 images go to or from the right class; four deviations of what does not cancel."""

CHANGES = {True: " with changes", False: "", None: " (as told: no checkout there)"}
CARD = """\
# {title}

`create_model("{name}", pretrained=True{argument})` loads these {params:,}
parameters, whose matrices are stored in half precision.

| | |
|---|---|
| data | {data}, {height}×{width} images; classes {classes} |
| recipe | {recipe} |
| accuracy of this file | {shipped:.2f} % of {images:,} test images ({right}), float32 on a CPU |
| accuracy of the run | {last:.2f} % at its last epoch, which was packed, be others better or not |
| trained | {minutes:.1f} minutes on {device}, {dtype}, seed {seed} |
| made with | capsroute {capsroute}, commit `{commit}`{changes}, PyTorch {torch} |
| evidence | `results/{experiment}/seed{seed}` |

The accuracy holds for images like those it was trained on. Measure it again with
`capsroute eval --pretrained {name}{option}{where}`.
"""


def ship(
    run: Path,
    folder: Path = FILES,
    data_root: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Pack the weights of a finished run, measure what was packed, and write its card.

    What ships now is replaced only when the new file measures as its run did.
    """
    source = RunFolder(run)
    if not source.summary.is_file():
        raise ValueError(f"`run` must be the folder of a finished run, got {run}: no summary.json")
    config, summary = load_config(source.config), source.read_summary()
    test = load_dataset(config.data.data, root=data_root).test
    with tempfile.TemporaryDirectory() as scratch:
        packed = pack(load_model(source.model), Path(scratch))
        model = load_model(packed)
        measured = evaluate(
            model, test, batch_size=500, device="cpu", crop=config.data.crop, progress=progress
        )
        _check(run, summary["test_accuracy_last"], measured)
        path = folder / packed.name
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, packed.read_bytes())
    write_whole(path.with_suffix(".md"), _card(model, config, summary, measured).encode())
    return path


def _check(run: Path, last: float, measured: Evaluation) -> None:
    within = max(WITHIN, 100 / measured.images)
    if abs(measured.accuracy - last) > within:
        raise ValueError(
            f"`run` must hold the weights of its last epoch, got {run}: they get "
            f"{measured.accuracy:.2f} %, its summary says {last:.2f} %"
        )


def _card(
    model: ImageClassifier, config: Config, summary: dict[str, Any], measured: Evaluation
) -> str:
    count = model.iterations
    plural = "s" if count != 1 else ""
    names = model.class_names or []
    height, width = model.image_size
    return CARD.format(
        title=model.name + (f", {count} routing iteration{plural}" if count else ""),
        name=model.name,
        argument=f", iterations={count}" if count else "",
        option=f" --iterations {count}" if count else "",
        where=" --data-root DIR" if config.data.data in DISTRIBUTIONS else "",
        data=config.data.data,
        height=height,
        width=width,
        classes=", ".join(names) if len(names) <= 10 else f"{names[0]} to {names[-1]}",
        recipe=_recipe(config),
        shipped=measured.accuracy,
        images=measured.images,
        right="every label of an image right" if measured.multilabel else "the class right",
        last=summary["test_accuracy_last"],
        minutes=summary["train_seconds"] / 60,
        changes=CHANGES[summary["dirty"]],
        **{key: summary[key] for key in ("params", "experiment", "seed", "device", "dtype")},
        **{key: summary[key] for key in ("capsroute", "commit", "torch")},
    )


def _recipe(config: Config) -> str:
    command = f"`capsroute reproduce {config.experiment} --seeds {config.seed}`"
    departed = departures(config)
    return f"{command}, but {'; '.join(departed)}" if departed else command
