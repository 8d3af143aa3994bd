"""Numbers of the benchmarks: which rows count, ratios, the tables and the figure."""

import csv
import json

import pytest

from capsroute.bench import Case, Row, Timing, append_row
from capsroute.experiments.costs import (
    MEMORY_COLUMNS,
    OVERSTATED,
    cost_figure,
    memory_origin,
    memory_table,
    read_costs,
    step_table,
    steps_stated,
)
from capsroute.experiments.figures import cost
from capsroute.experiments.markers import check_markers
from capsroute.experiments.report import Measured

MODEL = "inverted_resnet_cifar10"
NAMES = ("device", "torch", "cuda", "triton", "python", "capsroute", "commit", "dirty")
PLACE = dict.fromkeys(NAMES, "x") | {"device": "NVIDIA H200", "commit": "b" * 40}


def add(path, case, ms, mib=300.0, *, checked=True, compiled=True, **place):
    timing = Timing(ms, ms, ms, mib)
    append_row(path, Row(case, timing, compiled, checked, PLACE | place))


def add_memory(path, rows, *, columns=MEMORY_COLUMNS, dirty=False):
    place = ("NVIDIA H200", "x", "b" * 40, dirty)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows((MODEL, 128, *row, *place)[: len(columns)] for row in rows)


@pytest.fixture
def timings(tmp_path):
    """What `bash benchmarks/gpu.sh` would leave."""
    path = tmp_path / "benchmarks" / "gpu.csv"
    for iterations, ms in ((1, 2.2), (2, 2.5), (4, 6.0)):
        case = Case(MODEL, iterations, "train")
        add(path, case, ms, 500.0 * iterations)
        add(path, case.reference, 20 * ms, 9000.0)
    add(path, Case(MODEL, 2, "train").alone, 2.0, 455.4)
    add(path, Case(MODEL, 2, "infer", batch=2048), 8.0)
    add(path, Case("cnn_cifar10", None, "train"), 1.6)
    memory = [(4, "auto", 309, 22, 2, 2695), (4, "reference", 9037, 22, 2, 2695)]
    add_memory(path.with_name("memory.csv"), [*memory, (10, "auto", 497, 78, 2, 2695)])
    path.with_name("generator_gpu.json").write_text(json.dumps({"rates": [18509628], "name": "x"}))
    return path


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{MODEL}:2 train median_ms -->2.5", None),
        (f"{MODEL} train median_ms -->2.50", None),  # with the model's own iterations
        (f"{MODEL}:4 train peak_mib --> **2,000** MiB", None),
        (f"{MODEL}:2 infer@2048 images_per_s -->256,000", None),
        (f"{MODEL}:2 train ÷backbone -->1.25", None),
        (f"{MODEL}:2 train ÷cnn_cifar10 -->1.56", None),
        (f"{MODEL}:4/reference train ÷{MODEL}:4 -->20", None),
        (f"{MODEL}/backbone train median_ms -->2.0", None),
        (f"{MODEL}:4 routing peak_mib -->309", None),
        (f"{MODEL}:4/reference routing peak_mib -->9,037", None),
        (f"{MODEL}:10 routing poses_mib -->78", None),
        ("generator_gpu rates.0 value -->18.5 million", None),
        (f"{MODEL}:2 train ÷backbone -->1.21", "1.25 in the results, 1.21 in the text"),
        (f"{MODEL}:2 train median_ms -->3", "2 in the results, 3 in the text"),
        (
            "generator_gpu rates.0 value -->18.6 million",
            "18.5 million in the results, 18.6 million",
        ),
        (f"{MODEL}:3 train median_ms -->3", f"no `median_ms` of {MODEL}_r3, train, batch 128"),
        (f"{MODEL}:2 infer median_ms -->3", f"no `median_ms` of {MODEL}_r2, infer, batch 128"),
        (f"{MODEL}:2 infer@2048 ÷backbone -->1.2", f"no `median_ms` of backbone of {MODEL}"),
        (
            f"{MODEL}:10/reference routing peak_mib -->9",
            f"no `peak_mib` of {MODEL}_r10 (reference)",
        ),
        (f"{MODEL}:4 routing median_ms -->9", f"no `median_ms` of {MODEL}_r4, routing"),
        ("inverted_resnet_cifar:2 train median_ms -->3", f"did you mean '{MODEL}'"),
        (f"{MODEL}:2 train ÷cnn_cifar -->1.5", "did you mean 'cnn_cifar10'"),
        (f"{MODEL}:0 train median_ms -->3", "must be NAME or NAME:1,2,4"),
        (f"{MODEL}:2/tiled train median_ms -->3", "must come backbone or reference, got 'tiled'"),
        ("generator_gpu rates.1 value -->18", "no such number"),
        ("generator_gpu name value -->18", "no such number"),
        ("generator rates.0 value -->18", "no such number"),
        (f"{MODEL}:2 train median_ms -->soon", "a marker must be `<!-- bench:"),
        (f"{MODEL}:2 train mean_ms -->2.5", "a marker must be `<!-- bench:"),
        (f"{MODEL}:2 train@all median_ms -->2.5", "a marker must be `<!-- bench:"),
    ],
)
def test_numbers_in_a_page(timings, tmp_path, text, problem):
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\nIt takes <!-- bench: {text} on one H200.\n")
    found = check_markers(page, Measured({}, read_costs(timings)), tmp_path)
    assert len(found) == (problem is not None)
    assert problem is None or (problem in found[0] and "\n" not in found[0])


def test_a_marker_in_backticks_is_an_example(timings, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Write `<!-- bench: cnn_cifar10 train median_ms -->9.9`.")
    assert check_markers(page, Measured({}, read_costs(timings)), tmp_path) == []


@pytest.mark.parametrize("start", ["  ", "- ", "> ", "12. * "])
def test_a_marker_that_begins_a_line_would_break_its_paragraph(timings, tmp_path, start):
    page = tmp_path / "page.md"
    page.write_text(f"It takes\n{start}<!-- bench: {MODEL}:2 train median_ms -->2.5 ms.\n")
    (problem,) = check_markers(page, Measured({}, read_costs(timings)), tmp_path)
    assert problem == f"{page}, line 2: a marker must not begin a line or an item"


def test_no_files_no_rows(tmp_path):
    costs = read_costs(tmp_path / "benchmarks" / "gpu.csv")
    assert not costs.rows and not cost_figure(costs)
    assert step_table(costs)[1] == memory_table(costs)[1] == []


def test_a_file_of_other_columns(timings):
    timings.with_name("memory.csv").write_text("model,batch\n")
    with pytest.raises(ValueError, match=r"memory\.csv must be a file that benchmarks/memory\.py"):
        read_costs(timings)


class TestWhichRowsCount:
    def test_the_newest_of_each_case(self, timings):
        add(timings, Case(MODEL, 2, "train"), 9.0, commit="c" * 40)
        costs = read_costs(timings)
        assert costs.number(f"{MODEL}:2", "train", "median_ms") == 9.0
        assert costs.number(f"{MODEL}:4", "train", "median_ms") == 6.0

    def test_a_ratio_is_of_the_newest_place_that_has_both(self, timings):
        case = Case(MODEL, 2, "train")
        add(timings, case, 9.0, commit="c" * 40)
        assert read_costs(timings).number(f"{MODEL}:2", "train", "÷backbone") == 1.25
        shown = {tuple(row[:3]): row for row in step_table(read_costs(timings))[1]}
        # beside a time in the table there is no ratio of another
        assert shown[MODEL, "2", "train"][4:6] == ["9.000", "–"]
        add(timings, case.alone, 3.0, commit="c" * 40)
        costs = read_costs(timings)
        assert costs.number(f"{MODEL}:2", "train", "÷backbone") == 3.0
        assert costs.number(f"{MODEL}:4", "train", "÷backbone") == 3.0
        assert costs.number(f"{MODEL}:2/reference", "train", f"÷{MODEL}:2") == 20.0

    @pytest.mark.parametrize("other", [{"commit": "c" * 40}, {"device": "NVIDIA A100"}])
    def test_no_ratio_across_code_or_machines(self, timings, other):
        add(timings, Case("resnet18_cifar10", None, "train"), 1.0, **other)
        with pytest.raises(ValueError, match="are of different code or machines"):
            read_costs(timings).number(f"{MODEL}:2", "train", "÷resnet18_cifar10")

    @pytest.mark.parametrize(
        "changes", [{"checked": False}, {"compiled": False}, {"dirty": "True"}]
    )
    def test_none_that_was_not_checked_or_compiled_or_committed(self, timings, changes):
        add(timings, Case(MODEL, 2, "train"), 9.0, **changes)
        assert read_costs(timings).number(f"{MODEL}:2", "train", "median_ms") == 2.5

    @pytest.mark.parametrize(
        "unusual", [{"bn_group": 16}, {"dtype": "float32"}, {"impl": "tiled"}, {"image_size": 64}]
    )
    def test_none_of_unusual_conditions(self, timings, unusual):
        add(timings, Case(MODEL, 2, "train", **unusual), 9.0)
        assert read_costs(timings).number(f"{MODEL}:2", "train", "median_ms") == 2.5

    def test_a_backbone_of_timm_has_rows_of_its_own(self, timings):
        figure = cost_figure(read_costs(timings))
        case = Case(MODEL, 2, "train", backbone="timm/resnet50", image_size=224)
        add(timings, case, 9.0)
        add(timings, case.alone, 7.5)
        costs = read_costs(timings)
        assert costs.number(f"{MODEL}:2", "train", "median_ms") == 2.5
        assert costs.number(f"{MODEL}:2+timm/resnet50@224", "train", "median_ms") == 9.0
        assert costs.number(f"{MODEL}:2+timm/resnet50@224", "train", "÷backbone") == 1.2
        with pytest.raises(ValueError, match="there is no `median_ms`"):
            costs.number(f"{MODEL}:2+timm/resnet50@96", "train", "median_ms")
        models = [cells[0] for cells in step_table(costs)[1]]
        assert f"{MODEL} on timm/resnet50, images of 224×224, backbone alone" in models
        assert cost_figure(costs) == figure

    def test_the_model_s_own_image_size_whether_written_or_not(self, timings):
        add(timings, Case(MODEL, 2, "train", image_size=32), 9.0)
        assert read_costs(timings).number(f"{MODEL}:2", "train", "median_ms") == 9.0
        header, *lines = timings.read_text().splitlines()
        shapes = [header.split(",").index(name) for name in ("image_size", "channels", "classes")]
        old = [
            [cell for k, cell in enumerate(line.split(",")) if k not in shapes[1:]]
            for line in (header, *lines)
        ]
        for cells in old[1:]:
            cells[shapes[0]] = ""
        timings.write_text("".join(",".join(cells) + "\n" for cells in old))
        assert read_costs(timings).number(f"{MODEL}:2", "train", "median_ms") == 9.0


def test_table_of_steps(timings):
    headings, rows = step_table(read_costs(timings))
    where = "H200, `bbbbbbbb`"
    held = f"{MODEL}, every vote held (reference)"
    shown = {(row[0], row[1], row[2]): row for row in rows}
    assert rows[0][0] == f"{MODEL}, backbone alone" and all(
        len(row) == len(headings) for row in rows
    )
    assert shown[MODEL, "4", "train"][3:] == ["128", "6.000", "3.00", "2,000", "21,333", where]
    assert shown[held, "4", "train"][4:6] == ["120.000", "60.00"]
    assert shown[MODEL, "2", "infer"][3:6] == ["2,048", "8.000", "–"]  # no backbone beside it
    assert shown["cnn_cifar10", "–", "train"][4:6] == ["1.600", "–"]


def test_commits_that_no_git_could_tell(timings):
    assert steps_stated(read_costs(timings)) == ""
    add(timings, Case(MODEL, 2, "train"), 9.0, dirty=None)
    assert steps_stated(read_costs(timings)) == " 1 of 9 commits are as stated."
    timings.write_text(timings.read_text().replace(",x\n", ",\n"))
    assert steps_stated(read_costs(timings)) == " All commits are as stated."
    add_memory(timings.with_name("memory.csv"), [TestMemoryWithItsCommit.ROW], dirty=None)
    assert memory_origin(read_costs(timings)) == "NVIDIA H200, `bbbbbbbb` as stated"


def test_table_of_memory(timings):
    _, rows = memory_table(read_costs(timings))
    assert rows == [
        [MODEL, "128", "4", "22", "2,695", "309", "9,037"],
        [MODEL, "128", "10", "78", "2,695", "497", "–"],
    ]


class TestMemoryWithItsCommit:
    ROW = (4, "auto", 300, 22, 2, 2695)

    def test_a_file_from_before_rows_named_a_commit_is_read_alike(self, timings):
        path = timings.with_name("memory.csv")
        for columns, commit in (
            (MEMORY_COLUMNS, "`bbbbbbbb`"),
            (MEMORY_COLUMNS[:-2], "commit not recorded"),
        ):
            add_memory(path, [self.ROW], columns=columns)
            costs = read_costs(timings)
            assert costs.number(f"{MODEL}:4", "routing", "peak_mib") == 300
            assert memory_origin(costs) == f"NVIDIA H200, {commit}"

    def test_rows_of_code_that_is_no_commits_do_not_count(self, timings):
        add_memory(timings.with_name("memory.csv"), [self.ROW], dirty=True)
        assert memory_table(read_costs(timings))[1] == []


class TestFigure:
    def test_lines_of_one_place(self, timings):
        add(timings, Case("inverted_simple_cifar10", 1, "train"), 1.0)  # one point is no line
        shown = cost_figure(read_costs(timings))
        assert shown["title"] == "NVIDIA H200, batch 128, bfloat16"
        time, memory = shown["panels"]
        assert time["lines"] == {
            MODEL: {
                "auto": [[1, 2, 4], [2.2, 2.5, 6.0]],
                "reference": [[1, 2, 4], [44.0, 50.0, 120.0]],
                "backbone": 2.0,
            }
        }
        assert memory["lines"][MODEL]["auto"][1] == [500.0, 1000.0, 2000.0]

    def test_the_newest_place_with_a_line_is_drawn_and_the_commit_of_a_reference_named(
        self, timings
    ):
        def drawn():
            time, memory = cost_figure(read_costs(timings))["panels"]
            line = time["lines"][MODEL]
            assert memory["commits"] == time["commits"]
            return line["auto"][1], line["reference"], line["backbone"], time["commits"]

        reference = [[1, 2, 4], [44.0, 50.0, 120.0]]
        add(timings, Case(MODEL, 1, "train"), 3.0, commit="c" * 40)  # one point is no line
        assert drawn() == ([2.2, 2.5, 6.0], reference, 2.0, "commit bbbbbbbb")
        add(timings, Case(MODEL, 2, "train"), 3.5, commit="c" * 40)
        assert drawn() == ([3.0, 3.5], reference, None, "commit cccccccc, reference bbbbbbbb")
        add(timings, Case(MODEL, 1, "train").reference, 30.0, commit="d" * 40)
        assert drawn()[1::2] == ([[1], [30.0]], "commit cccccccc, reference dddddddd")
        add(timings, Case(MODEL, 2, "train").reference, 40.0, commit="c" * 40)
        add(timings, Case(MODEL, 4, "train").reference, 50.0, commit="d" * 40)
        assert drawn()[1::2] == ([[2], [40.0]], "commit cccccccc")  # of one commit, if that can be
        rows = timings.read_text().splitlines(keepends=True)
        timings.write_text("".join(row for row in rows if ",reference," not in row))
        assert drawn()[1::2] == ([[], []], "commit cccccccc")

    @pytest.mark.parametrize("other", [{"device": "NVIDIA A100"}, {"torch": "y"}])
    def test_no_reference_of_another_machine(self, timings, other):
        for iterations in (1, 2):
            add(timings, Case(MODEL, iterations, "train"), 3.0, **other)
        time, _ = cost_figure(read_costs(timings))["panels"]
        assert time["lines"][MODEL]["reference"] == [[], []]
        assert time["commits"] == "commit bbbbbbbb"

    def test_no_peak_that_is_overstated(self, timings):
        old = min(OVERSTATED)
        for iterations in (1, 2):
            add(timings, Case(MODEL, iterations, "infer"), 3.0, commit=old)
            add(timings, Case(MODEL, iterations, "train").reference, 3.0, commit=old)
        costs = read_costs(timings)
        panels = cost_figure(costs)["panels"]
        assert [(panel["step"], panel["quantity"]) for panel in panels] == [
            ("a training step", "median_ms"),
            ("a training step", "peak_mib"),
            ("inference", "median_ms"),
        ]
        shown = {tuple(row[:4]): row for row in step_table(costs)[1]}
        assert shown[MODEL, "2", "infer", "128"][4:7] == ["3.000", "–", "–"]
        with pytest.raises(ValueError, match="there is no `peak_mib`"):
            costs.number(f"{MODEL}:2", "infer", "peak_mib")
        for iterations in (1, 2):
            add(timings, Case(MODEL, iterations, "train"), 3.0, commit="c" * 40)
        time, memory, _ = cost_figure(read_costs(timings))["panels"]
        assert time["commits"] == f"commit cccccccc, reference {old[:8]}"
        assert memory["commits"] == "commit cccccccc"

    def test_labels_and_ticks(self, timings):
        figure = cost(cost_figure(read_costs(timings)))
        time, memory = figure.axes
        wanted = ["2", "5", "10", "20", "50", "100", "200"]
        assert [tick.get_text() for tick in time.get_yticklabels()] == wanted
        wanted = ["256 MiB", "512 MiB", "1 GiB", "2 GiB", "4 GiB", "8 GiB", "16 GiB"]
        assert [tick.get_text() for tick in memory.get_yticklabels()] == wanted
        assert list(time.get_xticks()) == [1, 2, 4]
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == [
            MODEL,
            f"{MODEL}, backbone alone",
            f"{MODEL}, every vote held (reference)",
        ]
