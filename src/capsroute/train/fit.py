"""Whether a dataset is what a trained model was built for."""

from capsroute.data import Dataset
from capsroute.models.base import ImageClassifier


def check_fit(model: ImageClassifier, dataset: Dataset, crop: int | None = None) -> None:
    """Raise a one-line ValueError if the dataset, its images cropped, is made for another model."""
    several = dataset.task == "multilabel"
    if model.task.multilabel != several:
        kinds = {True: "any number of classes", False: "one class"}
        raise _misfit(model, dataset, f"predicts {kinds[not several]} per image", kinds[several])
    theirs = len(dataset.class_names)
    if model.num_classes != theirs:
        raise _misfit(model, dataset, f"knows {model.num_classes} classes", str(theirs))
    if model.in_channels != dataset.channels:
        takes = f"takes images of {model.in_channels} channels"
        raise _misfit(model, dataset, takes, str(dataset.channels))
    size = dataset.image_size if crop is None else (crop, crop)
    if model.image_size != size:
        sizes = [f"{height}×{width}" for height, width in (model.image_size, size)]
        raise _misfit(model, dataset, f"takes images of {sizes[0]} pixels", sizes[1])
    _check_names(model, dataset)


def _check_names(model: ImageClassifier, dataset: Dataset) -> None:
    """Classes of other names, or in another order, would be measured against each other."""
    ours, theirs = model.class_names, list(dataset.class_names)
    # idx files hold no names: the loader calls their classes 0 to 9
    if ours is None or all(name.isdigit() for name in theirs):
        return
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            raise _misfit(model, dataset, f"calls class {index} {mine!r}", repr(other))


def _misfit(model: ImageClassifier, dataset: Dataset, wants: str, has: str) -> ValueError:
    return ValueError(f"{model.name} {wants} and the dataset {dataset.name} has {has}")
