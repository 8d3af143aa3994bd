"""A folder of one's own images: trained, predicted, explained and exported by commands alone."""

import json

import numpy as np
import pytest
from PIL import Image, ImageDraw


@pytest.fixture
def folder(tmp_path):
    """Three classes of shapes, sizes and modes mixed, and one file that is no image."""
    rng = np.random.default_rng(0)
    shapes = {
        "circle": lambda draw, box, fill: draw.ellipse(box, fill=fill),
        "square": lambda draw, box, fill: draw.rectangle(box, fill=fill),
        "bar": lambda draw, box, fill: draw.rectangle((box[0], 0, box[0] + 5, 99), fill=fill),
    }
    for name, draw_shape in shapes.items():
        (tmp_path / "mine" / name).mkdir(parents=True)
        for index in range(20):
            size = tuple(int(side) for side in rng.integers(36, 60, 2))
            image = Image.new("RGB", size, tuple(rng.integers(0, 70, 3).tolist()))
            x, y = rng.integers(4, 14, 2).tolist()
            fill = tuple(rng.integers(150, 255, 3).tolist())
            draw_shape(ImageDraw.Draw(image), (x, y, x + 20, y + 20), fill)
            mode, suffix = [("RGB", "png"), ("P", "gif"), ("RGB", "jpg")][index % 3]
            image.convert(mode).save(tmp_path / "mine" / name / f"{index}.{suffix}")
    (tmp_path / "mine" / "bar" / "broken.png").write_bytes(b"no image")
    return tmp_path / "mine"


def test_by_commands_alone(run, folder, tmp_path):
    status, out, _ = run("train", "--data", folder, "--steps", 60, "--out", "model")
    assert status == 0 and "broken.png" in out and "capsroute predict model" in out
    assert json.loads((tmp_path / "model" / "summary.json").read_text())["test_accuracy_last"] > 60

    one = folder / "circle" / "0.png"
    status, out, _ = run("predict", "model", one, folder / "square" / "1.gif", "--json")
    answers = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and len(answers) == 2
    assert {answer["labels"][0] for answer in answers} <= {"circle", "square", "bar"}
    status, _, err = run("predict", "model", folder)
    assert status == 1 and "broken.png" in err  # the others went on

    status, *_ = run("explain", "model", one, "--out", "explained")
    assert status == 0
    assert {path.suffix for path in (tmp_path / "explained").iterdir()} == {".png", ".html"}

    status, *_ = run("export", "model", "--to", "torch-export", "--out", "model.pt2")
    assert status == 0
    status, exported, _ = run("predict", "model.pt2", one, "--json")
    assert status == 0 and json.loads(exported)["labels"] == answers[0]["labels"]
