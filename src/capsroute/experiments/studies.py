"""Sections of the report that look closer: into trained models, and at how recipes were chosen.

Each is made from the files that a tool wrote into its folder of results/, and left out where there
are none.
"""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from capsroute.experiments.figures import Figure, settling
from capsroute.experiments.markdown import markdown_picture, markdown_table
from capsroute.experiments.movement import SHOWN, read_movements
from capsroute.experiments.sharpness import FOLDER as SHARPER

BATCH_NORM = "batch_norm"  # folders under results/
ROUNDING = "gradient_rounding"
TUNING = "tuning"
TUNING_ORIGIN = ("python", "torch", "capsroute", "dirty")
TUNING_COLUMNS = (
    *("change", "epochs", "seed", "val_accuracy", "seconds", "device", "commit"),
    *(*TUNING_ORIGIN, "config"),
)
OLD_TUNING_COLUMNS = tuple(name for name in TUNING_COLUMNS if name not in TUNING_ORIGIN)
"""Of the files of tools/tune_recipe.py, and of those from before rows named versions."""
Found = Mapping[str, Mapping[str, Any]]
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Studies(NamedTuple):
    """What the tools measured, by model, run or preset."""

    movements: Found = NOTHING
    sharper: Found = NOTHING
    batch_norm: Found = NOTHING
    rounding: Found = NOTHING
    tuning: Mapping[str, list[dict[str, str]]] = NOTHING
    tuning_notes: str = ""

    @classmethod
    def read(cls, results: Path) -> "Studies":
        return cls(
            read_movements(results),
            _read_all(results / SHARPER),
            _read_all(results / BATCH_NORM),
            _read_all(results / ROUNDING),
            {path.stem: _rows(path) for path in sorted((results / TUNING).glob("*.csv"))},
            _text(results / TUNING / "notes.md"),
        )

    def sections(self, drawn: Mapping[str, Figure]) -> list[str]:
        """Markdown; an empty one for what was not measured."""
        return [
            _settling(self.movements, drawn),
            _sharper(self.sharper),
            _batch_norm(self.batch_norm),
            _rounding(self.rounding),
            _tuning(self.tuning, self.tuning_notes),
        ]

    def figures(self) -> list[Figure]:
        if not self.movements:
            return []
        lines = {
            name: {
                "initial_poses": each["initial_poses"],
                "class_movement": each["movement"][-1],
                "accuracy": each["accuracy"],
            }
            for name, each in self.movements.items()
        }
        caption = "Movement of poses, and accuracy, when routing runs for longer than in training"
        return [Figure("settling", caption, settling, lines)]


def _read_all(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""


def _settling(movements: Found, drawn: Mapping[str, Figure]) -> str:
    if not movements:
        return ""
    rows = []
    for name, found in movements.items():
        moved, right = found["movement"][-1], found["accuracy"]
        trained = found["trained_with"] - 1
        cells = [name, f"{found['images']:,}", f"{found['unevenness'][-1][trained]:.3f}"]
        cells += [f"{right[index]:.1f}" for index in (trained, -1)]
        rows.append([*cells, *(f"{moved[t - 2]:.4f}" for t in SHOWN)])
    last = len(next(iter(movements.values()))["accuracy"])
    headings = ["model", "images", "unevenness", "accuracy as trained", f"after {last} iterations"]
    headings += [f"movement at {t}" for t in SHOWN]
    text = (
        "How far the poses of the class capsules still move, ‖pₜ − pₜ₋₁‖ / ‖pₜ‖, when trained "
        "models are routed for more iterations than they were trained with (updating every layer "
        "in each), and the accuracy if routing stopped there (`tools/pose_movement.py`). "
        "**Unevenness** is the root mean square of M r − 1 over the class layer's coefficients r, "
        "in the last iteration that the model was trained with; it is 0 where all M parents get "
        "the same share of every child. With a **random start**, poses begin as noise, not at zero."
    )
    section = ["## Does the routing settle?", text, markdown_table(headings, rows)]
    return "\n\n".join([*section, markdown_picture(drawn["settling"])])


def _sharper(sharper: Found) -> str:
    if not sharper:
        return ""
    factors = next(iter(sharper.values()))["factors"]
    headings = ["model", "images", "transforms", "gains", *(f"× {factor:,}" for factor in factors)]
    rows = []
    for name, found in sharper.items():
        sizes = [", ".join(f"{x:.2g}" for x in found[key]) for key in ("transforms", "gains")]
        pairs = zip(found["accuracy"], found["unevenness"], strict=True)
        rows.append(
            [name, f"{found['images']:,}", *sizes, *(f"{a:.1f} ({u:.2g})" for a, u in pairs)]
        )
    text = (
        "Accuracy and, in brackets, unevenness of the class layer when every agreement of a "
        "trained model is scaled by a factor (0: even shares) and nothing else is changed "
        "(`tools/sharper_routing.py`). **Transforms** gives the size of each routed layer's "
        "transforms relative to their initial scale, **gains** the LayerNorm gains of the primary "
        "capsules and of each routed layer (both root mean squares, 1 at initialisation). The "
        "scale of a vote is that of its transform times the gain below it."
    )
    return "\n\n".join(["## Would sharper routing help?", text, markdown_table(headings, rows)])


def _batch_norm(found: Found) -> str:
    if not found:
        return ""
    rows = [
        [name, *(f"{each[key]:.2f}" for key in ("accuracy_as_trained", "accuracy"))]
        for name, each in found.items()
    ]
    images = {f"{each['images']:,}" for each in found.values()}
    text = (
        "Accuracy on the test images, in float32, with other running statistics and the same "
        "weights (`tools/batch_norm_statistics.py`). The paper's recipe takes these statistics "
        "from the first 16 images of each batch only; here they are replaced by averages over "
        f"{' or '.join(sorted(images))} images drawn as in training."
    )
    table = markdown_table(["run", "as trained", "better statistics"], rows)
    return "\n\n".join(["## Do better BatchNorm statistics help?", text, table])


def _rounding(found: Found) -> str:
    if not found:
        return ""
    parts = list(next(iter(found.values()))["bf16"]["everything"])
    rows = [
        [
            name,
            what,
            *(f"{errors[part]['error']:.3f} ({errors[part]['along']:.3f})" for part in parts),
        ]
        for name, each in found.items()
        for what, errors in each["bf16"].items()
    ]
    text = (
        "How far the gradient of a training step is from that in float32, relative to its length "
        "and part by part of the model, when everything is in bfloat16 as in training, only the "
        "backbone, or only the primary capsules and the routing; in brackets its component along "
        "the exact gradient, 1 if rounding does not shorten it (`tools/gradient_rounding.py`). "
        "**Other images** is the gradient of another batch, in float32, compared in the same way: "
        "the noise that any training lives with."
    )
    headings = ["weights", "in bfloat16", *(f"gradient of {part}" for part in parts)]
    title = "## What does bfloat16 do to the gradient?"
    return "\n\n".join([title, text, markdown_table(headings, rows)])


def _tuning(tuning: Mapping[str, list[dict[str, str]]], notes: str) -> str:
    if not tuning:
        return ""
    rows = [
        [
            *(name, f"`{row['change']}`", row["epochs"], row["seed"]),
            f"{float(row['val_accuracy']):.2f}" if row["val_accuracy"] else "diverged",
            f"`{row['commit'][:8]}`",
        ]
        for name, rows in tuning.items()
        for row in rows
    ]
    text = (
        "How our own recipes were chosen, and what the paper's may leave unstated "
        "(`tools/tune_recipe.py`). A fifth of the training images is held back, and what counts is "
        "the accuracy on them after the last epoch; no test image is looked at. Each change is "
        "made to the preset as it was at the commit named."
    )
    headings = ["preset", "change", "epochs", "seed", "held back", "commit"]
    section = ["## Tuning", text, markdown_table(headings, rows), notes]
    return "\n\n".join(filter(None, section))
