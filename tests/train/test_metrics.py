import pytest
from PIL import Image

from capsroute.train.metrics import draw_curves

RECORD = {"epoch": 1.0, "train_accuracy": 50.0, "train_loss": 1.0}


@pytest.mark.parametrize("name", ["prices_$5_to_$10", "$\\frac$", "象の写真"])
def test_curves_of_data_with_any_name(tmp_path, name):
    """It is neither read as mathematics nor, in a script that the font lacks, warned of."""
    draw_curves([RECORD], tmp_path / "curves.png", f"own_images_{name}")
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.size == (1080, 432)
