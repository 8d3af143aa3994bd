"""A finished run becomes a file of the package, with a card that says what it is."""

import pytest

from capsroute.experiments.reproduce import Job, reproduce
from capsroute.experiments.shipping import ship
from capsroute.models.weights import load_model
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
