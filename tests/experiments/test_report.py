"""RESULTS.md from evidence alone, and the checks that keep it and the README honest."""

import json
import re
import shutil
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from capsroute.bench import Case, Row, Timing, append_row
from capsroute.experiments.check import WEIGHTS, check
from capsroute.experiments.costs import Costs
from capsroute.experiments.evidence import Spread, read_all, read_evidence
from capsroute.experiments.figures import convergence, drawn_from
from capsroute.experiments.markdown import FIGURES
from capsroute.experiments.markers import check_markers, fill_markers
from capsroute.experiments.presets import preset
from capsroute.experiments.report import TIMINGS, Measured, figures
from capsroute.experiments.tables import all_tables
from small_experiments import (
    register_tiny,
    report,
    report_text,
    row_of,
    write_diverged,
    write_evidence,
)

ROOT = Path(__file__).parents[2]
EPOCHS = preset("fast_cifar10").config.epochs
LEG = {
    "device": "NVIDIA H200",
    "python": "3.11.7",
    "torch": "2.13.0",
    "capsroute": "0.1.0",
    "commit": "a" * 40,
    "dirty": False,
}
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


def test_every_row_is_there_and_none_is_blank(results):
    text = report_text(results)
    assert "Of the paper's 49 experiments, 2 have been run." in text
    for table in all_tables():
        for wanted in table.rows:
            cells = row_of(text, wanted.experiment)
            assert all(cells.values())
            done = wanted.experiment in ("inverted_resnet_cifar10_r2", "inverted_simple_cifar10_r2")
            assert (cells["last epoch"] == "not run yet") == (not done)


def test_nothing_has_been_run(tmp_path):
    (tmp_path / "results").mkdir()
    text = report_text(tmp_path / "results")
    assert "0 have been run" in text and "png" not in text


def iteration_figure(results):
    measured = Measured.read(results, results.parent / TIMINGS)
    (figure,) = [figure for figure in figures(measured) if figure.name == "iterations"]
    return figure


def crosses(axis):
    """Where they are, and their colours."""
    marked = [line for line in axis.get_lines() if line.get_marker() == "x"]
    return [(*line.get_xdata(), *line.get_ydata(), line.get_color()) for line in marked]


def test_the_iteration_figure_has_a_cross_at_chance_for_each_seed_that_diverged(results):
    figure = iteration_figure(results)
    assert crosses(figure.draw(figure.data).axes[0]) == []
    for seed in (0, 1):
        write_diverged(results, "inverted_simple_cifar10_a_r5", seed=seed)
    write_diverged(results, "inverted_simple_cifar10_r2", seed=1)
    write_diverged(results, "inverted_simple_cifar10_r2", seed=2, epochs=10)  # another recipe
    figure = iteration_figure(results)
    assert figure.data["inverted A (no LayerNorm)"]["ours"] == []
    assert figure.data["inverted"]["ours"] == [(2, 85.1, 0.0)]
    whole, detail = figure.draw(figure.data).axes
    (x1, *alone), (x2, *first), (x3, *second) = crosses(whole)
    assert (x1, *alone) == (2, 10.0, "C5") and first == second == [10.0, "C2"]
    assert x2 < 5 < x3 and x3 - x2 < 0.5  # beside each other
    assert crosses(detail) == [] and "diverged" in whole.get_legend().get_title().get_text()


def test_how_far_a_routing_varies_with_its_iterations(tmp_path):
    """The paper's column is the deviation of its five points, which ours must all be there for."""
    results = tmp_path / "results"
    for count, accuracy in enumerate([84.24, 85.05, 84.83, 85.17, 85.09], start=1):
        write_evidence(results, f"inverted_simple_cifar10_r{count}", [accuracy])
    write_evidence(results, "em_simple_cifar10_r2", [82.0])
    text = report_text(results)
    assert "| inverted | 0.34 | 0.34 |" in text and "| dynamic | 0.64 | not run yet |" in text
    assert "| EM | 19.20 | 1 of 5 points |" in text
    write_diverged(results, "inverted_simple_cifar10_r5", seed=1)
    assert "| inverted | 0.34 | a seed diverged |" in report_text(results)


def test_a_convergence_curve_that_diverged_is_drawn_to_its_end_and_crossed(results):
    experiment = "inverted_resnet_cifar10_r2"
    write_diverged(results, experiment, [50.0, 60.0], seed=8)
    write_diverged(results, experiment, seed=9)
    (results / experiment / "seed9" / "metrics.jsonl").write_text("")  # before any evaluation
    found = figures(Measured.read(results, results.parent / TIMINGS))
    (shown,) = [figure for figure in found if figure.name == "convergence_cifar"]
    drawn = shown.draw(shown.data)
    lines = [line for axis in drawn.axes for line in axis.get_lines()]
    (cross,) = [line for line in lines if line.get_marker() == "x"]
    assert list(cross.get_ydata()) == [60.0]
    assert [50.0, 60.0] in [list(line.get_ydata()) for line in lines]
    assert drawn.legends[0].get_texts()[-1].get_text() == "diverged"


def test_runs_of_another_length_have_a_panel_of_their_own(tmp_path):
    results = tmp_path / "results"
    for name in ("inverted_small_multimnist", "digits_r2", "digits_r4", "fast_cifar100"):
        write_evidence(results, name, [70.0])
    found = figures(Measured.read(results, tmp_path / TIMINGS))
    (shown,) = [figure for figure in found if figure.name == "convergence_beyond"]
    assert {title: sorted(lines) for title, lines in shown.data.items()} == {
        "DiverseMultiMNIST, 10 epochs": ["inverted_small_multimnist"],
        "DiverseMultiMNIST, 350 epochs": ["digits_r2", "digits_r4"],
        "CIFAR-100": ["fast_cifar100"],
    }
    short, *_ = shown.draw(shown.data).axes
    assert short.get_title() == "DiverseMultiMNIST, 10 epochs" and short.get_xlim()[1] < 11


def test_runs_counted_in_steps_say_so(tmp_path, monkeypatch):
    results = tmp_path / "results"
    for name, changes in (("tiny", {}), ("short", {"steps": None, "epochs": 2})):
        register_tiny(monkeypatch, tmp_path / "data", name=name, **changes)
        write_evidence(results, name, [70.0])
    found = figures(Measured.read(results, tmp_path / TIMINGS))
    (shown,) = [figure for figure in found if figure.name == "convergence_beyond"]
    assert list(shown.data) == ["fashion_mnist, 12 steps", "fashion_mnist, 2 epochs"]


@pytest.mark.parametrize("count", [2, 10, 11, 20])
def test_no_two_experiments_have_one_colour(count):
    lines = {f"line {index}": [([1, 2], [50.0, 60.0])] for index in range(count)}
    (axis,) = convergence({"CIFAR-10": lines}).axes
    assert len({to_hex(line.get_color()) for line in axis.get_lines()}) == count


def test_the_iteration_figure_tells_what_was_not_run(tmp_path):
    write_evidence(tmp_path / "results", "inverted_simple_cifar10_r3", [86.0])
    write_diverged(tmp_path / "results", "em_simple_cifar10_r5")
    figure = iteration_figure(tmp_path / "results")
    legend = figure.draw(figure.data).axes[0].get_legend()
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[:2] == ["dynamic, not run yet", "EM, diverged"] and labels[-1] == "inverted"
    # ours has bars for the deviation, and is no plain line
    assert [line.get_linestyle() for line in legend.get_lines()] == ["--"] * 5


def test_the_iteration_figure_shows_in_detail_what_is_better_than_the_paper(tmp_path):
    write_evidence(tmp_path / "results", "inverted_simple_cifar10_r3", [90.0])
    figure = iteration_figure(tmp_path / "results")
    lowest, highest = figure.draw(figure.data).axes[1].get_ylim()
    assert lowest < 85.17 < 90 < highest < 91


def test_the_iteration_figure_of_diverged_runs_alone(tmp_path):
    write_diverged(tmp_path / "results", "em_simple_cifar10_r5")
    figure = iteration_figure(tmp_path / "results")
    assert len(crosses(figure.draw(figure.data).axes[0])) == 1


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

    @pytest.mark.parametrize("spoil", ["blank", "cut", "halved"])
    def test_a_figure_whose_picture_is_not_the_one_drawn(self, results, spoil):
        """A digest that was kept tells of the numbers, and not of what is to be seen."""
        report(results)
        path = results / "figures" / "iterations.png"
        with Image.open(path) as image:
            kept = PngInfo()
            for key, text in image.info.items():
                if isinstance(text, str):
                    kept.add_text(key, text)
            size = image.size if spoil == "blank" else (image.width // 2, image.height)
            picture = image.convert("RGB").crop((0, 0, *size))
        if spoil == "blank":
            picture.paste("white", (0, 0, *size))
        picture.save(path, pnginfo=kept)
        if spoil == "halved":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        (problem,) = self.problems(results)
        assert problem == f"{path} is not what the results say; run `capsroute report`"

    def test_weights_without_a_card(self, results):
        report(results)
        files = results.parent / WEIGHTS
        files.mkdir(parents=True)
        (files / "cnn_cifar10.safetensors").touch()
        (problem,) = self.problems(results)
        assert problem == f"{files / 'cnn_cifar10.md'}: weights must have a card beside them"

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
            ({"images_per_second": 1.0}, "`images_per_second` must be 1000.0, got 1.0"),
            ({"params": 1}, "`params` must be 1828817, got 1"),
            ({"iterations": 3}, "`iterations` must be 2, got 3"),
            ({"dtype": "float32"}, "`dtype` must be 'bfloat16'"),
            ({"resumed_from": [LEG, LEG | {"torch": None}]}, "leg 2 of a resumed run: `torch` is"),
            ({"resumed_from": [LEG | {"commit": "abc"}]}, "leg 1 of a resumed run: `commit` must"),
            ({"resumed_from": [LEG | {"dirty": True}]}, "leg 1 of a resumed run: it was made from"),
            ({"resumed_from": ["x"]}, "`resumed_from` must be a list of JSON objects, got ['x']"),
            ({"resumed_from": None}, "`resumed_from` must be a list of JSON objects, got None"),
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
            (lambda f: drop_last_line(f / "metrics.jsonl"), f"must end at {EPOCHS}"),
            (lambda f: repeat_lines(f / "metrics.jsonl"), "none twice"),
            (lambda f: drop_first_line(f / "metrics.jsonl"), "a line for every 10 steps"),
        ],
    )
    def test_evidence_that_is_not_whole(self, tmp_path, spoil, message):
        spoil(write_evidence(tmp_path / "results", "fast_cifar10", [94.0, 95.5, 95.0]))
        problems = self.problems(tmp_path / "results")
        assert any(message in problem for problem in problems), problems
        assert all("\n" not in problem for problem in problems)

    @pytest.mark.parametrize("name", ["__pycache__", ".ipynb_checkpoints"])
    def test_what_others_leave_beside_evidence_is_none(self, results, name):
        report(results)
        (results / "inverted_resnet_cifar10_r2" / name).mkdir()
        assert not self.problems(results)

    def test_a_seed_that_is_another_ones_copy(self, results):
        experiment = results / "inverted_resnet_cifar10_r2"
        text = (experiment / "seed0" / "metrics.jsonl").read_text()
        seconds = re.compile(r'"seconds": [\d.]+')
        (experiment / "seed1" / "metrics.jsonl").write_text(seconds.sub('"seconds": 6.0', text))
        summary = json.loads((experiment / "seed0" / "summary.json").read_text())
        copied = json.dumps(summary | {"seed": 1, "train_seconds": 6.0})
        (experiment / "seed1" / "summary.json").write_text(copied)
        report(results)
        (problem,) = self.problems(results)
        assert "seed1: its metrics are those of" in problem and "seed0, times apart" in problem

    def test_a_run_of_several_legs_names_their_commits(self, tmp_path):
        results = tmp_path / "results"
        legs = [LEG, LEG | {"device": "NVIDIA H100"}]
        write_evidence(results, "fast_cifar10", [95.0], summary={"resumed_from": legs})
        assert "| `aaaaaaaa`, then `01234567` |" in report(results)
        assert self.problems(results) == []


@pytest.mark.parametrize(("dirty", "said"), [(False, "`01234567`"), (None, "`01234567` as stated")])
def test_every_run_says_how_sure_its_commit_is(tmp_path, dirty, said):
    write_evidence(tmp_path / "results", "fast_cifar10", [95.0], summary={"dirty": dirty})
    text = report_text(tmp_path / "results")
    assert text.splitlines()[-1].endswith(f"| 2.13.0 | {said} |")
    assert "what `CAPSROUTE_COMMIT` said on a machine without git" in text


def drop_first_line(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


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
        ("inverted_resnet_cifar10_r2 epoch_seconds mean -->0.026", None),
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
        ("others/maps.r2 a.of c value -->3", None),
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
    (results / "others" / "maps.r2.json").write_text(
        '{"a": {"b": 0.7967, "of c": 3}, "each": [0, 0.25]}'
    )
    found = check_markers(page, Measured(read_all(results), Costs.of(tmp_path, [])), results)
    assert (problem is None) == (not found)
    assert problem is None or problem in found[0]


def test_what_an_epoch_takes_leaves_compiling_out(tmp_path):
    """And a break, which made one epoch longer."""
    folder = write_evidence(tmp_path, "fast_cifar10", [94.0, 95.5, 95.0])
    usual = read_evidence(folder).number("epoch_seconds")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert usual == pytest.approx(records[0]["seconds"])
    for index, record in enumerate(records):
        record["seconds"] += 60.0 if index < 2 else 90.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert read_evidence(folder).number("epoch_seconds") == pytest.approx(usual)


def test_the_mean_of_the_seeds_that_did_not_diverge_is_no_number_for_a_page(results, tmp_path):
    write_diverged(results, "inverted_resnet_cifar10_r2", seed=3)
    measured = Measured(read_all(results), Costs.of(tmp_path, []))
    page = tmp_path / "page.md"
    marker = "We get <!-- results: inverted_resnet_cifar10_r2 test_accuracy_best {} %"
    page.write_text(marker.format("mean -->94.70"))
    (problem,) = check_markers(page, measured, results)
    assert "seed 3 diverged" in problem
    page.write_text(marker.format("seed1 -->94.80"))
    assert check_markers(page, measured, results) == []
    page.write_text(marker.format("seed3 -->10.00"))
    (problem,) = check_markers(page, measured, results)
    assert "no such results" in problem


def test_evidence_of_a_changed_tree_is_none(results):
    path = results / "inverted_simple_cifar10_r2" / "seed0" / "summary.json"
    path.write_text(path.read_text().replace('"dirty": false', '"dirty": true'))
    problems = check(results, results.parent, results.parent / TIMINGS)
    assert any("made from a changed tree" in problem for problem in problems)


def test_a_marker_in_backticks_is_an_example(results, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Write `<!-- results: cnn_cifar10 test_accuracy_last mean -->87.1`.")
    assert check_markers(page, Measured(read_all(results), Costs.of(tmp_path, [])), results) == []


@pytest.mark.parametrize("use", [check_markers, fill_markers])
def test_a_page_that_is_no_text_is_named(results, tmp_path, use):
    page = tmp_path / "page.md"
    page.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"page\.md must be text in UTF-8"):
        use(page, Measured(read_all(results), Costs.of(tmp_path, [])), results)


class TestFilling:
    NAME = "inverted_resnet_cifar10_r2"

    def test_stale_numbers_are_written_anew_as_they_were_rounded(self, results, tmp_path):
        page = tmp_path / "page.md"
        text = (
            "**<!-- results: {name} test_accuracy_last mean --> **{0} %**, "
            "<!-- results: {name} params mean -->{1} parameters, or\n"
            "<!-- results: {name} params mean -->{2}; `<!-- results: {name} params mean -->1`; "
            "<!-- results: {name} test_accuracy_last n -->3 seeds"
        )
        page.write_text(text.format("7", "1,000,000", "2.1 million", name=self.NAME))
        measured = Measured(read_all(results), Costs.of(tmp_path, []))
        changes = fill_markers(page, measured, results)
        assert page.read_text() == text.format("94", "1,828,817", "1.8 million", name=self.NAME)
        assert changes == [
            f"{page}: {self.NAME} test_accuracy_last mean: 7 → 94",
            f"{page}: {self.NAME} params mean: 1,000,000 → 1,828,817",
            f"{page}: {self.NAME} params mean: 2.1 million → 1.8 million",
        ]
        assert fill_markers(page, measured, results) == []

    def test_what_cannot_be_told_stays(self, results, tmp_path):
        page = tmp_path / "page.md"
        lines = ("cnn_cifar10 params mean -->7", f"{self.NAME} accuracy mean -->8", "nothing")
        text = "\n".join(f"It is <!-- results: {line}" for line in lines)
        page.write_text(text)
        measured = Measured(read_all(results), Costs.of(tmp_path, []))
        assert fill_markers(page, measured, results) == []
        assert page.read_text() == text
        assert len(check_markers(page, measured, results)) == len(lines)


def test_what_is_committed_is_traced():
    assert check(ROOT / "results", ROOT, ROOT / TIMINGS) == []
