"""Pictures of made-up evaluations."""

import numpy as np
import pytest
from PIL import Image

from capsroute.train.evaluation import ClassRow, Evaluation, Point
from capsroute.train.pictures import draw_confusion, draw_robustness


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def made_up(classes, multilabel=False):
    size = classes + multilabel
    confusion = tuple(tuple(90 if i == j else 1 for j in range(size)) for i in range(size))
    rows = (ClassRow(100, 90.0, 90.0),) * classes
    return Evaluation(multilabel, 100 * classes, 90.0, rows, confusion)


@pytest.mark.parametrize(("classes", "multilabel"), [(10, False), (10, True), (100, False)])
def test_confusion_is_drawn(tmp_path, classes, multilabel):
    names = [f"class ${index}$ 象" for index in range(classes)]  # neither mathematics nor warnings
    draw_confusion(made_up(classes, multilabel), names, tmp_path / "c.png")
    picture = pixels(tmp_path / "c.png")
    assert min(picture.shape[:2]) > 5 * classes  # room for every row
    assert len(np.unique(picture[::3, ::3, 0])) > 10
    assert [path.name for path in tmp_path.iterdir()] == ["c.png"]


def test_robustness_is_drawn(tmp_path):
    points = [Point("rotation", 0, 90.0), Point("rotation", 30, 50.0)]
    draw_robustness(points, tmp_path / "one.png")
    draw_robustness([*points, Point("shift", 1, 70.0)], tmp_path / "two.png")
    one, two = (pixels(tmp_path / f"{name}.png") for name in ("one", "two"))
    assert two.shape[1] == 2 * one.shape[1]


def test_a_drawing_that_cannot_be_written_leaves_the_old_one(tmp_path):
    with pytest.raises(OSError):
        draw_robustness([Point("shift", 0, 1.0)], tmp_path / "nowhere" / "r.png")
