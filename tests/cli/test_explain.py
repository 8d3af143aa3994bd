"""`capsroute explain` from end to end, on small untrained models."""

import json

import pytest
import torch
from PIL import Image

import capsroute
from capsroute.data import DiverseMultiMNIST, load_mnist
from capsroute.explain.heat import ROUTING_MAPS
from capsroute.files import write_whole
from capsroute.models.weights import read_metadata, save_model


def save(path, name, **options):
    torch.manual_seed(0)
    model = capsroute.create_model(name, **options)
    save_model(model, path)
    return path


@pytest.fixture
def digits(tmp_path):
    return save(tmp_path / "digits.safetensors", "inverted_small_multimnist")


def sample(name):
    from importlib.resources import files

    return files("capsroute") / "data" / "samples" / name


def test_an_image_is_explained(run, digits, tmp_path):
    status, out, err = run("explain", digits, sample("digits_0_7.png"), "--out", tmp_path / "new")
    assert (status, err) == (0, "")
    png, page = (tmp_path / "new" / f"digits_0_7.explained.{kind}" for kind in ("png", "html"))
    assert f"wrote {png}, {page}" in out and "predicted: " in out
    with Image.open(png) as picture:
        assert picture.format == "PNG"
    assert page.read_text().startswith("<!doctype html>")
    assert "capsule layer 1" in out and "shared evenly" in out
    assert "heat map: contrast\n" in out


def test_classes_and_json(run, digits, tmp_path):
    image = sample("digit_5.png")
    status, out, _ = run(
        "explain", digits, image, "--classes", "3", "5", "--json", "--map", "fields"
    )
    found = json.loads(out)
    assert status == 0 and [entry["name"] for entry in found["classes"]] == ["3", "5"]
    assert found["map"] == "fields" and found["remark"] is None
    page = (tmp_path / "digit_5.explained.html").read_text()
    assert found["notes"] and all(f">{note}<" in page for note in found["notes"])


def test_json_has_the_remark_on_a_light_ground(run, tmp_path):
    Image.new("L", (36, 36), 250).save(tmp_path / "paper.png")
    status, out, err = run("explain", "inverted_small_multimnist", "paper.png", "--json")
    remark = json.loads(out)["remark"]
    assert status == 0 and remark.startswith("a light background; ")
    assert err == f"paper.png: {remark}\n"


@pytest.mark.parametrize("before", [False, True], ids=["new", "there before"])
def test_a_full_disk_leaves_both_files_as_they_were(run, digits, tmp_path, monkeypatch, before):
    def full_for_pages(path, data):
        if path.suffix == ".html":
            raise OSError(f"could not write {path}") from OSError(28, "No space left on device")
        write_whole(path, data)

    names = [f"digit_5.explained.{kind}" for kind in ("png", "html")]
    folder = tmp_path / "out"
    folder.mkdir()
    for name in names if before else []:
        (folder / name).write_text("of before")
    monkeypatch.setattr("capsroute.cli.explain.write_whole", full_for_pages)
    status, out, err = run("explain", digits, sample("digit_5.png"), "--out", "out")
    assert (status, out) == (2, "")
    assert (
        err == f"error: could not write out/{names[0]}, out/{names[1]}: No space left on device\n"
    )
    left = {path.name: path.read_text() for path in folder.iterdir()}
    assert left == (dict.fromkeys(names, "of before") if before else {})


def test_a_folder_in_the_place_of_the_page_is_told_before_the_work(run, digits, tmp_path):
    (tmp_path / "digit_5.explained.html").mkdir()
    status, out, err = run("explain", digits, sample("digit_5.png"))
    assert (status, out) == (2, "") and err.count("\n") == 1 and "it is a folder" in err
    assert not (tmp_path / "digit_5.explained.png").exists()


def test_separation(run, digits, tmp_path):
    out_file = tmp_path / "separation.json"
    status, out, _ = run("explain", digits, "--separation", 5, "--out", out_file)
    result = json.loads(out_file.read_text())
    assert status == 0 and "chance 0.5" in out
    assert (result["images"], result["split"], result["chance"]) == (5, "test", 0.5)
    assert result["weights_sha256"] == read_metadata(digits)["sha256"]
    assert result["command"].startswith("capsroute explain ") and "commit" in result
    assert f"{result['maps']['contrast']['share']:.4f}" in out


@pytest.mark.parametrize("columns", [80, 40])
def test_no_name_of_a_map_is_cut(run, digits, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    status, out, _ = run("explain", digits, "--separation", 2)
    cells = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")]
    assert status == 0 and "…" not in out
    if columns == 80:
        assert {*ROUTING_MAPS, "gradient_times_input_positive"} <= set(cells)
    assert "gradient_times_input_positive" in "".join(cells)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "`IMAGE` must be given"),
        (["gone.png"], "gone.png: no such file"),
        (["."], ".: a folder, not an image"),
        (["broken.png"], "broken.png: not an image of a kind that is read here (PNG, "),
        (["broken.png", "--map", "field"], "did you mean 'fields'?"),
        (["broken.png", "--separation", "3"], "must not be given with an IMAGE"),
        (["--separation", "0"], "`--separation` must be at least 1"),
    ],
)
def test_mistakes_are_one_line(run, digits, tmp_path, arguments, message):
    (tmp_path / "broken.png").write_bytes(b"no")
    status, _, err = run("explain", digits, *arguments)
    assert status == 2 and err.count("\n") == 1
    assert err.startswith("error: ") and message in err


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("broken.png/x.json", "`--out` must be a folder, got broken.png: it is a file"),
        (".", "`--out` must be a file"),
    ],
)
def test_where_the_separation_goes_is_checked_first(
    run, digits, tmp_path, monkeypatch, out, message
):
    (tmp_path / "broken.png").write_text("")
    monkeypatch.setattr("capsroute.cli.explain.two_digit_images", None)  # no work is begun
    status, _, err = run("explain", digits, "--separation", "5", "--out", out)
    assert status == 2 and message in err and err.count("\n") == 1


def test_a_map_that_em_does_not_have_is_called_as_it_was_typed(run, tmp_path):
    model = save(tmp_path / "em.safetensors", "em_simple_cifar10", image_size=16, in_channels=1)
    status, out, err = run("explain", model, sample("digit_5.png"), "--map", "votes")
    assert (status, out) == (2, "") and err.startswith("error: `--map` must be one of fields, ")
    assert err.endswith(", got 'votes'\n") and not list(tmp_path.glob("*.explained.*"))


def test_an_unknown_class_gets_the_nearest(run, tmp_path):
    torch.manual_seed(0)
    model = capsroute.create_model("inverted_small_multimnist", num_classes=2)
    model.class_names = ["hamster", "parrot"]
    save_model(model, tmp_path / "pets.safetensors")
    image = sample("digit_5.png")
    status, _, err = run("explain", tmp_path / "pets.safetensors", image, "--classes", "parot")
    assert status == 2 and "did you mean 'parrot'?" in err
    status, _, err = run("explain", tmp_path / "pets.safetensors", "--separation", "3")
    assert status == 2 and "needs a model of overlapping digits" in err


def test_a_cnn_has_nothing_to_explain(run, tmp_path):
    cnn = save(tmp_path / "cnn.safetensors", "cnn_cifar10", image_size=16)
    status, _, err = run("explain", cnn, sample("digit_5.png"))
    assert status == 2 and err.count("\n") == 1 and "it has no capsules" in err


def test_the_samples_are_what_their_readme_says():
    arrays = load_mnist()
    source = DiverseMultiMNIST.from_digits(arrays.test_images, arrays.test_labels)
    images, targets, _ = source.fixed_set()
    for row, name, classes in (
        (25, "digits_0_7", [0, 7]),
        (89, "digits_2_4", [2, 4]),
        (77, "digit_5", [5]),
    ):
        assert targets[row].nonzero()[:, 0].tolist() == classes
        with Image.open(str(sample(f"{name}.png"))) as image:
            assert image.tobytes() == images[row, 0].numpy().tobytes()
