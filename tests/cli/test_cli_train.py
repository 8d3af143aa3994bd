"""`capsroute train` as a user meets it: help, presets, and each mistake in one line."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from capsroute import create_model
from capsroute.cli.parsing import parse
from capsroute.cli.progress import LineReporter
from capsroute.cli.train import FIRST_PRESETS
from capsroute.experiments import DEFAULT, list_presets, preset
from capsroute.models.factory import load_model
from capsroute.train.config import ModelConfig


@pytest.fixture
def train(run):
    return lambda *arguments: run("train", *arguments)


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for index in range(6):
            shade = 40 * index + (100 if label == "dog" else 0)
            Image.new("L", (28, 28), shade % 256).save(folder / label / f"{index}.png")
    return folder


def test_list_shows_every_preset(train):
    status, out, _ = train("--list")
    assert status == 0 and len(out.splitlines()) == 1 + len(list_presets())
    for name in list_presets():
        assert name in out and preset(name).summary in out


def test_help_begins_with_a_few_presets_and_groups_the_options(train):
    status, out, _ = train("--help")
    assert status == 0
    for name in FIRST_PRESETS:
        assert name in out and preset(name).summary in out
    assert f"`capsroute train --list` shows all {len(list_presets())}" in out
    assert out.index("--out PATH") < out.index("--experiment") < 2_000
    for switch in ("flip", "layer-norm", "activations"):
        assert f"--{switch}, --no-{switch}" in out
    for text in ("Examples:", "model options", "data options", "optim options", "(default: "):
        assert text in out
    assert "None" not in out


def test_every_preset_is_a_whole_config():
    assert list_presets()[0] == DEFAULT
    for name in list_presets():
        config = preset(name).config
        assert config.experiment == name and preset(name).summary
        json.loads(config.to_json())


def test_a_folder_of_images_trains(train, images, tmp_path):
    (images / "cat" / "broken.png").write_bytes(b"not an image")
    out_folder = tmp_path / "run"
    arguments = ("--data", images, "--out", out_folder, "--steps", 3, "--batch-size", 4)
    status, out, _ = train(*arguments)
    assert status == 0 and "broken.png" in out and "left out 1 file that could not be read" in out
    summary = json.loads((out_folder / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["dataset"] == str(images)
    status, out, err = train(*arguments, "--seed", 1)
    assert status == 2 and "another run: `--seed` is 0 there and 1 here" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inverted_resnet_cifar10_r3"], "did you mean 'inverted_resnet_cifar10_r2'?"),
        (["--lrr", "3"], "did you mean --lr?"),
        (["--learning-rate", "3"], "did you mean --lr?"),
        (["--learning_rate=3"], "did you mean --lr?"),
        (["--epoch", "3"], "did you mean --epochs?"),
        (["--bs", "3"], "did you mean --batch-size?"),
        (["--batch", "3"], "did you mean --batch-size?"),
        (["--wd", "3"], "did you mean --weight-decay?"),
        (["--gpu", "0"], "did you mean --device?"),
        (["hesitant_multimnist"], "no preset 'hesitant_multimnist'; choose from"),
        (["--lerning-rate", "3"], "did you mean --lr?"),
        (
            ["--optimizer", "sdg"],
            "`--optimizer` must be adam, muon or sgd, got 'sdg'; did you mean 'sgd'?",
        ),
        (
            ["--schedule", "concurent"],
            "`--schedule` must be concurrent or sequential, got 'concurent'; "
            "did you mean 'concurrent'?",
        ),
        (["--schedule", "zigzag"], "`--schedule` must be concurrent or sequential, got 'zigzag' ("),
        (["--steps", "0"], "`--steps` must be at least 1, got 0"),
        (["--epochs", "0"], "`--epochs` must be at least 1, got 0"),
        (["--sync-bn", "--bn-group", "16"], "`--bn-group` must not be given with `--sync-bn`"),
        (["--iterations", "0"], "`--iterations` must be between 1 and 100, got 0"),
        (["--model", "inverted_smal_multimnist"], "did you mean 'inverted_small_multimnist'?"),
        (["--data", "nowhere"], "nowhere"),
        (["--data", "data"], "no folder of images is called `data`"),
        (["--data", "cifar10", "--data-root", "nowhere"], "capsroute data download cifar10"),
        (["--bn-group", "16"], "has no option `--bn-group`"),
        (["--model", "cnn_multimnist", "--schedule", "sequential"], "has no option `--schedule`"),
        (["--loss", "cross_entropy"], "whose scores are logits of several classes per image, got"),
        (["--loss", "margin"], "`--loss` must be binary_cross_entropy for inverted_small_multimn"),
        (
            ["--optimizer", "sgd", "--nesterov", "--momentum", "0"],
            "`--momentum` must be above 0 with `--nesterov`, got 0",
        ),
        (["--epochs", "2", "--steps", "3"], "choose one"),
        (["--steps", "1e3"], "expected an integer, got '1e3'"),
        (["--seed", "1", "inverted_simple_cifar10_r4"], "a preset comes first"),
        (["--preset", "nope"], "capsroute train PRESET; no preset 'nope'; choose from"),
        (["--preset", "fast_cifar10"], "comes first, without `--preset`: capsroute train fast_cif"),
        (["--steps", "3", "--preset=fast_cifa10"], "PRESET; no preset 'fast_cifa10'; did you mean"),
        (["--preset", "--steps", "3"], "train PRESET; `capsroute train --list` shows all"),
        (["--iterations", "1000000"], "`--iterations` must be between 1 and 100, got 1000000"),
        (["--device", "meta"], "`--device` must be auto, cpu or cuda, got 'meta'"),
        (["--device", "tpu9"], "`--device` must be"),
        (["--device", "mps"], "`--device` must be auto, cpu or cuda, got 'mps': Macs run on the"),
        (["--lr", "nan"], "`--lr` must be finite and not negative, got nan"),
        (
            ["--seed", "99999999999999999999"],
            "`--seed` must be below 2**63, got 99999999999999999999",
        ),
        (["--layer-norm", "maybe"], "Unrecognized options: maybe"),
        (["--flip", "maybe"], "Unrecognized options: maybe"),
    ],
)
def test_mistakes(train, tmp_path, arguments, message):
    status, _, err = train(*arguments)
    assert status == 2 and message in err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()  # nothing half-written stays behind


def test_images_smaller_than_the_crop(train, images, tmp_path):
    status, _, err = train("--data", images, "--crop", 40, "--out", tmp_path / "run")
    assert status == 2 and "crop" in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_crops_that_only_padding_allows(train, images, tmp_path):
    """Training pads before it crops, evaluation does not: say so before training, not after."""
    arguments = ("--data", images, "--crop", 32, "--padding", 4, "--out", tmp_path / "run")
    status, _, err = train(*arguments)
    assert status == 2 and "crop" in err and not (tmp_path / "run").exists()


def test_a_finished_run_says_so(train, images, tmp_path):
    arguments = ("--data", images, "--epochs", 1, "--batch-size", 4)
    assert train(*arguments)[0] == 0
    summary = json.loads((tmp_path / "runs" / "images" / "summary.json").read_text())
    assert summary["epochs"] == 1
    status, out, _ = train(*arguments)
    said, *after = out.splitlines()
    assert status == 0 and said.startswith("already finished in runs/images: test ")
    assert f"{summary['test_accuracy_last']:.2f} % after 3 steps; nothing was trained" in said
    assert after == [
        "next:",
        "  capsroute predict runs/images IMAGE",
        "  capsroute explain runs/images IMAGE",
    ]
    status, _, err = train(*arguments, "--seed", 1)
    assert status == 2 and "another run: `--seed` is 0 there and 1 here" in err


def test_what_cannot_be_explained_is_not_proposed(train, images):
    arguments = ("--data", images, "--steps", 1, "--batch-size", 4, "--windows", "mixed")
    _, out, _ = train(*arguments)
    assert out.endswith("next:\n  capsroute predict runs/images IMAGE\n")


def test_a_finished_run_on_images_that_changed_says_so(train, images):
    arguments = ("--data", images, "--batch-size", 4, "--steps", 1)
    assert train(*arguments)[0] == 0
    Image.new("L", (28, 28)).save(images / "cat" / "one more.png")
    status, out, err = train(*arguments)
    assert status == 2 and out == ""
    assert err == (
        "error: `--data` must be as it was when the run in runs/images began, but it holds 13 "
        "images and held 12: restore it, or begin another run with --out\n"
    )
    assert train(*arguments, "--out", "another")[0] == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--image-size", 0], "`--image-size` must be at least 1, got 0"),
        (["--padding", -1], "`--padding` must be at least 0, got -1"),
        (["--validation", 2], "`--validation` must be in [0, 1), got 2.0"),
        (["--device", "foo"], "`--device` must be auto, cpu or cuda, got 'foo'"),
    ],
)
def test_a_wrong_value_is_told_rather_than_that_the_run_there_has_another(
    train, images, tmp_path, wrong, message
):
    arguments = ("--data", images, "--batch-size", 4, "--steps", 1)
    assert train(*arguments)[0] == 0
    status, _, err = train(*arguments, *wrong)
    assert status == 2 and message in err and "another run" not in err


def test_a_gpu_that_is_not_there_is_told_before_anything_else(train, images, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, err = train("--data", images, "--device", "cuda")
    assert status == 2 and out == "" and "`--device` must be available, got 'cuda'" in err


def test_a_signal_before_anything_was_saved_says_how_to_begin_again(train, images, monkeypatch):
    def cut(*arguments):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("capsroute.train.step.TrainStep.__call__", cut)
    status, _, err = train("--data", images, "--batch-size", 4, "--steps", 2)
    assert status == 128 + signal.SIGTERM and err == (
        "stopped by SIGTERM before the first step was done; there was nothing to save. "
        f"Begin again with capsroute train --data {images} --batch-size 4 --steps 2\n"
    )


@pytest.mark.parametrize(
    ("options", "share"),
    [((), 1.0), (("--pretrained", "inverted_small_multimnist"), 0.2)],
    ids=["from scratch", "from trained weights"],
)
def test_trained_weights_are_changed_in_small_steps(train, images, options, share):
    arguments = ("--data", images, "--steps", 1, *options)
    planned = preset("own_images").config.optim.lr
    for given, lr in (((), share * planned), (("--lr", 0.5), 0.5)):
        out = Path(f"lr{lr}")
        assert train(*arguments, *given, "--device", "cpu", "--out", out)[0] == 0
        assert json.loads((out / "config.json").read_text())["optim"]["lr"] == pytest.approx(lr)


def test_a_folder_in_place_of_a_preset_is_pointed_to(train, images):
    status, _, err = train(images)
    assert status == 2
    assert err == (
        f"error: no preset '{images}'; for the images in that folder: "
        f"capsroute train --data {images}\n"
    )


def test_a_folder_is_described_before_it_is_trained_on(train, images):
    status, out, _ = train("--data", images, "--steps", 2, "--out", "run", "--device", "cpu")
    first, second = out.splitlines()[:2]
    assert status == 0 and first == (
        "2 classes (cat, dog), 10 + 2 images (training + test), 28×28 grey: "
        f"{preset('own_images').config.model.model} on cpu, recipe own_images"
    )
    assert second == "2 steps (2 epochs)"


def test_many_classes_are_counted_and_what_is_set_aside_is_told(train, tmp_path):
    for label in range(11):
        folder = tmp_path / "colours" / f"kind {label}"
        folder.mkdir(parents=True)
        for index in range(5):
            Image.new("RGB", (30, 28), (20 * label, 9 * index, 3)).save(folder / f"{index}.png")
    small = ("--batch-size", 16, "--model", "inverted_small_multimnist", "--device", "cpu")
    arguments = ("--data", "colours", "--validation", 0.25, "--epochs", 1, *small)
    status, out, _ = train(*arguments)
    assert status == 0 and out.startswith(
        "11 classes, 33 + 11 + 11 images (training + validation + test), 28×30 colour: "
    )
    assert out.splitlines()[1] == "3 steps (1 epoch)"


def test_few_images_are_trained_on_for_a_limited_time(train, images, tmp_path, monkeypatch):
    monkeypatch.setattr("capsroute.experiments.presets.MOST_EPOCHS", 2)
    monkeypatch.setattr("capsroute.cli.own_images.MOST_EPOCHS", 2)
    arguments = ("--data", images, "--batch-size", 4)
    status, out, _ = train(*arguments)
    assert status == 0 and out.splitlines()[1] == (
        "6 steps (2 epochs): no more for few images, unless `--steps` or `--epochs` is given"
    )
    summary = json.loads((tmp_path / "runs" / "images" / "summary.json").read_text())
    assert (summary["steps"], summary["epochs"]) == (6, 2)
    assert "already finished in runs/images" in train(*arguments)[1]
    status, out, _ = train(*arguments, "--steps", 7, "--out", "longer")
    assert status == 0 and out.splitlines()[1].startswith("7 steps (")


def test_another_model_on_a_folder_has_a_run_of_its_own(train, images, tmp_path):
    other = ("--model", "inverted_simple_cifar10", "--image-size", 16)
    assert train("--data", images, "--steps", 1, *other)[0] == 0
    assert train("--data", images, "--steps", 1)[0] == 0
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert runs == ["images", "images_inverted_simple_cifar10"]


class StopAt(LineReporter):
    """Sends the signal that a job's end sends."""

    def __init__(self, last):
        self.at = last

    def step(self, done):
        if done == self.at:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("limits", [(2, 2), (10**6, 2)])  # limited; not limited when it began
def test_a_cut_run_goes_on_as_long_as_it_was_to_be(train, images, tmp_path, monkeypatch, limits):
    arguments = ("--data", images, "--batch-size", 4, "--eval-every", 2)
    configs = []
    for most_epochs, stop in zip(limits, (3, 5), strict=True):
        for module in ("experiments.presets", "cli.own_images"):
            monkeypatch.setattr(f"capsroute.{module}.MOST_EPOCHS", most_epochs)
        monkeypatch.setattr("capsroute.cli.train.make_reporter", lambda stop=stop: StopAt(stop))
        status, out, err = train(*arguments)
        assert status == 128 + signal.SIGTERM, err
        configs.append(json.loads((tmp_path / "runs" / "images" / "config.json").read_text()))
    assert "resuming after step 3" in out and configs[0] == configs[1]
    planned = preset("own_images").config
    assert configs[0]["data"]["padding"] == planned.data.padding
    assert configs[0]["model"]["model"] == planned.model.model


def test_a_folder_is_one_with_or_without_a_slash(train, images, tmp_path):
    out = tmp_path / "my run"
    arguments = ("--steps", 1, "--out", out)
    status, told, _ = train("--data", images, *arguments)
    assert status == 0 and f"capsroute predict '{out}' IMAGE" in told
    for spelling in (f"{images}/", "images", "../" + str(images.relative_to(tmp_path.parent))):
        status, told, _ = train("--data", spelling, *arguments)
        assert status == 0 and "already finished" in told
    images.rename(tmp_path / "mnist")
    status, _, err = train("--data", "mnist", *arguments)
    assert status == 2 and f"`--data` is '{images}' there and 'mnist' here" in err
    status, told, _ = train("--data", "./mnist", "--steps", 1, "--out", "folder")
    assert status == 0 and told.startswith("2 classes (cat, dog)")  # not the dataset of that name
    status, _, err = train("--data", "mnist", "--steps", 1, "--out", "folder")
    assert status == 2 and "`--data` is './mnist' there and 'mnist' here" in err


def test_names_are_printed_as_they_are(train, images):
    arguments = ("--data", images, "--steps", 1, "--batch-size", 4)
    status, out, _ = train(*arguments, "--out", "a[/b]", "--experiment", "pets [v2]")
    table = out[: out.index("next:")]
    assert status == 0 and "a[/b]" in table and "pets [v2]" in table


def test_a_cnn_is_not_recommended_to_be_explained(train, images):
    status, out, _ = train(
        "--data", images, "--steps", 1, "--model", "resnet18_cifar10", "--out", "cnn"
    )
    assert status == 0 and "capsroute predict cnn" in out and "capsroute explain" not in out


def test_shipped_weights_are_a_start_with_new_class_capsules(train, tmp_path):
    folder = tmp_path / "images"
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for index in range(6):
            Image.new("L", (36, 36), 40 * index).save(folder / label / f"{index}.png")
    start = ("--pretrained", "inverted_small_multimnist", "--steps", 1, "--lr", 0)
    status, out, _ = train("--data", folder, "--out", "run", *start)
    assert status == 0 and "starting from the weights that ship" in out
    assert "new: capsules.layers.1.weight" in out
    trained = load_model(tmp_path / "run" / "model.safetensors").state_dict()
    shipped = create_model("inverted_small_multimnist", pretrained=True).state_dict()
    same = [key for key in shipped if torch.equal(trained[key], shipped[key])]
    assert [key for key in shipped if key not in same] == ["capsules.layers.1.weight"]


def test_grey_weights_are_a_start_for_colour_images(train, tmp_path):
    for label in ("cat", "dog"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for index in range(6):
            shade = (40 * index, 9, 9)
            Image.new("RGB", (36, 36), shade).save(tmp_path / "images" / label / f"{index}.png")
    start = ("--pretrained", "inverted_small_multimnist", "--steps", 1, "--lr", 0)
    status, out, _ = train("--data", "images", *start)
    assert status == 0
    assert "inverted_small_multimnist: weights spread over 3 channels: backbone.0.weight" in out
    assert "new: capsules.layers.1.weight\n" in out
    trained = load_model(tmp_path / "runs" / "images_pretrained").state_dict()["backbone.0.weight"]
    shipped = create_model("inverted_small_multimnist", pretrained=True).state_dict()
    assert torch.equal(trained, (shipped["backbone.0.weight"] / 3).expand_as(trained))


def test_weights_that_do_not_ship_are_told(train, images):
    status, _, err = train("--data", images, "--pretrained", "cnn_cifar10")
    assert status == 2 and "no weights ship for 'cnn_cifar10'" in err
    for model in ((), ("--model", "cnn_cifar10", "--image-size", 32)):
        status, _, err = train("--data", images, "--pretrained", "timm", *model)
        assert status == 2 and "must come with `--backbone`" in err


def test_a_closed_pipe_does_not_end_the_run(images, tmp_path):
    out = tmp_path / "run"
    options = f"--data {images} --out {out} --steps 30 --eval-every 1 --batch-size 4"
    command = f"{sys.executable} -m capsroute train {options} | head -n 1"
    subprocess.run(command, shell=True, check=True, capture_output=True, timeout=120)
    deadline = time.monotonic() + 60
    while not (out / "summary.json").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert json.loads((out / "summary.json").read_text())["steps"] == 30


def test_crops_train_and_are_evaluated(train, run, images, tmp_path):
    arguments = ("--data", images, "--crop", 24, "--out", tmp_path / "run", "--steps", 2)
    assert train(*arguments, "--batch-size", 4)[0] == 0
    status, out, _ = run("eval", tmp_path / "run")
    assert status == 0 and "accuracy" in out
    assert load_model(tmp_path / "run" / "model.safetensors").resize == (28, 28)


def test_a_folder_that_cannot_be_written(train, images, tmp_path):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "run"
    status, _, err = train("--data", images, "--out", out, "--steps", 1, "--batch-size", 4)
    assert status == 2
    assert (
        err == f"error: `--out` must be a folder that can be written, got {out}: not a directory\n"
    )


def test_a_read_only_disk_is_told_with_the_path(train, images, tmp_path, monkeypatch):
    def read_only(path, data):
        raise OSError(f"could not write {path}") from OSError(30, "Read-only file system")

    monkeypatch.setattr("capsroute.train.checkpoint.write_whole", read_only)
    status, _, err = train("--data", images, "--out", "run", "--steps", 1)
    assert status == 2
    assert err == (
        "error: `--out` must be a folder that can be written, got run: read-only file system\n"
    )


def test_a_batch_of_more_images_than_there_are_is_told(train, images):
    status, out, _ = train("--data", images, "--steps", 1, "--batch-size", 1_000_000)
    told = [line for line in out.splitlines() if "`batch_size` (=1,000,000) is more than" in line]
    assert status == 0 and len(told) == 1 and "every step takes all of them" in told[0]


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (["--no-layer-norm"], False),
        (["--layer-norm"], True),
        (["--layer-norm", "False"], False),
        ([], None),
    ],
)
def test_a_switch_is_on_off_or_the_models_own(given, value):
    options = parse(ModelConfig, "train", [*given, "--iterations", "3"])
    assert options.layer_norm is value and options.iterations == 3


def test_a_misspelt_model_is_told_before_the_images_are_read(train, images):
    status, out, err = train("--data", images, "--model", "inverted_smal_multimnist")
    assert status == 2 and out == "" and err.count("\n") == 1
    assert "`--model` must be a registered model" in err and "'inverted_small_multimnist'" in err
