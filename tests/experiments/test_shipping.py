"""A finished run becomes a file of the package, with a card that says what it is."""

import json

import pytest

from capsroute.experiments.reproduce import Job, reproduce
from capsroute.experiments.shipping import ship
from capsroute.models.weights import load_model, save_model
from capsroute.train.build import Runtime
from capsroute.train.reporting import Reporter
from small_experiments import register_tiny


@pytest.fixture
def run(monkeypatch, tmp_path):
    register_tiny(monkeypatch, tmp_path / "data")
    job = Job.of("tiny", 5, tmp_path / "runs", tmp_path / "results")
    reproduce(job, Runtime(device="cpu"), Reporter())
    return job.run


def test_a_card_says_where_the_weights_came_from(run, tmp_path):
    path = ship(run, tmp_path / "files")
    assert path.name == "inverted_small_multimnist_r1.safetensors"
    assert load_model(path).class_names[0] == "T-shirt/top"
    card = path.with_suffix(".md").read_text()
    assert card.startswith("# inverted_small_multimnist, 1 routing iteration\n")
    for part in (
        "fashion_mnist, 28×28 images; classes T-shirt/top, Trouser",
        "`capsroute reproduce tiny --seeds 5` |",
        "% of 20 test images (the class right)",
        "`results/tiny/seed5`",
        "`capsroute eval --pretrained inverted_small_multimnist --iterations 1`",
    ):
        assert part in card
    assert "None" not in card


def test_a_card_says_how_a_run_departs_from_its_preset(run, monkeypatch, tmp_path):
    register_tiny(monkeypatch, tmp_path / "again", steps=99)
    card = ship(run, tmp_path / "files").with_suffix(".md").read_text()
    assert "--seeds 5`, but `steps` is 12 there and 99 here" in card


def test_a_run_must_be_finished(tmp_path):
    with pytest.raises(ValueError, match="must be the folder of a finished run"):
        ship(tmp_path)


def edit_summary(run, **changes):
    path = run / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_weights_that_are_not_the_run_s_replace_nothing(run, tmp_path):
    shipped = ship(run, tmp_path / "files")
    before = {path: path.read_bytes() for path in shipped.parent.iterdir()}
    last = json.loads((run / "summary.json").read_text())["test_accuracy_last"]
    edit_summary(run, test_accuracy_last=last + 10)
    model = load_model(run / "model.safetensors")
    for parameter in model.parameters():
        parameter.data.mul_(2)
    save_model(model, run / "model.safetensors")
    with pytest.raises(ValueError, match="must hold the weights of its last epoch") as caught:
        ship(run, tmp_path / "files")
    assert f"its summary says {last + 10:.2f} %" in str(caught.value)
    assert {path: path.read_bytes() for path in shipped.parent.iterdir()} == before


@pytest.mark.parametrize(
    ("dirty", "said"), [(True, "` with changes, "), (False, "`, "), (None, "` (as told: ")]
)
def test_a_card_says_how_sure_its_commit_is(run, tmp_path, dirty, said):
    edit_summary(run, commit="0" * 40, dirty=dirty)
    assert f"{'0' * 40}{said}" in ship(run, tmp_path / "files").with_suffix(".md").read_text()


def test_another_run_takes_the_place_of_the_first(run, tmp_path):
    first = ship(run, tmp_path / "files")
    heard = []
    edit_summary(run, seed=6)
    assert ship(run, tmp_path / "files", progress=lambda *done: heard.append(done)) == first
    assert "`results/tiny/seed6`" in first.with_suffix(".md").read_text()
    assert len(list(first.parent.iterdir())) == 2 and heard == [(1, 1)]
