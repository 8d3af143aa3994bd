"""RESULTS.md from evidence alone, and the checks that keep it and the README honest."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from PIL import Image

from capsroute.bench import Case, Row, Timing, append_row
from capsroute.experiments import preset
from capsroute.experiments.check import check, check_markers
from capsroute.experiments.costs import Costs
from capsroute.experiments.evidence import Spread, read_all
from capsroute.experiments.figures import drawn_from
from capsroute.experiments.report import FIGURES, TIMINGS, Measured, write_report
from capsroute.experiments.tables import all_tables
from small_experiments import write_evidence

ROOT = Path(__file__).parents[2]
PLACES = dict.fromkeys(
    ("device", "torch", "cuda", "triton", "python", "capsroute", "commit", "dirty"), "x"
)


def write_timings(path):
    """What `capsroute bench` would have written."""
    for mode in ("train", "infer"):
        for iterations in (1, 2, 4):
            case = Case("inverted_resnet_cifar10", iterations, mode)
            timing = Timing(2.0 * iterations, 1.9, 4.1, 300.0 * iterations)
            append_row(path, Row(case, timing, compiled=True, checked=True, where=PLACES))


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    for seed, accuracies in enumerate(([94.0, 94.9, 94.4], [94.2, 94.7, 94.8], [93.0, 94.4, 94.3])):
        write_evidence(folder, "inverted_resnet_cifar10_r2", accuracies, seed=seed)
    write_evidence(folder, "inverted_simple_cifar10_r2", [80.0, 85.1])
    return folder


def report(results):
    write_report(results, results.parent, results.parent / TIMINGS)
    return (results.parent / "RESULTS.md").read_text()


def row(text, experiment):
    """The cells of an experiment's row in the first table that has it, by heading."""
    lines = text.splitlines()
    names = [line.split("|")[1].strip().strip("[").split("]")[0] for line in lines if "|" in line]
    rows = [line for line in lines if "|" in line]
    index = names.index(experiment)
    heading = max(i for i, name in enumerate(names[:index]) if name == "experiment")
    cells = [[cell.strip() for cell in rows[i].strip("|").split("|")] for i in (heading, index)]
    return dict(zip(*cells, strict=True))


def test_last_and_best_epochs_stand_apart_with_mean_and_spread(results):
    cells = row(report(results), "inverted_resnet_cifar10_r2")
    assert cells["last epoch"] == "94.50 ± 0.26 (n = 3)"
    assert cells["best test epoch"] == "94.70 ± 0.26 (n = 3)"
    assert cells["paper"] == "95.14" and cells["params"] == "1,828,817"
    assert cells["against"] == "▼ −0.44; ▼ −0.15 (authors' average 94.85)"
    assert cells["training"] == "0.1 min on H200"


def test_one_seed_has_no_spread_and_more_than_the_paper_no_mark(results):
    cells = row(report(results), "inverted_simple_cifar10_r2")
    assert cells["best test epoch"] == "85.10 (n = 1)" and cells["against"] == "+0.05"


def test_every_row_is_there_and_none_is_blank(results):
    text = report(results)
    assert "Of the paper's 49 experiments, 2 have been run." in text
    for table in all_tables():
        for wanted in table.rows:
            cells = row(text, wanted.experiment)
            assert all(cells.values())
            done = wanted.experiment in ("inverted_resnet_cifar10_r2", "inverted_simple_cifar10_r2")
            assert (cells["last epoch"] == "not run yet") == (not done)


def test_nothing_has_been_run(tmp_path):
    (tmp_path / "results").mkdir()
    text = report(tmp_path / "results")
    assert "0 have been run" in text and "png" not in text


def test_runs_that_depart_from_their_preset_are_shown_and_not_counted(results):
    write_evidence(results, "inverted_resnet_cifar10_r2", [99.0], seed=7, epochs=10)
    text = report(results)
    assert row(text, "inverted_resnet_cifar10_r2")["best test epoch"] == "94.70 ± 0.26 (n = 3)"
    assert "`inverted_resnet_cifar10_r2`, seed 7: `epochs` is 10 there and 350 here" in text


def test_the_models_own_iterations_may_be_written_out(results):
    model = dataclasses.replace(preset("inverted_small_multimnist").config.model, iterations=2)
    write_evidence(results, "inverted_small_multimnist", [70.0], model=model)
    text = report(results)
    assert row(text, "inverted_small_multimnist")["last epoch"] == "70.00 (n = 1)"


def test_runs_that_diverged_are_counted_as_that(results):
    folder = write_evidence(results, "inverted_simple_cifar10_r2", [10.0], seed=1)
    (folder / "summary.json").rename(folder / "diverged.json")
    text = report(results)
    cells = row(text, "inverted_simple_cifar10_r2")
    assert cells["last epoch"] == "85.10 (n = 1, 1 diverged)"
    assert check(results, results.parent, results.parent / TIMINGS) == []


def test_figures_are_drawn_where_there_are_numbers(results):
    write_timings(results.parent / TIMINGS)
    text = report(results)
    assert "Time and memory against routing iterations (x, batch 128, bfloat16)" in text
    assert "| inverted_resnet_cifar10 | 2 | infer | 128 | 4.000 | – | 600 |" in text
    drawn = sorted(path.name for path in (results.parent / FIGURES).iterdir())
    assert drawn == [
        "convergence_cifar.png",
        "convergence_iterations.png",
        "cost.png",
        "iterations.png",
    ]
    for name in drawn:
        path = results.parent / FIGURES / name
        assert f"({FIGURES / name})" in text and path.stat().st_size <= 100_000
        with Image.open(path) as image:
            assert min(image.size) > 200 and len(image.convert("RGB").getcolors(1 << 24)) > 20
        assert len(drawn_from(path)) == 64


def test_the_figure_of_costs_takes_the_newest_code_alone(results):
    path = results.parent / TIMINGS
    case, timing = Case("inverted_resnet_cifar10", 1, "train"), Timing(9.0, 9.0, 9.0, 9.0)
    older = Row(case, timing, compiled=True, checked=True, where=PLACES | {"commit": "older"})
    append_row(path, older)
    report(results)
    assert not (results.parent / FIGURES / "cost.png").exists()  # one point is no line
    write_timings(path)
    report(results)
    digest = drawn_from(results.parent / FIGURES / "cost.png")
    path.unlink()
    write_timings(path)
    report(results)
    assert drawn_from(results.parent / FIGURES / "cost.png") == digest


def test_spread():
    assert Spread.of([]) is None and str(Spread.of([1.0])) == "1.00"
    assert str(Spread.of([1.0, 2.0, 3.0])) == "2.00 ± 1.00"


class TestCheck:
    @staticmethod
    def problems(results):
        return check(results, results.parent, results.parent / TIMINGS)

    def test_a_fresh_report_has_none(self, results):
        report(results)
        assert self.problems(results) == []

    def test_a_report_that_was_edited_or_is_old(self, results):
        text = report(results)
        (results.parent / "RESULTS.md").write_text(text.replace("94.50", "95.50"))
        (problem,) = self.problems(results)
        assert "RESULTS.md is not what the results say" in problem
        write_evidence(results, "inverted_simple_cifar10_r3", [80.0])
        problems = self.problems(results)
        assert len(problems) == 3 and any("iterations.png" in problem for problem in problems)

    def test_a_figure_that_nothing_is_drawn_from(self, results):
        report(results)
        shutil.copy(results / "figures" / "iterations.png", results / "figures" / "more.png")
        (problem,) = self.problems(results)
        assert "more.png" in problem

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"commit": None}, "`commit` is unknown"),
            ({"commit": "abc"}, "`commit` must be 40 hex digits"),
            ({"device": None}, "`device` is unknown"),
            ({"torch": None}, "`torch` is unknown"),
            ({"seed": 5}, "`seed` must be 0, the folder's"),
            ({"experiment": "cnn_cifar10"}, "`experiment` must be 'fast_cifar10'"),
            ({"test_accuracy_last": 96.0}, "`test_accuracy_last` must be 95.0, got 96.0"),
            ({"test_accuracy_best": 96.0}, "`test_accuracy_best` must be 95.5, got 96.0"),
            ({"train_seconds": 1.0}, "`train_seconds` must be 6.0, got 1.0"),
            ({"params": 1}, "`params` must be 1828817, got 1"),
            ({"iterations": 3}, "`iterations` must be 2, got 3"),
            ({"dtype": "float32"}, "`dtype` must be 'bfloat16'"),
        ],
    )
    def test_a_summary_that_its_files_do_not_bear_out(self, tmp_path, changes, message):
        results = tmp_path / "results"
        write_evidence(results, "fast_cifar10", [95.5, 95.0], summary=changes)
        problems = self.problems(results)
        assert any(message in problem for problem in problems), problems
        assert all("fast_cifar10/seed0" in problem for problem in problems)

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda f: (f / "config.json").unlink(), "config.json"),
            (lambda f: (f / "summary.json").unlink(), "must hold summary.json"),
            (lambda f: (f / "metrics.jsonl").unlink(), "must hold metrics.jsonl"),
            (lambda f: (f / "metrics.jsonl").write_text("{\n"), "one JSON object a line"),
            (lambda f: (f / "metrics.jsonl").write_text("{}\n"), "there is no field"),
            (lambda f: (f / "state.pt").touch(), "state.pt is no part of the evidence"),
            (lambda f: f.rename(f.with_name("first")), "must be called seed<k>"),
            (lambda f: f.parent.rename(f.parents[1] / "mine"), "no preset is called mine"),
            (lambda f: drop_last_line(f / "metrics.jsonl"), "must end at 210"),
            (lambda f: repeat_lines(f / "metrics.jsonl"), "none twice"),
        ],
    )
    def test_evidence_that_is_not_whole(self, tmp_path, spoil, message):
        spoil(write_evidence(tmp_path / "results", "fast_cifar10", [94.0, 95.5, 95.0]))
        problems = self.problems(tmp_path / "results")
        assert any(message in problem for problem in problems), problems
        assert all("\n" not in problem for problem in problems)


def drop_last_line(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def repeat_lines(path):
    path.write_text(path.read_text() * 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("inverted_resnet_cifar10_r2 test_accuracy_last mean -->94.50", None),
        ("inverted_resnet_cifar10_r2 test_accuracy_last mean --> **94.5** %", None),
        ("inverted_resnet_cifar10_r2 test_accuracy_best std -->0.26", None),
        ("inverted_resnet_cifar10_r2 test_accuracy_best n -->3", None),
        ("inverted_resnet_cifar10_r2 test_accuracy_best seed1 -->94.80", None),
        ("inverted_resnet_cifar10_r2 params mean -->1,828,817", None),
        ("inverted_resnet_cifar10_r2 train_minutes mean -->0.15", None),
        ("inverted_resnet_cifar10_r2 test_accuracy_last mean -->94.7", "94.5 in the results, 94.7"),
        ("inverted_resnet_cifar10_r2 test_accuracy_last mean -->95", "94 in the results, 95"),
        ("inverted_resnet_cifar10_r2 test_accuracy_best seed9 -->94.8", "no such results"),
        ("inverted_simple_cifar10_r2 test_accuracy_best std -->0.1", "no such results"),
        ("cnn_cifar10 test_accuracy_last mean -->87.1", "no such results"),
        ("inverted_resnet_cifar10_r2 accuracy mean -->94.5", "no field `accuracy`"),
        ("others/maps.r2 a.b percent -->79.7", None),
        ("others/maps.r2 a.b percent -->79", "80 in the results, 79"),
        ("others/maps.r2 a.c percent -->79", "no such number"),
        ("others/maps.r2 each.1 percent -->25", None),
        ("others/maps.r2 each.1 value -->0.25", None),
        ("others/maps.r2 each.2 percent -->25", "no such number"),
        ("others/nothing a.b percent -->79", "no such number"),
        ("inverted_resnet_cifar10_r2 test_accuracy_last mean -->soon", "a marker must be"),
        ("inverted_resnet_cifar10_r2 test_accuracy_last median -->94.5", "a marker must be"),
    ],
)
def test_numbers_in_a_page(results, tmp_path, text, problem):
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\nWe get <!-- results: {text} on one H200.\n")
    (results / "others").mkdir()
    (results / "others" / "maps.r2.json").write_text('{"a": {"b": 0.7967}, "each": [0, 0.25]}')
    found = check_markers(page, Measured(read_all(results), Costs(tmp_path, {}), {}, {}), results)
    assert (problem is None) == (not found)
    assert problem is None or problem in found[0]


def test_evidence_of_a_changed_tree_is_none(results):
    path = results / "inverted_simple_cifar10_r2" / "seed0" / "summary.json"
    path.write_text(path.read_text().replace('"dirty": false', '"dirty": true'))
    problems = check(results, results.parent, results.parent / TIMINGS)
    assert any("made from a changed tree" in problem for problem in problems)


def test_a_marker_in_backticks_is_an_example(results, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Write `<!-- results: cnn_cifar10 test_accuracy_last mean -->87.1`.")
    assert (
        check_markers(page, Measured(read_all(results), Costs(tmp_path, {}), {}, {}), results) == []
    )


def test_what_is_committed_is_traced():
    assert check(ROOT / "results", ROOT, ROOT / TIMINGS) == []
