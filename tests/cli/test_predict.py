"""`capsroute predict` from end to end, on a small untrained model."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import capsroute
from capsroute.export import export_model
from capsroute.inference import Predictor
from capsroute.models.weights import save_model
from shipped_samples import read_sample, sample_pictures

SIZE = 20


@pytest.fixture
def model(tmp_path):
    """A run's folder."""
    torch.manual_seed(0)
    made = capsroute.create_model(
        "inverted_small_multimnist",
        image_size=SIZE,
        num_classes=3,
        multilabel=False,
        iterations=1,
    )
    made.class_names = ["ant", "bee", "cat [tabby]"]
    (tmp_path / "run").mkdir()
    save_model(made, tmp_path / "run" / "model.safetensors")
    return tmp_path / "run"


@pytest.fixture
def photos(tmp_path):
    """Four images of different kinds in a folder and one below it."""
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name, shape in (
        ("a.png", (30, 40, 3)),
        ("b.JPG", (50, 50)),
        ("c.bmp", (9, 70, 3)),
        ("deep/d.gif", (20, 20)),
    ):
        Image.fromarray(generator.integers(0, 256, shape, dtype=np.uint8)).save(folder / name)
    (folder / "notes.txt").write_text("not an image")
    return folder


def expected(model, path):
    with Image.open(path) as image:
        return Predictor.load(model).predict([image], top_k=3)[0]


def records(out):
    return [json.loads(line) for line in out.splitlines()]


def test_a_folder_is_taken_with_all_below_it(run, model, photos):
    status, out, err = run("predict", model, photos, "--json", "--batch-size", 3)
    assert (status, err) == (0, "")
    found = records(out)
    names = ["a.png", "b.JPG", "c.bmp", "deep/d.gif"]
    assert [record["file"] for record in found] == [str(photos / name) for name in names]
    for record in found:
        answer = expected(model, record["file"])
        assert record["labels"] == answer.labels and record["remark"] is None
        for one, (name, p) in zip(record["ranked"], answer.ranked, strict=True):
            assert one == {"label": name, "probability": pytest.approx(p, abs=1e-5)}


def test_files_and_patterns_keep_their_order(run, model, photos):
    status, out, _ = run("predict", model, photos / "c.bmp", f"{photos}/**/*.gif", "--json")
    assert status == 0
    assert [r["file"] for r in records(out)] == [
        str(photos / "c.bmp"),
        str(photos / "deep" / "d.gif"),
    ]
    status, _, err = run("predict", model, f"{photos}/*.webp")
    assert status == 2 and "no file matches this pattern" in err


@pytest.mark.parametrize(
    "order",
    [
        "{a} --strict {b}",
        "--strict {a} --top-k 2 {b}",
        "{a} --top-k=2 {b} --strict",
        "--strict -- {a} {b}",
        "{a} --batch_size 1 -- {b}",
    ],
)
def test_images_may_stand_anywhere(run, model, photos, monkeypatch, order):
    monkeypatch.chdir(photos)
    words = order.format(a="a.png", b="c.bmp").split()
    for arguments in (["--json", model, *words], [model, "--json", *words]):
        status, out, err = run("predict", *arguments)
        assert (status, err) == (0, "")
        assert [record["file"] for record in records(out)] == ["a.png", "c.bmp"]


def test_a_wrong_option_among_images_is_told(run, model, photos):
    status, _, err = run("predict", model, photos / "a.png", "--strct", photos / "c.bmp")
    assert status == 2 and "Unrecognized options: --strct" in err and "--strict" in err


def test_the_table_shows_names_as_they_are(run, model, photos):
    status, out, _ = run("predict", model, photos / "a.png", "--top-k", 3)
    answer = expected(model, photos / "a.png")
    assert status == 0 and "a.png" in out and "cat [tabby]" in out
    for name, p in answer.ranked:
        assert f"{name} {100 * p:.1f} %" in out


def sure(predictor):
    """Answers with one class that is nearly certain, one that is possible, one that is not."""
    predictor.probabilities = lambda images: torch.tensor([[0.996, 0.0039, 0.0001]] * len(images))
    return predictor


@pytest.mark.parametrize(("flags", "shown"), [((), 2), (("--top-k", 3), 3), (("--top-k", 1), 1)])
def test_the_table_leaves_out_what_is_as_good_as_nothing(
    run, model, photos, monkeypatch, flags, shown
):
    monkeypatch.setattr(
        "capsroute.cli.predict.load_predictor", lambda *_, **__: sure(Predictor.load(model))
    )
    status, out, _ = run("predict", model, photos / "a.png", *flags)
    assert status == 0 and "ant 99.6 %" in out
    assert ("bee 0.4 %" in out, "cat [tabby] 0.0 %" in out) == (shown > 1, shown > 2)
    _, out, _ = run("predict", model, photos / "a.png", "--json", *flags)
    assert len(records(out)[0]["ranked"]) == (shown if flags else 3)


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_no_number_of_the_table_is_broken(run, model, photos, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(photos)
    status, out, _ = run("predict", model, "a.png", "c.bmp", "--top-k", 3)
    cells = [line.split("│")[-2].strip() for line in out.splitlines() if "│" in line]
    assert status == 0 and sum(cell.count("%") for cell in cells) == 6
    assert not any(cell.startswith("%") or cell.split()[-1][0].isdigit() for cell in cells)


def test_csv(run, model, photos):
    status, out, _ = run("predict", model, photos, "--csv", "--top-k", 2)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert status == 0 and len(rows) == 4
    for row in rows:
        answer = expected(model, row["file"])
        assert row["labels"] == answer.labels[0] == row["class_1"]
        assert float(row["probability_2"]) == pytest.approx(answer.ranked[1][1], abs=1e-5)


def test_csv_has_no_more_columns_than_classes(run, model, photos):
    status, out, _ = run("predict", model, photos, "--csv", "--top-k", 12)
    assert status == 0 and {len(row) for row in csv.reader(io.StringIO(out))} == {2 + 2 * 3}


def test_pictures_that_are_too_large_are_told_in_a_line(run, model, photos, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # a warning beyond it, an error at twice
    status, out, err = run("predict", model, photos, "--json")
    assert status == 1 and len(records(out)) == 3  # two of them a warning of Pillow's
    expected = "b.JPG: too many pixels; at most 2,000 are read\n1 image of 4 could not be read\n"
    assert err == f"{photos}/{expected}"


def mortal():
    """What makes a command heed permissions, which root does not."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root may read everything, and setpriv is missing")
    return ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-all"]


def test_what_may_not_be_read_is_named_and_the_others_go_on(model, photos):
    (photos / "a.png").chmod(0)
    (photos / "deep").chmod(0)
    command = [*mortal(), sys.executable, "-m", "capsroute", "predict", "--json"]
    arguments = [model, photos, photos / "deep" / "d.gif"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    (photos / "deep").chmod(0o755)
    assert done.returncode == 1 and len(records(done.stdout)) == 2
    for name in ("a.png", "deep", "deep/d.gif"):
        assert f"{photos / name}: no permission to read it\n" in done.stderr


def test_broken_files_are_named_and_the_others_go_on(run, model, photos):
    whole = (photos / "b.JPG").read_bytes()
    (photos / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (photos / "empty.png").write_bytes(b"")
    status, out, err = run("predict", model, photos, photos / "gone.png", "--json")
    assert status == 1 and len(records(out)) == 4
    assert "gone.png: no such file" in err and "empty.png: not an image of a kind" in err
    assert "cut.jpg: image file is truncated" in err
    assert "3 images of 7 could not be read" in err
    status, out, err = run("predict", model, photos, "--strict")
    assert status == 2 and err.startswith("error: ") and "--strict" in err


def test_where_no_image_can_be_read_the_command_fails(run, model):
    assert run("predict", model, "gone.png") == (2, "", "error: gone.png: no such file\n")
    status, out, err = run("predict", model, "gone.png", "lost.png")
    assert (status, out) == (2, "")
    assert err.splitlines() == [
        "gone.png: no such file",
        "lost.png: no such file",
        "error: none of the 2 images could be read",
    ]


class Stdin(io.TextIOWrapper):
    def __init__(self, data):
        super().__init__(io.BytesIO(data))


def test_an_image_on_stdin(run, model, photos, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Stdin((photos / "a.png").read_bytes()))
    status, out, _ = run("predict", model, "-", "--json")
    (record,) = records(out)
    assert status == 0 and record["file"] == "stdin"
    assert record["labels"] == expected(model, photos / "a.png").labels
    monkeypatch.setattr(sys, "stdin", Stdin(b"garbage"))
    status, _, err = run("predict", model, "-")
    assert status == 2 and err.startswith("error: stdin: not an image")


def test_a_list_of_paths(run, model, photos, monkeypatch, tmp_path):
    listed = f"{photos}/a.png\n\n{photos}/c.bmp\n"
    monkeypatch.setattr(sys, "stdin", Stdin(listed.encode()))
    status, out, _ = run("predict", model, "--from-list", "-", "--json")
    assert status == 0 and len(records(out)) == 2
    (tmp_path / "list.txt").write_text(listed)
    status, again, _ = run("predict", model, "--from-list", tmp_path / "list.txt", "--json")
    assert (status, again) == (0, out)


@pytest.mark.slow
def test_an_exported_file_answers_alike(run, model, photos, tmp_path):
    made = Predictor.load(model).model
    export_model(made, "torch-export", tmp_path / "model.pt2")
    status, out, _ = run("predict", tmp_path / "model.pt2", photos, "--json")
    assert status == 0
    for record in records(out):
        assert record["labels"] == expected(model, record["file"]).labels


@pytest.fixture
def digits(tmp_path):
    made = capsroute.create_model("inverted_small_multimnist")
    made.class_names = [str(digit) for digit in range(10)]
    save_model(made, tmp_path / "digits.safetensors")
    return tmp_path / "digits.safetensors"


@pytest.mark.parametrize(
    ("count", "last"), [(1, None), (3, None), (4, "1 more image: "), (9, "6 more images: ")]
)
def test_a_white_ground_is_remarked_on_three_times_at_most(run, digits, tmp_path, count, last):
    folder = tmp_path / "papers"
    folder.mkdir()
    Image.new("L", (36, 36), 5).save(folder / "slate.png")
    for number in range(count):
        Image.new("L", (36, 36), 250).save(folder / f"paper{number}.png")
    status, out, err = run("predict", digits, folder, "--json", "--batch-size", 2)
    remarks = {record["file"]: record["remark"] for record in records(out)}
    assert status == 0 and remarks.pop(str(folder / "slate.png")) is None
    (remark,) = set(remarks.values())
    assert len(remarks) == count and remark.startswith("a light background; ")
    told = [f"{folder}/paper{number}.png: {remark}" for number in range(min(count, 3))]
    assert err.splitlines() == told + ([] if last is None else [f"{last}{remark}"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "`IMAGES` must name a file"),
        (["x.png", "--top-k", "0"], "`--top-k` must be at least 1"),
        (["x.png", "--json", "--csv"], "`--json` must not be given with `--csv`"),
        (["empty"], "holds no image"),
        (["--from-list", "binary"], "got binary: it is not text"),
        (["--from-list", "gone"], "got gone: No such file"),
        (
            ["x.png", "--iterations", "x"],
            "Error parsing --iterations: expected an integer, got 'x'",
        ),
        (["x.png", "--device", "tpu"], "`--device` must be auto, cpu or cuda, got 'tpu'"),
    ],
)
def test_mistakes_are_one_line(run, model, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    status, out, err = run("predict", model, *arguments)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("error: ") and message in err


def test_what_is_no_model_is_called_by_what_was_typed(run, photos):
    for file in (photos / "a.png", photos / "notes.txt"):
        status, _, err = run("predict", file, photos / "a.png")
        kinds = "a run's folder, a checkpoint, an exported file or a pretrained model"
        assert (status, err) == (2, f"error: {file} is not a model; expected {kinds}\n")
    (photos / "cut.safetensors").write_bytes(b"")
    status, _, err = run("predict", photos / "cut.safetensors", photos / "a.png")
    assert status == 2 and err.startswith("error: `MODEL` must be a whole safetensors file, got ")
    status, _, err = run("predict", "cnn_cifar10", photos / "a.png")
    assert status == 2 and "no weights ship for 'cnn_cifar10'; they ship for " in err


@pytest.mark.parametrize("name", ["model.onnx", "model.pt2"])
@pytest.mark.parametrize("device", ["cuda", "foo"])
def test_an_exported_file_takes_no_other_device(run, photos, tmp_path, name, device):
    (tmp_path / name).write_bytes(b"not read")
    status, out, err = run("predict", name, photos / "a.png", "--device", device)
    told = f"`--device` must be auto or cpu for {name}, got '{device}': an exported file runs on"
    assert (status, out) == (2, "") and err == f"error: {told} the CPU\n"


def test_the_shipped_model_reads_the_shipped_samples(run):
    from importlib.resources import files

    samples = files("capsroute") / "data" / "samples"
    status, out, err = run("predict", "inverted_small_multimnist", samples, "--json")
    assert (status, err) == (0, "")
    answers = {record["file"].rsplit("/")[-1]: set(record["labels"]) for record in records(out)}
    assert answers == {
        "digit_5.png": {"5"},
        "digits_0_7.png": {"0", "7"},
        "digits_2_4.png": {"2", "4"},
    }


def test_photographs_are_named(run, tmp_path):
    sample = read_sample("inverted_resnet_cifar10_r2")
    pairs = list(zip(sample_pictures(sample), sample["images"], strict=True))[::20]
    for picture, image in pairs:
        picture.save(tmp_path / f"{image['row']:03}.png")
    pictures = sorted(tmp_path.glob("*.png"))
    status, out, err = run("predict", "inverted_resnet_cifar10", *pictures, "--json")
    assert (status, err) == (0, "")
    expected = {f"{image['row']:03}.png": image["answer"] for _, image in pairs}
    assert {r["file"].rsplit("/")[-1]: r["labels"] for r in records(out)} == expected
    assert ["airplane"] in expected.values() and ["truck"] in expected.values()
