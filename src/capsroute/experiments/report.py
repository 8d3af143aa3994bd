"""RESULTS.md and its figures, from the committed evidence and timings alone."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import pstdev
from typing import Any, NamedTuple

from capsroute.experiments.cells import NOT_RUN, experiment_row, row_headings
from capsroute.experiments.costs import (
    Costs,
    cost_figure,
    memory_origin,
    memory_table,
    read_costs,
    step_table,
    steps_stated,
)
from capsroute.experiments.evidence import Result, counted, diverged, read_all, spread
from capsroute.experiments.figures import DIVERGED, Figure, convergence, cost, iterations
from capsroute.experiments.markdown import FIGURES, markdown_picture, markdown_table
from capsroute.experiments.presets import preset
from capsroute.experiments.studies import Studies
from capsroute.experiments.tables import ITERATIONS, ROUTINGS, Table, all_tables
from capsroute.files import write_whole
from capsroute.models import model_info

TIMINGS = Path("benchmarks/gpu.csv")
SURE_OF_COMMIT = {True: " with changes", False: "", None: " as stated"}
Evidence = dict[str, list[Result]]

INTRODUCTION = """\
# Results

This page is written by `capsroute report` from the evidence in [results/](results) and, for what
models cost, the measurements in [benchmarks/](benchmarks); `capsroute report --check` verifies
that they agree. Do not edit it.

- Accuracies are percentages of the test images, given as mean ± standard deviation over n seeds.
- **Last epoch** involves no selection. **Best test epoch** is the highest test accuracy of a run:
  it selects on the test images, and is shown because that is what the paper reports. The two are
  never mixed.
- **Against** is our mean best test epoch minus the paper's number; ▼ marks where we fall short. The
  paper reports the best of several runs. Where the authors' own averages are known (they are not in
  the paper), we compare with those too. A row with a diverged seed is compared with neither: its
  mean covers only the other seeds.
- A run **diverged** if its loss or weights stopped being finite. It has no accuracy and enters no
  mean; the number of such runs is given beside the mean.
- **Training** is the training time, excluding evaluations, on the device named.
- A **commit** *as stated* is what `CAPSROUTE_COMMIT` said on a machine without git, where nobody
  could check that nothing had been changed. The other runs' were read from git, the tree unchanged.
"""


class Measured(NamedTuple):
    """All that the report is made from."""

    evidence: Evidence
    costs: Costs
    studies: Studies = Studies()

    @classmethod
    def read(cls, results: Path, timings: Path) -> "Measured":
        return cls(read_all(results), read_costs(timings), Studies.read(results))


def results_text(measured: Measured, figures: Sequence[Figure]) -> str:
    """RESULTS.md."""
    evidence, costs, studies = measured
    drawn = {figure.name: figure for figure in figures}
    sections = [INTRODUCTION, _progress(evidence)]
    for table in all_tables():
        rows = [experiment_row(row, evidence.get(row.experiment, [])) for row in table.rows]
        section = [f"## {table.title}", markdown_table(row_headings(table), rows)]
        names = [f"convergence_{table.key}", table.key]
        section += [markdown_picture(drawn[name]) for name in names if name in drawn]
        if table.key == "iterations":
            section.append(_steadiness(evidence))
        sections.append("\n\n".join(section))
    sections += [_costs(costs, drawn), _memory(costs)]
    sections += studies.sections(drawn)
    sections += [_left_out(evidence), _runs(evidence)]
    return "\n\n".join(section.strip() for section in sections if section) + "\n"


def _steadiness(evidence: Evidence) -> str:
    """The figure's last column: how far a routing's accuracy varies with its iterations."""
    lines = {routing: _iteration_line(name, evidence) for routing, name in ROUTINGS.items()}
    rows = [
        [routing, f"{pstdev(line['paper'][1]):.2f}", _deviation(line)]
        for routing, line in lines.items()
    ]
    text = (
        "Standard deviation of a routing's best test epochs over 1 to 5 iterations, as in the "
        "paper's last column:"
    )
    return f"{text}\n\n{markdown_table(['routing', 'paper', 'ours'], rows)}"


def _deviation(line: Mapping[str, Any]) -> str:
    points = [mean for _, mean, _ in line["ours"]]
    if line["diverged"]:
        return "a seed diverged"
    if len(points) < len(ITERATIONS):
        return f"{len(points)} of {len(ITERATIONS)} points" if points else NOT_RUN
    return f"{pstdev(points):.2f}"


def _costs(costs: Costs, drawn: Mapping[str, Figure]) -> str:
    headings, rows = step_table(costs)
    if not rows:
        return ""
    text = (
        "Median times of whole training steps (batch, augmentation, forward, loss, backward, "
        "optimiser) and of forward passes, compiled, each in one CUDA graph, in bfloat16. All were "
        "measured with `capsroute bench` by `bash benchmarks/gpu.sh` (`benchmarks/gpu.csv`). "
        "**÷ backbone** is the time relative to the backbone alone, with average pooling and a "
        "linear layer, in the same run. Peak memory is left out (–) for commits "
        "that overstated it, by what earlier cases of the process had left."
        f"{steps_stated(costs)}"
    )
    figure = [markdown_picture(drawn["cost"])] if "cost" in drawn else []
    return "\n\n".join(["## What it costs", *figure, text, markdown_table(headings, rows)])


def _memory(costs: Costs) -> str:
    headings, rows = memory_table(costs)
    if not rows:
        return ""
    text = (
        "Peak memory, in MiB, of a forward and backward pass through the capsule layers alone, in "
        "bfloat16 and not compiled (`python benchmarks/memory.py`, `benchmarks/memory.csv`), next "
        "to the size of the poses that all iterations make and of the votes that one iteration "
        "would store. The reference does store them, as the formula is written. –: too large to "
        "measure."
    )
    origin = f"Measured on {memory_origin(costs)}."
    return "\n\n".join(["### Memory of the routing", text, markdown_table(headings, rows), origin])


def _progress(evidence: Evidence) -> str:
    printed = {row.experiment for table in all_tables()[:-1] for row in table.rows}
    ended = [name for name in printed if evidence.get(name)]
    verb = "has" if len(ended) == 1 else "have"
    return f"Of the paper's {len(printed)} experiments, {len(ended)} {verb} been run."


def left_out(evidence: Evidence) -> list[str]:
    """Runs whose config is not their preset's, and how: shown, and in no average."""
    return [
        f"`{run.experiment}`, seed {run.seed}: {'; '.join(run.departures())}"
        for runs in evidence.values()
        for run in runs
        if run.departures()
    ]


def _left_out(evidence: Evidence) -> str:
    lines = [f"- {line}" for line in left_out(evidence)]
    if not lines:
        return ""
    about = "Their configs (there) differ from the presets that they are named after (here)."
    return "\n".join(["## Runs excluded from every average", "", about, "", *lines])


def _runs(evidence: Evidence) -> str:
    """Every run, and where it came from."""
    rows = []
    for run in (run for runs in evidence.values() for run in runs):
        about = run.summary
        name = f"[{run.experiment}](results/{run.experiment}/seed{run.seed})"
        accuracies = [about.get(f"test_accuracy_{epoch}") for epoch in ("last", "best")]
        shown = ["diverged" if value is None else f"{value:.2f}" for value in accuracies]
        rows.append([name, str(run.seed), *shown, about["device"], about["torch"], _commits(about)])
    headings = ["run", "seed", "last epoch", "best test epoch", "device", "torch", "commit"]
    table = markdown_table(headings, rows) if rows else f"None: {NOT_RUN}."
    return f"## Every run\n\n{table}"


def _commits(summary: dict[str, Any]) -> str:
    """The run's, and before it those of the legs that were made from others."""
    legs = [*summary.get("resumed_from", []), summary]
    return ", then ".join(name for name, _ in itertools.groupby(map(_commit, legs)))


def _commit(leg: dict[str, Any]) -> str:
    if leg["commit"] is None:
        return "unknown"
    return f"`{leg['commit'][:8]}`{SURE_OF_COMMIT[leg['dirty']]}"


def figures(measured: Measured) -> list[Figure]:
    """What there are numbers for."""
    evidence, costs, studies = measured
    found = []
    for table in all_tables():
        if panels := _panels(table, evidence):
            caption = f"Test accuracy during training, one curve per seed ({table.title})"
            found.append(Figure(f"convergence_{table.key}", caption, convergence, panels))
    if lines := _iteration_lines(evidence):
        caption = "Accuracy at the best test epoch against routing iterations, CIFAR-10"
        found.append(Figure("iterations", caption, iterations, lines))
    if shown := cost_figure(costs):
        caption = f"Time and memory against routing iterations ({shown['title']})"
        found.append(Figure("cost", caption, cost, shown))
    return found + studies.figures()


def _panels(table: Table, evidence: Evidence) -> dict[str, dict[str, list[Any]]]:
    """Curves by panel and line; runs of another length have a panel of their own."""
    found: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for row in table.rows:
        runs = evidence.get(row.experiment, [])
        curves = [_curve(run) for run in counted(runs)]
        # one that diverged before its first evaluation has no curve
        curves += [[*_curve(run), DIVERGED] for run in diverged(runs) if run.metrics]
        if curves:
            panel = found.setdefault(row.panel, {}).setdefault(_length(row.experiment), {})
            panel[row.line] = curves
    return {
        f"{title}, {length}" if len(lengths) > 1 else title: lines
        for title, lengths in found.items()
        for length, lines in lengths.items()
    }


def _length(experiment: str) -> str:
    config = preset(experiment).config
    return f"{config.steps:,} steps" if config.steps else f"{config.epochs} epochs"


def _curve(run: Result) -> list[Any]:
    return [_column(run, "epoch"), _column(run, "test_accuracy")]


def _column(run: Result, name: str) -> list[float]:
    return [record[name] for record in run.metrics]


def _iteration_lines(evidence: Evidence) -> dict[str, dict[str, Any]]:
    lines = {routing: _iteration_line(name, evidence) for routing, name in ROUTINGS.items()}
    return lines if any(line["ours"] or line["diverged"] for line in lines.values()) else {}


def _iteration_line(name: str, evidence: Evidence) -> dict[str, Any]:
    """One routing's: the paper's points, our means, and a point at chance for a diverged seed."""
    presets = {count: preset(f"{name}_r{count}") for count in ITERATIONS}
    runs = {count: evidence.get(known.name, []) for count, known in presets.items()}
    bests = {count: spread(each, "test_accuracy_best") for count, each in runs.items()}
    chance = 100 / model_info(presets[1].config.model.model).task.num_classes
    return {
        "paper": [list(ITERATIONS), [known.paper_accuracy for known in presets.values()]],
        "ours": [(count, best.mean, best.std or 0.0) for count, best in bests.items() if best],
        "diverged": [(count, chance) for count, each in runs.items() for _ in diverged(each)],
    }


def write_report(measured: Measured, out: Path) -> list[Path]:
    """RESULTS.md, and figures under `out`; returns what was written."""
    drawn = figures(measured)
    written = [figure.write(out / FIGURES) for figure in drawn]
    path = out / "RESULTS.md"
    write_whole(path, results_text(measured, drawn).encode())
    return [path, *written]
