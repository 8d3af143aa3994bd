"""What a trained model gets right: by class, by number of labels, and when images turn or shift."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from capsroute.data import ArraySplit, DiverseMultiMNIST, EvalBatches, Split, rotate_shift
from capsroute.models.base import ImageClassifier, evaluating
from capsroute.progress import Progress

Transform = Callable[[Tensor, Tensor], Tensor]
"""Float images and their positions in the split, to the images that the model sees."""

NOTHING = "none"
"""Label of the last row and column of a multi-label confusion matrix."""


class ClassRow(NamedTuple):
    """One class. Percent; None where there is nothing to divide by."""

    support: int
    """Images that have the class."""
    recall: float | None
    """Of those, the share in which it was predicted."""
    precision: float | None
    """Of the images for which it was predicted, the share that have it."""


class CountRow(NamedTuple):
    """Images with the same number of labels."""

    labels: int
    images: int
    accuracy: float


class Point(NamedTuple):
    """Accuracy in percent after all images were turned by degrees or shifted by pixels."""

    kind: Literal["rotation", "shift"]
    value: float
    accuracy: float


@dataclass(frozen=True)
class Evaluation:
    """How a model did on a split. Shares are in percent.

    `confusion[true][predicted]` counts images. For one class per image it is the usual matrix.

    With several labels per image, it answers which label is taken for which. Entry (j, j) counts
    the images in which j was found. Entry (j, k) counts those in which j was missed and k
    predicted though absent. The last column counts those in which j was missed and nothing wrong
    predicted in its stead; the last row, those in which k was predicted though nothing was
    missed. An image with two misses and two false labels is in four entries, so rows can sum to
    more than the support.
    """

    multilabel: bool
    images: int
    accuracy: float
    """Images whose class, or whose whole set of labels (at 0.5), is right."""
    classes: tuple[ClassRow, ...]
    confusion: tuple[tuple[int, ...], ...]
    counts: tuple[CountRow, ...] = ()
    """By the number of labels an image has; empty for one class per image."""
    not_finite: int = 0
    """Images with a score that is infinite or no number."""

    def confusion_labels(self, class_names: Sequence[str]) -> list[str]:
        """What the rows and columns of `confusion` stand for."""
        return [*class_names, NOTHING] if self.multilabel else list(class_names)

    def as_dict(self, class_names: Sequence[str], points: Iterable[Point] = ()) -> dict[str, Any]:
        """As evaluation.json holds it, with what `robustness` found."""
        return {
            "images": self.images,
            "accuracy": self.accuracy,
            "not_finite": self.not_finite,
            "classes": [
                {"name": name, **row._asdict()}
                for name, row in zip(class_names, self.classes, strict=True)
            ],
            "counts": [row._asdict() for row in self.counts],
            "confusion": {
                "labels": self.confusion_labels(class_names),
                "rows_true_columns_predicted": self.confusion,
            },
            "robustness": [point._asdict() for point in points],
        }


def evaluate(
    model: ImageClassifier,
    split: Split,
    *,
    batch_size: int,
    device: torch.device | str,
    transform: Transform | None = None,
    dtype: str = "float32",
    crop: int | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Run the model, moved to `device`, over every image of the split.

    `crop` keeps the centre of each image, for a model trained on crops. Of a split that is
    generated without end, 10,000 images stand for all (see `finite`).
    """
    where = torch.device(device)
    batches = EvalBatches(finite(split).to(where), batch_size, crop=crop)
    model.to(where)
    tally = _Tally(model, where)
    with torch.no_grad(), evaluating(model):
        for index, (images, targets) in enumerate(batches):
            if transform is not None:
                first = index * batch_size
                rows = torch.arange(first, first + len(images), device=where)
                images = transform(images, rows)
            with torch.autocast(where.type, torch.bfloat16, enabled=dtype == "bfloat16"):
                scores = model(images)
            tally.add(scores, targets)
            if progress is not None:
                progress(index + 1, len(batches))
    return tally.result()


def finite(split: Split) -> Split:
    """The split; for an endless source of images, a set of 10,000 that is always the same."""
    if not isinstance(split, DiverseMultiMNIST):
        return split
    images, targets, _ = split.fixed_set()
    return ArraySplit(images, targets)


class _Tally:
    """Counts on the device. Nothing is read before the end, since reading waits."""

    def __init__(self, model: ImageClassifier, device: torch.device) -> None:
        self.model = model
        classes = model.num_classes
        self.not_finite = _zeros(1, device=device)
        self.support = _zeros(classes, device=device)
        self.predicted = _zeros(classes, device=device)
        self.confusion = _zeros(classes + 1, classes + 1, device=device)
        self.by_count = _zeros(2, classes + 1, device=device)  # images, and those right

    def add(self, scores: Tensor, targets: Tensor) -> None:
        true, predicted = self._labels(targets), self.model.decide(scores)
        right = (predicted == true).all(dim=1)
        self.not_finite += (~scores.isfinite()).any(dim=1).sum()
        self.support += true.sum(dim=0)
        self.predicted += predicted.sum(dim=0)
        self.confusion += _confusion(true, predicted)
        labels = true.sum(dim=1)
        self.by_count[0].index_add_(0, labels, torch.ones_like(labels))
        self.by_count[1].index_add_(0, labels, right.long())

    def _labels(self, targets: Tensor) -> Tensor:
        """True labels as booleans (images, classes)."""
        if self.model.task.multilabel:
            return targets.bool()
        return targets[:, None] == torch.arange(self.model.num_classes, device=targets.device)

    def result(self) -> Evaluation:
        multilabel = self.model.task.multilabel
        images, right = self.by_count.tolist()
        confusion = self.confusion.tolist()
        found = [row[index] for index, row in enumerate(confusion)]
        rows = zip(self.support.tolist(), self.predicted.tolist(), found[:-1], strict=True)
        if not multilabel:  # something is always predicted, and it is either right or wrong
            confusion = [row[:-1] for row in confusion[:-1]]
        counts = [
            CountRow(labels, total, 100.0 * those / total)
            for labels, (total, those) in enumerate(zip(images, right, strict=True))
            if total and multilabel
        ]
        return Evaluation(
            multilabel=multilabel,
            images=sum(images),
            accuracy=100.0 * sum(right) / sum(images),
            classes=tuple(ClassRow(s, _share(f, s), _share(f, p)) for s, p, f in rows),
            confusion=tuple(tuple(row) for row in confusion),
            counts=tuple(counts),
            not_finite=int(self.not_finite.item()),
        )


def _zeros(*shape: int, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=device)


def _confusion(true: Tensor, predicted: Tensor) -> Tensor:
    """A batch's part of `Evaluation.confusion`, with the row and column for nothing."""
    missed, wrong, found = true & ~predicted, predicted & ~true, true & predicted
    missed = torch.cat([missed, ~missed.any(dim=1, keepdim=True)], dim=1)
    wrong = torch.cat([wrong, ~wrong.any(dim=1, keepdim=True)], dim=1)
    matrix = missed.float().T @ wrong.float()  # sums of ones: exact
    # in place: `matrix[-1, -1] = 0` would copy the number to a GPU, and wait for it
    matrix[-1, -1].zero_()  # nothing missed, nothing wrong
    matrix.diagonal()[:-1].add_(found.sum(dim=0))
    return matrix.long()


def _share(part: int, whole: int) -> float | None:
    return 100.0 * part / whole if whole else None


def robustness(
    model: ImageClassifier,
    split: Split,
    *,
    degrees: Sequence[float] = (),
    shifts: Sequence[int] = (),
    batch_size: int,
    device: torch.device | str,
    dtype: str = "float32",
    crop: int | None = None,
    progress: Progress | None = None,
) -> list[Point]:
    """Accuracy after each rotation and each shift, which `rotate_shift` applies.

    Every other image turns clockwise; shifts take turns to go right, down, left and up. What
    leaves the image is lost, so part of a fall in accuracy is the data's and not the model's.
    """
    images = finite(split).to(device)
    wanted: list[tuple[Literal["rotation", "shift"], float]] = []
    wanted += [("rotation", value) for value in degrees]
    wanted += [("shift", value) for value in shifts]
    points = []
    for index, (kind, value) in enumerate(wanted):
        evaluation = evaluate(
            model,
            images,
            batch_size=batch_size,
            device=device,
            dtype=dtype,
            crop=crop,
            transform=_turned(value) if kind == "rotation" else _shifted(value),
            progress=_part_of(progress, index, len(wanted)),
        )
        points.append(Point(kind, value, evaluation.accuracy))
    return points


def _turned(degrees: float) -> Transform:
    return lambda images, rows: rotate_shift(images, degrees * (1 - 2 * (rows % 2)))


def _shifted(pixels: float) -> Transform:
    def shift(images: Tensor, rows: Tensor) -> Tensor:
        along, back = pixels * (1 - rows % 2), 1 - 2 * (rows // 2 % 2)
        return rotate_shift(images, 0.0, dx=along * back, dy=(pixels - along) * back)

    return shift


def _part_of(progress: Progress | None, index: int, parts: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, total: progress(index * total + done, parts * total)
