import pytest
from PIL import Image

from capsroute import drawing
from capsroute.train.metrics import FEW, draw_curves

RECORD = {"epoch": 1.0, "train_accuracy": 50.0, "train_loss": 1.0}


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
