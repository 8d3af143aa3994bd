"""`capsroute eval` from end to end, on small untrained models."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import capsroute
from capsroute.cli.evaluate import angles_up_to, run_config, shifts_up_to
from capsroute.data import EvalBatches, load_dataset
from capsroute.models.factory import load_model
from capsroute.models.weights import read_metadata, save_model
from capsroute.train.checkpoint import RunFolder
from capsroute.train.config import Config, DataConfig
from capsroute.train.data_record import record_data
from capsroute.train.evaluation import evaluate
from capsroute.train.metrics import correct
from small_idx import write_digits

SIZE = 28
KINDS = "expected a run's folder, a checkpoint or a pretrained model"


def make_model(path, class_names=None, **options):
    torch.manual_seed(0)
    defaults = {"image_size": SIZE, "in_channels": 1, "num_classes": 10, "multilabel": False}
    model = capsroute.create_model("inverted_small_multimnist", **(defaults | options))
    model.class_names = class_names
    path.parent.mkdir(parents=True, exist_ok=True)
    save_model(model, path)
    return path


@pytest.fixture
def digits(tmp_path):
    return write_digits(tmp_path / "digits")


@pytest.fixture
def pets(tmp_path):
    for index in range(5):
        for name in ("cat", "dog"):
            (tmp_path / "pets" / name).mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(index).integers(0, 256, (30, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{index}.png")
    return tmp_path / "pets"


def make_run(folder, data, **options):
    make_model(folder / "model.safetensors", **options)
    config = Config(data=DataConfig(data=str(data), validation=0.25), seed=3)
    (folder / "config.json").write_text(config.to_json())
    return folder


def accuracy(checkpoint, split):
    model = load_model(checkpoint).eval()
    with torch.no_grad():
        right = [correct(model, model(x), y) for x, y in EvalBatches(split, 7)]
    return 100.0 * torch.cat(right).float().mean().item()


def test_a_checkpoint_on_a_folder_of_digits(run, tmp_path, digits):
    checkpoint = make_model(tmp_path / "mine.safetensors")
    status, out, err = run("eval", checkpoint, "--data", digits)
    assert (status, err) == (0, "")
    expected = accuracy(checkpoint, load_dataset(digits).test)
    assert f"accuracy: {expected:.2f} %" in out and "on 20 test images" in out
    assert "precision" in out and out.count("│") > 10 * 4
    for name in ("evaluation.json", "confusion.png"):  # beside the checkpoint
        assert str(tmp_path / name) in out and (tmp_path / name).is_file()
    assert not (tmp_path / "robustness.png").exists() and "labels" not in out
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert report["accuracy"] == pytest.approx(expected) and report["images"] == 20
    assert [row["name"] for row in report["classes"]] == list("0123456789")
    assert np.sum(report["confusion"]["rows_true_columns_predicted"]) == 20


@pytest.mark.parametrize("split", ["test", "validation", "train"])
def test_a_run_knows_its_data_and_what_it_set_aside(run, tmp_path, digits, split):
    folder = make_run(tmp_path / "runs" / "mine", digits)
    status, out, _ = run("eval", folder, "--split", split, "--json")
    report = json.loads(out)
    data = load_dataset(digits, validation=0.25, seed=3)
    expected = accuracy(folder / "model.safetensors", getattr(data, split))
    assert status == 0 and report["accuracy"] == pytest.approx(expected)
    assert report["images"] == {"test": 20, "validation": 10, "train": 30}[split]
    assert json.loads((folder / "evaluation.json").read_text()) == report
    assert run("eval", folder / "model.safetensors", "--json")[0] == 0


def test_a_folder_that_changed_since_training_is_told(run, tmp_path, pets):
    options = {"in_channels": 3, "num_classes": 2, "class_names": ["cat", "dog"]}
    folder = make_run(tmp_path / "runs" / "pets", pets, **options)
    dataset = load_dataset(pets, image_size=SIZE)
    record_data(RunFolder(folder), dataset)
    assert run("eval", folder)[::2] == (0, "")
    (pets / "cat" / "0.png").unlink()
    status, out, err = run("eval", folder)
    assert status == 0 and "accuracy" in out
    assert err == (
        "the run's data has changed: it holds 9 images and held 10; "
        "it may have been trained on some of the images that it is tested on\n"
    )
    other = run("eval", folder, "--data", pets.rename(tmp_path / "others"))
    assert other[::2] == (0, "")  # which is no claim to have held them out
    (folder / "data.json").unlink()
    (folder / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "others").rename(pets)
    assert "does not say which images it held out" in run("eval", folder)[2]


def test_rotation_shift_iterations_and_out(run, tmp_path, digits):
    folder = make_run(tmp_path / "run", digits)
    arguments = ("eval", folder, "--rotate", 12, "--shift", 2, "--iterations", 1, "--out", "new/o")
    status, out, err = run(*arguments, "--batch-size", 6)
    assert (status, err) == (0, "") and "1 routing iteration," in out
    assert "rotated by" in out and "shifted by" in out
    names = {path.name for path in (tmp_path / "new" / "o").iterdir()}
    assert names == {"evaluation.json", "confusion.png", "robustness.png"}
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json"}
    report = json.loads((tmp_path / "new" / "o" / "evaluation.json").read_text())
    assert run("eval", folder, "--out", "new/o")[0] == 0  # curves are not of these numbers
    names = {path.name for path in (tmp_path / "new" / "o").iterdir()}
    assert names == {"evaluation.json", "confusion.png"}
    points = [(point["kind"], point["value"]) for point in report["robustness"]]
    angles = [("rotation", 2 * step) for step in range(7)]
    assert points == [*angles, ("shift", 0), ("shift", 1), ("shift", 2)]
    assert report["robustness"][0]["accuracy"] == report["accuracy"]
    assert report["iterations"] == 1


def test_steps_of_rotation_and_shift():
    assert angles_up_to(30) == [5, 10, 15, 20, 25, 30]
    assert angles_up_to(20) == [4, 8, 12, 16, 20]
    assert angles_up_to(7)[-1] == 7 and len(angles_up_to(0.5)) == 5
    assert shifts_up_to(3) == [1, 2, 3]
    assert shifts_up_to(16) == [2, 4, 6, 8, 10, 12, 14, 16]


def test_several_labels_an_image(few_test_images, run, tmp_path):
    """The model's own dataset when none is named; a part of it, to be quick."""
    make_model(tmp_path / "m.safetensors", image_size=36, multilabel=True)
    few_test_images("capsroute.cli.evaluate")
    status, out, _ = run("eval", "m.safetensors")
    assert status == 0 and "every label of an image right: " in out and "labels" in out
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert report["data"] == "diverse_multimnist"
    assert [row["labels"] for row in report["counts"]] == [1, 2]
    assert sum(row["images"] for row in report["counts"]) == 60
    assert report["confusion"]["labels"][-1] == "none"


def test_a_folder_of_images_is_brought_to_the_models_size(run, tmp_path, pets):
    (pets / "dog" / "broken.png").write_bytes(b"no image")
    options = {"num_classes": 2, "in_channels": 3, "class_names": ["cat", "dog"]}
    checkpoint = make_model(tmp_path / "m.safetensors", **options)
    status, out, err = run("eval", checkpoint, "--data", pets)
    assert status == 0 and "cat" in out and "on 2 test images" in out
    assert "broken.png" in err and "left out 1 file that could not be read" in err
    status, _, err = run("eval", checkpoint, "--data", pets, "--strict")
    assert status == 2 and one_line(err)


@pytest.mark.parametrize("with_its_run", [False, True])
def test_a_model_of_crops_gets_them(monkeypatch, run, tmp_path, pets, with_its_run):
    """As the checkpoint says: brought to the size that it was trained on, and then cut."""
    checkpoint = make_model(tmp_path / "model.safetensors", in_channels=3, num_classes=2)
    model = load_model(checkpoint)
    model.resize = (32, 32)
    save_model(model, checkpoint)
    if with_its_run:
        config = Config(data=DataConfig(data="elsewhere", crop=SIZE))
        (tmp_path / "config.json").write_text(config.to_json())
    shown = []

    def watched(model, split, **settings):
        shown.extend(images for images, _ in EvalBatches(split, 99, crop=settings["crop"]))
        return evaluate(model, split, **settings)

    monkeypatch.setattr("capsroute.cli.evaluate.evaluate", watched)
    assert run("eval", checkpoint, "--data", pets)[0] == 0
    (expected,) = (x for x, _ in EvalBatches(load_dataset(pets, image_size=32).test, 99, crop=SIZE))
    assert torch.equal(shown[0], expected)


def one_line(err):
    return err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 7}, "knows 7 classes and the dataset digits has 10"),
        ({"in_channels": 3}, "takes images of 3 channels and the dataset digits has 1"),
        ({"image_size": 32}, "takes images of 32×32 pixels and the dataset digits has 28×28"),
        ({"multilabel": True}, "any number of classes per image and the dataset digits has one"),
    ],
)
def test_a_model_that_does_not_fit_the_data(run, tmp_path, digits, options, message):
    checkpoint = make_model(tmp_path / "m.safetensors", **options)
    status, out, err = run("eval", checkpoint, "--data", digits)
    assert (status, out) == (2, "") and one_line(err) and message in err


def test_classes_of_other_names(run, tmp_path, pets):
    options = {"num_classes": 2, "in_channels": 3, "class_names": ["ant", "dog"]}
    checkpoint = make_model(tmp_path / "m.safetensors", **options)
    status, _, err = run("eval", checkpoint, "--data", pets)
    assert status == 2 and one_line(err) and "calls class 0 'ant'" in err
    assert err.endswith("; choose data that fits with `--data`\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("runs/mien",), f"runs/mien: no such model; {KINDS}; did you mean 'runs/mine'?"),
        (("nowhere/x",), "nowhere/x: no such model"),
        (("digits",), "digits holds no model.safetensors"),
        (("digits/train-images-idx3-ubyte",), f"train-images-idx3-ubyte is not a model; {KINDS}"),
        (("taken.onnx",), f"taken.onnx is an exported file; {KINDS}"),
        (("taken.pt2",), f"taken.pt2 is an exported file; {KINDS}"),
        (("cut.safetensors",), "`MODEL` must be a whole safetensors file, got cut.safetensors"),
        (("runs/mine", "--data", "./gone"), "no such folder"),
        (("runs/mine", "--data", "cifr10"), "did you mean 'cifar10'?"),
        (("runs/mine", "--rotate", "0"), "`--rotate` must be above 0"),
        (("runs/mine", "--shift", "28"), "`--shift` must be between 1 and 27"),
        (("runs/mine", "--batch-size", "0"), "`--batch-size` must be at least 1"),
        (("runs/mine", "--iterations", "0"), "`--iterations`"),
        (("runs/mine", "--device", "gpu"), "`--device` must be auto, cpu or cuda"),
        (("runs/mine", "--out", "runs/mine/config.json"), "must be a folder"),
        (("runs/mine", "--rotat", "3"), "Unrecognized options: --rotat"),
        (("runs/mine", "--data", "digits/../digits", "--split", "validation"), "set aside"),
        ((), "expected either MODEL or `--pretrained NAME`"),
    ],
)
def test_mistakes(run, tmp_path, digits, arguments, message):
    make_run(tmp_path / "runs" / "mine", digits)
    for name in ("taken.onnx", "taken.pt2", "cut.safetensors"):
        (tmp_path / name).write_bytes(b"no weights")
    status, out, err = run("eval", *arguments)
    assert (status, out) == (2, "") and one_line(err) and message in err


def test_a_folder_saved_for_the_hub_is_no_run(run, tmp_path, digits):
    checkpoint = make_model(tmp_path / "hub" / "model.safetensors")
    text = json.dumps({"capsroute": read_metadata(checkpoint)})  # as `HubModel` writes it
    (tmp_path / "hub" / "config.json").write_text(text)
    assert run_config(checkpoint) is None
    status, out, err = run("eval", "hub", "--data", digits)
    assert (status, err) == (0, "") and "on 20 test images" in out


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model": {}, "optim": {}, "data": {"x": 1}}'])
def test_a_damaged_config(run, tmp_path, digits, text):
    folder = make_run(tmp_path / "mine", digits)
    (folder / "config.json").write_text(text)
    status, out, err = run("eval", folder)
    assert (status, out) == (2, "") and one_line(err) and "config.json" in err


def test_a_runs_data_that_has_moved(run, tmp_path, digits):
    folder = make_run(tmp_path / "mine", digits)
    digits.rename(tmp_path / "elsewhere")
    status, _, err = run("eval", folder)
    assert status == 2 and one_line(err) and "`--data` names another" in err
    assert run("eval", folder, "--data", "elsewhere")[0] == 0


def test_numbers_are_printed_even_if_the_folder_takes_no_files(monkeypatch, run, digits):
    make_run(digits.parent / "mine", digits)

    def full(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("capsroute.cli.evaluate.write_json", full)
    status, out, err = run("eval", "mine")
    assert status == 2 and one_line(err) and "No space left" in err
    assert "accuracy: " in out
