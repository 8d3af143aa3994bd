"""Model cards of the weights that ship: written from a run's summary, and checked against it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capsroute.data.cifar import DISTRIBUTIONS
from capsroute.experiments.evidence import Result, departures, read_evidence
from capsroute.models.base import ImageClassifier
from capsroute.train.config import Config
from capsroute.train.evaluation import Evaluation

CHANGES = {
    True: " with changes",
    False: "",
    None: " (as stated; there was no checkout to confirm it)",
}
CARD = """\
# {title}

`create_model("{name}", pretrained=True{argument})` loads these {params:,}
parameters. Matrices are stored in half precision.

| | |
|---|---|
| data | {data}, {height}×{width} images; classes {classes} |
| recipe | {recipe} |
| accuracy of this file | {shipped:.2f} % of {images:,} test images {right}, in float32 on a CPU |
| accuracy of the run | {accuracy}, which is the one packed even if another was better |
| trained | {trained} |
| made with | {made} |
| evidence | `results/{experiment}/seed{seed}` |

Expect this accuracy only on images like those in the training data. To measure it again, run
`capsroute eval --pretrained {name}{option}{where}`.
"""
ORIGIN = {
    "accuracy": ("accuracy of the run", "{test_accuracy_last:.2f} % at its last epoch"),
    "trained": ("trained", "{minutes:.1f} minutes on {device}, {dtype}, seed {seed}"),
    "made": ("made with", "capsroute {capsroute}, commit `{commit}`{changes}, PyTorch {torch}"),
}
"""Rows of the table and how they begin: what a summary says, by which a run is told from others."""
MEASURED = r"(\d+\.\d\d) % of ([\d,]+) test images .*"
LAST = r"(\d+\.\d\d) % at its last epoch.*"
"""How the rows on accuracy, of the file and of the run, are written."""
WITHIN = 0.15
"""Points by which packed weights may differ from their run. Measured in bfloat16 and in float32,
about 15 of 10,000 images go to or from the right class; four deviations of what does not cancel."""
RUN_AGAIN = "the files of its own run were not kept; the same recipe run again: "
"""Before the evidence on a card whose weights are from another run than it. Written by hand."""


def card_text(
    model: ImageClassifier, config: Config, summary: dict[str, Any], measured: Evaluation
) -> str:
    """The text beside the weights: what they are, how good, and where they came from."""
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
        right="with every label right" if measured.multilabel else "classified correctly",
        **_origin(summary),
        **{key: summary[key] for key in ("params", "experiment", "seed")},
    )


def is_of_run(accuracy: float, last: float, images: int) -> bool:
    """Whether packed weights are as accurate, on so many images, as their run was at its end."""
    return abs(accuracy - last) <= max(WITHIN, 100 / images)


def _recipe(config: Config) -> str:
    departed = departures(config)
    return _command(config) + (f", but {'; '.join(departed)}" if departed else "")


def _command(config: Config) -> str:
    return f"`capsroute reproduce {config.experiment} --seeds {config.seed}`"


def _origin(summary: dict[str, Any]) -> dict[str, str]:
    known = {"minutes": summary["train_seconds"] / 60, "changes": CHANGES[summary["dirty"]]}
    return {key: text.format(**known, **summary) for key, (_, text) in ORIGIN.items()}


def study_name(checkpoint: Path, weights: Mapping[str, Any]) -> str:
    """Of what is measured of weights: the experiment of their run, by its config or their card.

    Of other weights the model and its iterations; `read_metadata` describes them.
    """
    config, card = checkpoint.with_name("config.json"), checkpoint.with_suffix(".md")
    if config.is_file():
        return str(json.loads(config.read_text())["experiment"])
    if card.is_file() and (named := _named_by(_rows(card))):
        return named[1]
    return f"{weights['model']}_r{weights['iterations']}"


def check_cards(files: Path, results: Path) -> list[str]:
    """Problems of the cards beside the weights in a folder: is each of the run that it names?"""
    cards = [path.with_suffix(".md") for path in sorted(files.glob("*.safetensors"))]
    return [f"{card}: {problem}" for card in cards for problem in _check_card(card, results)]


def _check_card(card: Path, results: Path) -> list[str]:
    if not card.is_file():
        return ["weights must have a card beside them"]
    rows = _rows(card)
    evidence = rows.get("evidence", "")
    named = _named_by(rows)
    if named is None:
        return [f"`evidence` must be `results/<experiment>/seed<k>`, got {evidence!r}"]
    try:
        wanted = _said_by(read_evidence(results / named[1] / named[2]))
    except (ValueError, OSError) as error:
        return [str(error)]
    if evidence.startswith(RUN_AGAIN):
        wanted = {"recipe": wanted["recipe"]}
    return [
        f"`{row}` must be {text!r}, as in {named[1]}/{named[2]}, got {rows.get(row)!r}"
        for row, text in wanted.items()
        if not rows.get(row, "").startswith(text)
    ] + _check_accuracy(rows)


def _check_accuracy(rows: Mapping[str, str]) -> list[str]:
    """The file's is that of the run, which the card says whether or not its evidence was kept."""
    shipped, ran = rows.get("accuracy of this file", ""), rows.get("accuracy of the run", "")
    measured, last = re.fullmatch(MEASURED, shipped), re.fullmatch(LAST, ran)
    if not measured or not last:
        return [f"accuracies must be of test images and of a last epoch, got {shipped!r}, {ran!r}"]
    images = int(measured[2].replace(",", ""))
    if is_of_run(float(measured[1]), float(last[1]), images):
        return []
    return [f"`accuracy of this file` must be the run's, {last[1]} %, got {measured[1]} %"]


def _rows(card: Path) -> dict[str, str]:
    return dict(re.findall(r"^\| (\w.*?) \| (.*) \|$", card.read_text(), re.MULTILINE))


def _named_by(rows: Mapping[str, str]) -> re.Match[str] | None:
    """The experiment and the seed that a card names as evidence."""
    evidence = rows.get("evidence", "").removeprefix(RUN_AGAIN)
    return re.fullmatch(r"`results/([^/`]+)/(seed\d+)`", evidence)


def _said_by(result: Result) -> dict[str, str]:
    """How rows of a card begin."""
    if result.diverged:
        raise ValueError(f"the run of {result.folder} diverged")
    told = {ORIGIN[key][0]: text for key, text in _origin(result.summary).items()}
    return {"recipe": _command(result.config), **told}
