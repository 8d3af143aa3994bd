"""`capsroute export` from end to end."""

import pytest
import torch

import capsroute
from capsroute.cli.export import _stages
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
        pytest.param("torch-export", "mine.pt2", marks=pytest.mark.slow),
        pytest.param("onnx", "mine.onnx", marks=pytest.mark.slow),
        ("safetensors", "mine.safetensors"),
    ],
)
def test_the_file_can_be_predicted_with(run, checkpoint, tmp_path, to, name):
    folder = tmp_path / "taken_away"
    folder.mkdir()
    status, out, err = run("export", checkpoint, "--to", to, "--out", folder)
    assert status == 0 and err.splitlines()[0] == f"making {name}"  # no terminal: lines
    assert f"wrote {folder / name}" in out and "differ from the model's by at most" in out
    images = torch.rand(3, 1, 20, 20)
    torch.testing.assert_close(
        Predictor.load(folder / name).probabilities(images),
        Predictor.load(checkpoint).probabilities(images),
        rtol=0,
        atol=1e-4,
    )


def test_iterations_are_fixed_by_the_export(run, checkpoint, tmp_path):
    arguments = ("--to", "safetensors", "--iterations", 2, "--out", "two.safetensors")
    status, _, _ = run("export", checkpoint, *arguments)
    assert status == 0
    assert Predictor.load(tmp_path / "two.safetensors").iterations == 2


def test_a_run_gives_the_file_its_name_and_a_file_that_was_there_is_told(run, checkpoint, tmp_path):
    (tmp_path / "runs" / "pets").mkdir(parents=True)
    inside = checkpoint.rename(tmp_path / "runs" / "pets" / "model.safetensors")
    assert "wrote pets.safetensors" in run("export", "runs/pets", "--to", "safetensors")[1]
    assert "replaced pets.safetensors" in run("export", inside, "--to", "safetensors")[1]


def test_a_model_is_not_written_over_itself(run, checkpoint):
    before = checkpoint.read_bytes()
    status, _, err = run("export", checkpoint, "--to", "safetensors", "--iterations", 2)
    assert status == 2 and "`--out` must be another file than MODEL's own" in err
    assert checkpoint.read_bytes() == before


def test_a_folder_for_the_file_is_made(run, checkpoint, tmp_path):
    out = tmp_path / "new" / "deep" / "model.safetensors"
    status, told, _ = run("export", checkpoint, "--to", "safetensors", "--out", out)
    assert status == 0 and f"wrote {out}" in told and out.is_file()


def test_a_failed_check_leaves_no_file(run, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_scores_of", lambda path: lambda images: images.sum())
    before = sorted(tmp_path.iterdir())
    status, _, err = run("export", checkpoint, "--to", "safetensors", "--out", "new.safetensors")
    *stages, error = err.splitlines()
    assert status == 2 and error.startswith("error: ") and error.endswith("nothing was written")
    assert stages == ["making new.safetensors", "comparing it with the model, 1 image at a time"]
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "onnx", "--out", "model.pt2"], "`--out` must end in .onnx"),
        (["--to", "onnx", "--out", "/dev/null/new/model.onnx"], "/dev/null/new: not a directory"),
        (
            ["--to", "safetensors", "--batch", "4", "--out", "x.safetensors"],
            "goes with a graph only",
        ),
        (["--to", "tflite"], "tflite"),
        ([], "--to"),
    ],
)
def test_mistakes_are_one_line(run, checkpoint, arguments, message):
    status, _, err = run("export", checkpoint, *arguments)
    assert status == 2 and err.count("\n") == 1
    assert err.startswith("error: ") and message in err


def test_on_a_terminal_a_spinner_shows_the_stage_and_leaves_nothing(monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich's word for a terminal
    with _stages() as tell:
        tell("making [bold].onnx")
    shown = capsys.readouterr().err
    assert "making [bold].onnx" in shown and "0:00:00" in shown
    assert shown.endswith("\x1b[2K")  # the line is cleared
