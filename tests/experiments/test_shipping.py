"""A finished run becomes a file of the package, with a card that says what it is."""

import json
import re
import shutil

import pytest

from capsroute.experiments.cards import RUN_AGAIN, check_cards, study_name
from capsroute.experiments.evidence import copy_evidence
from capsroute.experiments.reproduce import Job, reproduce
from capsroute.experiments.shipping import ship
from capsroute.models.factory import load_model
from capsroute.models.weights import save_model
from capsroute.train.build import Runtime
from capsroute.train.reporting import Reporter
from small_experiments import register_tiny


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reproduced")
    with pytest.MonkeyPatch.context() as patch:
        register_tiny(patch, folder / "data")
        job = Job.of("tiny", 5, folder / "runs", folder / "results")
        reproduce(job, Runtime(device="cpu"), Reporter())
    return folder


@pytest.fixture
def run(reproduced, monkeypatch, tmp_path):
    """A copy of the run, its evidence beside it."""
    shutil.copytree(reproduced, tmp_path, dirs_exist_ok=True)
    register_tiny(monkeypatch, tmp_path / "data")
    return tmp_path / "runs" / "tiny_seed5"


def test_a_card_says_where_the_weights_came_from(run, tmp_path):
    path = ship(run, tmp_path / "results", tmp_path / "files")
    assert path.name == "inverted_small_multimnist_r1.safetensors"
    assert load_model(path).class_names[0] == "T-shirt/top"
    card = path.with_suffix(".md").read_text()
    assert card.startswith("# inverted_small_multimnist, 1 routing iteration\n")
    for part in (
        "fashion_mnist, 28×28 images; classes T-shirt/top, Trouser",
        "`capsroute reproduce tiny --seeds 5` |",
        "% of 20 test images classified correctly",
        "`results/tiny/seed5`",
        "`capsroute eval --pretrained inverted_small_multimnist --iterations 1`",
    ):
        assert part in card
    assert "None" not in card


def test_a_card_says_how_a_run_departs_from_its_preset(run, monkeypatch, tmp_path):
    register_tiny(monkeypatch, tmp_path / "again", steps=99)
    card = ship(run, tmp_path / "results", tmp_path / "files").with_suffix(".md").read_text()
    assert "--seeds 5`, but `steps` is 12 there and 99 here" in card


def test_a_run_must_be_finished(tmp_path):
    with pytest.raises(ValueError, match="must be the folder of a finished run"):
        ship(tmp_path, tmp_path)


def edit_summary(run, *, kept=True, **changes):
    """Of a run and, if `kept`, of its evidence."""
    summary = json.loads((run / "summary.json").read_text()) | changes
    (run / "summary.json").write_text(json.dumps(summary))
    if kept:
        evidence = run.parents[1] / "results" / summary["experiment"] / f"seed{summary['seed']}"
        copy_evidence(run, evidence)


def test_evidence_of_another_run_is_not_named(run, tmp_path):
    edit_summary(run, kept=False, commit="0" * 40)
    with pytest.raises(ValueError, match=r"whose evidence is in .*tiny/seed5, got .* differs"):
        ship(run, tmp_path / "results", tmp_path / "files")
    with pytest.raises(ValueError, match=r"must have its evidence in .*elsewhere/tiny/seed5"):
        ship(run, tmp_path / "elsewhere", tmp_path / "files")
    assert not (tmp_path / "files").exists()


def test_weights_that_are_not_the_run_s_replace_nothing(run, tmp_path):
    shipped = ship(run, tmp_path / "results", tmp_path / "files")
    before = {path: path.read_bytes() for path in shipped.parent.iterdir()}
    last = json.loads((run / "summary.json").read_text())["test_accuracy_last"]
    edit_summary(run, test_accuracy_last=last + 10)
    model = load_model(run / "model.safetensors")
    for parameter in model.parameters():
        parameter.data.mul_(2)
    save_model(model, run / "model.safetensors")
    with pytest.raises(ValueError, match="must hold the weights of its last epoch") as caught:
        ship(run, tmp_path / "results", tmp_path / "files")
    assert f"its summary says {last + 10:.2f} %" in str(caught.value)
    assert {path: path.read_bytes() for path in shipped.parent.iterdir()} == before


@pytest.mark.parametrize(
    ("dirty", "said"), [(True, "` with changes, "), (False, "`, "), (None, "` (as stated; ")]
)
def test_a_card_says_how_sure_its_commit_is(run, tmp_path, dirty, said):
    edit_summary(run, commit="0" * 40, dirty=dirty)
    assert (
        f"{'0' * 40}{said}"
        in ship(run, tmp_path / "results", tmp_path / "files").with_suffix(".md").read_text()
    )


def test_another_run_takes_the_place_of_the_first(run, tmp_path):
    first = ship(run, tmp_path / "results", tmp_path / "files")
    heard = []
    edit_summary(run, seed=6)
    assert (
        ship(
            run, tmp_path / "results", tmp_path / "files", progress=lambda *done: heard.append(done)
        )
        == first
    )
    assert "`results/tiny/seed6`" in first.with_suffix(".md").read_text()
    assert len(list(first.parent.iterdir())) == 2 and heard == [(1, 1)]


def test_a_study_is_named_after_the_run_of_its_weights(run, tmp_path):
    weights = {"model": "inverted_resnet_cifar10", "iterations": 2}
    shipped = ship(run, tmp_path / "results", tmp_path / "files")
    assert study_name(run / "model.safetensors", weights) == "tiny"
    assert study_name(shipped, weights) == "tiny"
    shipped.with_suffix(".md").unlink()
    assert study_name(shipped, weights) == "inverted_resnet_cifar10_r2"


class TestCheckOfCards:
    @pytest.fixture
    def card(self, run, tmp_path):
        return ship(run, tmp_path / "results", tmp_path / "files").with_suffix(".md")

    def problems(self, card):
        found = check_cards(card.parent, card.parents[1] / "results")
        assert all(line.startswith(f"{card}: ") and "\n" not in line for line in found)
        return found

    def test_a_card_and_its_evidence(self, card):
        assert self.problems(card) == []

    @pytest.mark.parametrize(
        ("changes", "row"),
        [
            ({"commit": "0" * 40}, "made with"),
            ({"train_seconds": 999.0}, "trained"),
            ({"test_accuracy_last": 101.0}, "accuracy of the run"),
        ],
    )
    def test_evidence_of_another_run(self, card, run, changes, row):
        edit_summary(run, **changes)
        (problem,) = self.problems(card)
        assert f": `{row}` must be " in problem and "as in tiny/seed5" in problem

    @pytest.mark.parametrize("again", ["", RUN_AGAIN])
    def test_an_accuracy_of_the_file_that_is_not_the_run_s(self, card, again):
        text = card.read_text().replace("| evidence | ", f"| evidence | {again}")
        (shipped,) = re.findall(r"accuracy of this file \| ([\d.]+) % of 20 test", text)
        ran = float(re.search(r"accuracy of the run \| ([\d.]+) %", text)[1])
        for accuracy, allowed in ((ran + 5, True), (ran + 5.01, False), (ran - 5.01, False)):
            said = f"accuracy of this file | {accuracy:.2f} %"
            card.write_text(text.replace(f"accuracy of this file | {shipped} %", said))
            found = self.problems(card)  # of 20 images one may go to or from the right class
            assert bool(found) != allowed
            assert allowed or found[0].endswith(f"{ran:.2f} %, got {accuracy:.2f} %")
        card.write_text(text.replace(f"| {shipped} % of 20", "| good on 20"))
        (problem,) = self.problems(card)
        assert "accuracies must be of test images" in problem and "'good on 20" in problem

    def test_a_card_may_say_that_its_evidence_is_of_the_recipe_run_again(self, card, run):
        edit_summary(run, commit="0" * 40)
        text = card.read_text()
        card.write_text(text.replace("| evidence | ", f"| evidence | {RUN_AGAIN}"))
        assert self.problems(card) == []
        card.write_text(card.read_text().replace("reproduce tiny", "reproduce large"))
        (problem,) = self.problems(card)
        assert ": `recipe` must be '`capsroute reproduce tiny --seeds 5`'" in problem
        card.write_text(text.replace("| evidence | ", "| evidence | much like "))
        (problem,) = self.problems(card)
        assert "`evidence` must be `results/<experiment>/seed<k>`, got 'much like " in problem

    def test_no_evidence_or_no_card(self, card):
        (card.parents[1] / "results" / "tiny" / "seed5" / "summary.json").unlink()
        (problem,) = self.problems(card)
        assert "must hold summary.json" in problem
        card.unlink()
        assert self.problems(card) == [f"{card}: weights must have a card beside them"]
