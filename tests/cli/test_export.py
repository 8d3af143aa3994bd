"""`capsroute export` from end to end."""

import pytest
import torch

import capsroute
from capsroute.export import files
from capsroute.inference import Predictor
from capsroute.models.weights import save_model


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    model = capsroute.create_model("inverted_small_multimnist", image_size=20, iterations=1)
    save_model(model, tmp_path / "mine.safetensors")
    return tmp_path / "mine.safetensors"


@pytest.mark.parametrize(
    ("to", "name"),
    [
        pytest.param("torch-export", "inverted_small_multimnist.pt2", marks=pytest.mark.slow),
        pytest.param("onnx", "inverted_small_multimnist.onnx", marks=pytest.mark.slow),
        ("safetensors", "inverted_small_multimnist.safetensors"),
    ],
)
def test_the_file_can_be_predicted_with(run, checkpoint, tmp_path, to, name):
    status, out, err = run("export", checkpoint, "--to", to)
    assert (status, err) == (0, "")
    assert f"wrote {name}" in out and "differ from the model's by at most" in out
    images = torch.rand(3, 1, 20, 20)
    torch.testing.assert_close(
        Predictor.load(tmp_path / name).probabilities(images),
        Predictor.load(checkpoint).probabilities(images),
        rtol=0,
        atol=1e-4,
    )


def test_iterations_are_fixed_by_the_export(run, checkpoint, tmp_path):
    status, _, _ = run("export", checkpoint, "--to", "safetensors", "--iterations", 2)
    assert status == 0
    assert Predictor.load(tmp_path / "inverted_small_multimnist.safetensors").iterations == 2


def test_a_failed_check_leaves_no_file(run, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_scores_of", lambda path: lambda images: images.sum())
    before = sorted(tmp_path.iterdir())
    status, _, err = run("export", checkpoint, "--to", "safetensors", "--out", "new.safetensors")
    assert status == 2 and "nothing was written" in err and err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "onnx", "--out", "model.pt2"], "`--out` must end in .onnx"),
        (["--to", "onnx", "--out", "nowhere/model.onnx"], "in a folder that exists"),
        (["--to", "safetensors", "--batch", "4"], "goes with a graph only"),
        (["--to", "tflite"], "tflite"),
        ([], "--to"),
    ],
)
def test_mistakes_are_one_line(run, checkpoint, arguments, message):
    status, _, err = run("export", checkpoint, *arguments)
    assert status == 2 and err.count("\n") == 1
    assert err.startswith("error: ") and message in err
