"""Pictures of made-up runs and evaluations."""

import numpy as np
import pytest
from PIL import Image

from capsroute import drawing
from capsroute.train.evaluation import ClassRow, Evaluation, Point
from capsroute.train.pictures import FEW, draw_confusion, draw_curves, draw_robustness

RECORD = {"epoch": 1.0, "train_accuracy": 50.0, "train_loss": 1.0}


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


@pytest.mark.parametrize("name", ["prices_$5_to_$10", "$\\frac$", "象の写真"])
def test_curves_of_data_with_any_name(tmp_path, name):
    """It is neither read as mathematics nor, in a script that the font lacks, warned of."""
    draw_curves([RECORD], tmp_path / "curves.png", f"own_images_{name}")
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.size == (1080, 432)


@pytest.mark.parametrize(("count", "marker"), [(1, "o"), (FEW, "o"), (FEW + 1, "None")])
def test_few_points_are_marked(tmp_path, monkeypatch, count, marker):
    figures, original = [], drawing.png
    monkeypatch.setattr(drawing, "png", lambda figure: figures.append(figure) or original(figure))
    records = [RECORD | {"epoch": float(index)} for index in range(count)]
    draw_curves(records, tmp_path / "curves.png", "marked")
    lines = [line for axis in figures[0].axes for line in axis.get_lines()]
    assert len(lines) == 2 and all(line.get_marker() == marker for line in lines)
