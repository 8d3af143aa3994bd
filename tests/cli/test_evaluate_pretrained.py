"""`capsroute eval --pretrained`: weights inside the package are measured like any other."""

import json

import pytest

SMALL = "inverted_small_multimnist"


@pytest.fixture(autouse=True)
def quick(few_test_images):
    few_test_images("capsroute.cli.evaluate")


@pytest.mark.parametrize(("name", "iterations"), [(("--pretrained", SMALL), 1), ((SMALL,), 4)])
def test_shipped_weights(run, tmp_path, name, iterations):
    status, out, err = run("eval", *name, "--iterations", iterations)
    assert (status, err) == (0, "") and f"{iterations} routing iteration" in out
    out_folder = tmp_path / "runs" / f"{SMALL}_r{iterations}"
    report = json.loads((out_folder / "evaluation.json").read_text())
    assert report["images"] == 60 and report["data"] == "diverse_multimnist"
    assert report["accuracy"] > 50  # of a constant answer, 2.3
    assert report["checkpoint"].endswith(f"{SMALL}_r{iterations}.safetensors")


def test_out(run, tmp_path):
    assert run("eval", "--pretrained", SMALL, "--out", "measured", "--json")[0] == 0
    assert (tmp_path / "measured" / "evaluation.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected either MODEL or `--pretrained NAME`"),
        (("runs/mine", "--pretrained", SMALL), "expected either"),
        (("--pretrained", "cnn_cifar10"), "they ship for inverted_resnet_cifar10, "),
        (("--pretrained", "inverted_smal"), f"did you mean '{SMALL}'?"),
        (("--pretrained", SMALL, "--iterations", "3"), "`--iterations` must be one of 1, 2, 4"),
        ((SMALL, "--iterations", "3"), "`--iterations` must be one of 1, 2, 4"),
        (("inverted_smal_multimnist",), f"did you mean '{SMALL}'?"),
    ],
)
def test_mistakes(run, arguments, message):
    status, _, err = run("eval", *arguments)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1 and message in err
