"""From a finished run to weights inside the package, with a model card that says what they are."""

from pathlib import Path
from typing import Any

from capsroute.data import load_dataset
from capsroute.experiments.evidence import departures
from capsroute.models.base import ImageClassifier
from capsroute.models.pretrained import FILES, pack
from capsroute.models.weights import load_model
from capsroute.train.checkpoint import RunFolder
from capsroute.train.config import Config, load_config
from capsroute.train.evaluation import Evaluation, evaluate

CARD = """\
# {title}

`create_model("{name}", pretrained=True{argument})` loads these {params:,}
parameters, whose matrices are stored in half precision.

| | |
|---|---|
| data | {data}, {height}×{width} images; classes {classes} |
| recipe | {recipe} |
| accuracy of this file | {shipped:.2f} % of {images:,} test images ({right}), float32 on a CPU |
| accuracy of the run | {last:.2f} % at its last epoch, which was packed: nothing was chosen |
| trained | {minutes:.1f} minutes on {device}, {dtype}, seed {seed} |
| made with | capsroute {capsroute}, commit `{commit}`{changes}, PyTorch {torch} |
| evidence | `results/{experiment}/seed{seed}` |

The accuracy holds for images like those it was trained on. Measure it again with
`capsroute eval --pretrained {name}{option}`.
"""


def ship(run: Path, folder: Path = FILES, data_root: Path | None = None) -> Path:
    """Pack the weights of a finished run, measure what was packed, and write its card."""
    source = RunFolder(run)
    if not source.summary.is_file():
        raise ValueError(f"`run` must be the folder of a finished run, got {run}: no summary.json")
    config = load_config(source.config)
    test = load_dataset(config.data.data, root=data_root).test
    path = pack(load_model(source.model), folder)
    model = load_model(path)
    measured = evaluate(model, test, batch_size=500, device="cpu", crop=config.data.crop)
    card = _card(model, config, source.read_summary(), measured)
    path.with_suffix(".md").write_text(card)
    return path


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
        changes=" with changes" if summary["dirty"] else "",
        **{key: summary[key] for key in ("params", "experiment", "seed", "device", "dtype")},
        **{key: summary[key] for key in ("capsroute", "commit", "torch")},
    )


def _recipe(config: Config) -> str:
    command = f"`capsroute reproduce {config.experiment} --seeds {config.seed}`"
    departed = departures(config)
    return f"{command}, but {'; '.join(departed)}" if departed else command
