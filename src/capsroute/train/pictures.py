"""Pictures: the curves of a run; the confusion matrix of an evaluation, and its robustness."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from capsroute import drawing
from capsroute.files import write_whole
from capsroute.train.evaluation import Evaluation, Point

FEW = 20  # evaluations whose points are marked in the curves
NUMBERED = 20  # a matrix of more classes has cells too small for numbers
NAMED = 150  # and of more than this, too many names to write them all


def draw_curves(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Accuracy and loss against epochs, as curves.png."""
    figure = drawing.figure(9, 3.6)
    accuracy, loss = figure.subplots(1, 2)
    epochs = [record["epoch"] for record in records]
    marker = "o" if len(records) <= FEW else None  # one point alone makes no line
    for part, style in (("train", "-"), ("val", "--"), ("test", "-")):
        if records and records[-1].get(f"{part}_accuracy") is not None:
            values = [record[f"{part}_accuracy"] for record in records]
            losses = [record[f"{part}_loss"] for record in records]
            accuracy.plot(epochs, values, style, label=part, marker=marker)
            loss.plot(epochs, losses, style, label=part, marker=marker)
    accuracy.set(xlabel="epoch", ylabel="accuracy, %")
    loss.set(xlabel="epoch", ylabel="loss")
    for axis in (accuracy, loss):
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.suptitle(title, parse_math=False)  # a folder's name may hold dollar signs
    write_whole(path, drawing.png(figure))


def draw_confusion(evaluation: Evaluation, class_names: Sequence[str], path: Path) -> None:
    """The confusion matrix as a PNG, each row shaded by its share of the class's images."""
    from matplotlib.colors import PowerNorm

    names = evaluation.confusion_labels(class_names)
    count = len(names)
    side = min(24.0, max(3.5, 0.55 * count if count <= NUMBERED else 0.17 * count))
    figure = drawing.figure(side + 2.5, side + 1.0)
    axis = figure.subplots()
    # a class's images; for the row of what was predicted with nothing missed, all images
    totals = [row.support for row in evaluation.classes] + [evaluation.images]
    shares = [
        [100.0 * value / max(1, total) for value in row]
        for row, total in zip(evaluation.confusion, totals, strict=False)
    ]
    # below linear, so that the few errors of a good model are seen beside the diagonal
    shading = PowerNorm(0.5, vmin=0, vmax=100)
    image = axis.imshow(shares, cmap="Blues", norm=shading, interpolation="nearest")
    size = 9 if count <= NUMBERED else 7
    positions = range(0, count, -(-count // NAMED))
    labels = [_shortened(names[position]) for position in positions]
    upright = 0 if max(map(len, class_names)) <= 3 else 90
    axis.set_xticks(positions, labels, rotation=upright, fontsize=size, parse_math=False)
    axis.set_yticks(positions, labels, fontsize=size, parse_math=False)
    axis.set(xlabel="predicted", ylabel="true")
    what = "every label right" if evaluation.multilabel else "right"
    axis.set_title(f"{what} in {evaluation.accuracy:.2f} % of {evaluation.images:,} images")
    if count <= NUMBERED:
        _write_numbers(axis, evaluation.confusion, shares)
    figure.colorbar(image, label="% of the row's images", shrink=0.7, ticks=[0, 1, 5, 20, 50, 100])
    write_whole(path, drawing.png(figure))


def _write_numbers(
    axis: Any, counts: Sequence[Sequence[int]], shares: Sequence[Sequence[float]]
) -> None:
    for row, values in enumerate(counts):
        for column, value in enumerate(values):
            if value:
                color = "white" if shares[row][column] > 35 else "black"
                size = 8 if value < 10_000 else 6
                axis.text(column, row, value, ha="center", va="center", color=color, fontsize=size)


def draw_robustness(points: Iterable[Point], path: Path) -> None:
    """Accuracy against rotation and against shift, as a PNG."""
    axes_labels = {"rotation": "rotation, degrees either way", "shift": "shift, pixels"}
    points = list(points)
    kinds = [kind for kind in axes_labels if any(point.kind == kind for point in points)]
    figure = drawing.figure(4.5 * len(kinds), 3.6)
    axes = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axis, kind in zip(axes, kinds, strict=True):
        chosen = [point for point in points if point.kind == kind]
        axis.plot([p.value for p in chosen], [p.accuracy for p in chosen], "o-")
        axis.set_xticks([p.value for p in chosen])
        axis.set(xlabel=axes_labels[kind], ylabel="accuracy, %", ylim=(0, 100))
        axis.grid(alpha=0.3)
    write_whole(path, drawing.png(figure))


def _shortened(name: str, longest: int = 24) -> str:
    return name if len(name) <= longest else name[: longest - 1] + "…"
