"""Datasets against models: each misfit is told, in one line, by itself."""

from dataclasses import replace

import pytest
import torch

from capsroute.data import ArraySplit, Dataset
from capsroute.models.base import ImageClassifier, Task
from capsroute.train.fit import check_fit

PETS = ("cat", "dog")


def make_model(task, class_names=PETS):
    model = ImageClassifier(task)
    model.class_names = None if class_names is None else list(class_names)
    return model


@pytest.fixture
def pets():
    split = ArraySplit(torch.zeros(2, 3, 8, 6, dtype=torch.uint8), torch.arange(2))
    return Dataset("pets", "multiclass", PETS, (8, 6), 3, split, None, split)


def test_what_fits(pets):
    check_fit(make_model(Task(2, (8, 6), 3)), pets)
    check_fit(make_model(Task(2, 5, 3)), pets, crop=5)
    check_fit(make_model(Task(2, (8, 6), 3), class_names=None), pets)
    check_fit(make_model(Task(2, (8, 6), 3)), replace(pets, class_names=("0", "1")))  # no names


@pytest.mark.parametrize(
    ("task", "class_names", "message"),
    [
        (Task(2, (8, 6), 3, multilabel=True), PETS, "predicts any number of classes per image"),
        (Task(3, (8, 6), 3), None, "knows 3 classes and the dataset pets has 2"),
        (Task(2, (8, 6), 1), PETS, "takes images of 1 channels and the dataset pets has 3"),
        (Task(2, 8, 3), PETS, "takes images of 8×8 pixels and the dataset pets has 8×6"),
        (Task(2, (8, 6), 3), ("dog", "cat"), "calls class 0 'dog' and the dataset pets has 'cat'"),
    ],
)
def test_what_does_not(pets, task, class_names, message):
    with pytest.raises(ValueError, match=message) as caught:
        check_fit(make_model(task, class_names), pets)
    assert "\n" not in str(caught.value)
