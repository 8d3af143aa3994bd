"""RESULTS.md and its figures, from the committed evidence and timings alone."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from capsroute.experiments.costs import (
    ROUTING,
    Costs,
    cost_figure,
    memory_table,
    read_costs,
    step_table,
)
from capsroute.experiments.evidence import Result, Spread, counted, read_all, spread
from capsroute.experiments.figures import Figure, convergence, cost, iterations, settling
from capsroute.experiments.movement import SHOWN, read_movements
from capsroute.experiments.presets import preset
from capsroute.experiments.sharpness import read_sharper
from capsroute.experiments.tables import ITERATIONS, ROUTINGS, Row, Table, all_tables
from capsroute.files import write_whole
from capsroute.models import create_model
from capsroute.train.config import ModelConfig

NOT_RUN = "not run yet"
NUMBERS = (
    *("params", "paper", "last epoch", "best test epoch", "iterations", "seed"),
    *("batch", "ms", "÷ backbone", "peak MiB", "images/s"),
    *("poses made", "votes of an iteration", "peak", "peak, reference"),
)
FIGURES = Path("results/figures")
TIMINGS = Path("benchmarks/gpu.csv")
Evidence = dict[str, list[Result]]

INTRODUCTION = """\
# Results

Written by `capsroute report` from the evidence in [results/](results); `capsroute report --check`
compares the two. Do not edit.

- Accuracies are percent of the test images, as mean ± standard deviation over n seeds.
- **Last epoch** chooses nothing. **Best test epoch** is the largest of a run's test accuracies: it
  chooses by the test images, and is here because the paper's numbers are that. The two are never
  mixed.
- **Against**: our mean of best test epochs less the paper's number, and ▼ where we fall short. The
  paper prints the best of several runs. The authors' own averages, not in the paper, are compared
  where they are known.
- Time is that of training, evaluations left out, on the device named.
"""


class Measured(NamedTuple):
    """All that the report is made from."""

    evidence: Evidence
    costs: Costs
    movements: Mapping[str, dict[str, Any]]
    sharper: Mapping[str, dict[str, Any]]

    @classmethod
    def read(cls, results: Path, timings: Path) -> "Measured":
        return cls(
            read_all(results), read_costs(timings), read_movements(results), read_sharper(results)
        )


def results_text(measured: Measured, figures: Sequence[Figure]) -> str:
    """RESULTS.md."""
    evidence, costs, movements, sharper = measured
    drawn = {figure.name: figure for figure in figures}
    sections = [INTRODUCTION, _progress(evidence)]
    for table in all_tables():
        section = [f"## {table.title}", _markdown(_headings(table), _rows(table, evidence))]
        names = [f"convergence_{table.key}", table.key]
        section += [_picture(drawn[name]) for name in names if name in drawn]
        sections.append("\n\n".join(section))
    sections += [_costs(costs, drawn), _memory(costs)]
    sections += [_settling(movements, drawn), _sharper(sharper)]
    sections += [_left_out(evidence), _runs(evidence)]
    return "\n\n".join(section.strip() for section in sections if section) + "\n"


def _costs(costs: Costs, drawn: Mapping[str, Figure]) -> str:
    headings, rows = step_table(costs)
    if not rows:
        return ""
    text = (
        "Whole training steps (batch, augmentation, forward, loss, backward, optimiser) and "
        "forward passes, compiled, each in one CUDA graph, bfloat16; medians of `capsroute bench`, "
        "all measured by `bash benchmarks/gpu.sh` (`benchmarks/gpu.csv`). ÷ backbone: how many "
        "times as long as the backbone alone with average pooling and a linear layer, in the same "
        "run."
    )
    figure = [_picture(drawn["cost"])] if "cost" in drawn else []
    return "\n\n".join(["## What it costs", *figure, text, _markdown(headings, rows)])


def _memory(costs: Costs) -> str:
    headings, rows = memory_table(costs)
    if not rows:
        return ""
    devices = {row["device"] for case, row in costs.rows.items() if case.mode == ROUTING}
    text = (
        f"Forward and backward pass through the capsule layers alone on {_listed(devices)}, "
        "bfloat16, nothing compiled, in MiB (`python benchmarks/memory.py`, "
        "`benchmarks/memory.csv`): the peak beside the poses that all iterations make and the "
        "votes that one iteration would store; reference stores them, as the formula reads. –: "
        "not measured, too large."
    )
    return "\n\n".join(["### Memory of the routing", text, _markdown(headings, rows)])


def _listed(names: Iterable[str]) -> str:
    return " and ".join(sorted(names))


def _settling(movements: Mapping[str, dict[str, Any]], drawn: Mapping[str, Figure]) -> str:
    if not movements:
        return ""
    rows = []
    for name, found in movements.items():
        moved, right = found["movement"][-1], found["accuracy"]
        trained = found["trained_with"] - 1
        cells = [name, f"{found['images']:,}", f"{found['unevenness'][-1][trained]:.3f}"]
        cells += [f"{right[index]:.1f}" for index in (trained, -1)]
        rows.append([*cells, *(f"{moved[t - 2]:.4f}" for t in SHOWN)])
    last = len(next(iter(movements.values()))["accuracy"])
    headings = ["model", "images", "unevenness", "accuracy as trained", f"after {last} iterations"]
    headings += [f"movement at {t}" for t in SHOWN]
    text = (
        "Trained models, routed for longer than they were trained with, every layer in each "
        "iteration: how far the poses of the class capsules still move, ‖pₜ − pₜ₋₁‖ / ‖pₜ‖, and "
        "the accuracy if routing stopped there (`tools/pose_movement.py`). Unevenness: the root of "
        "the mean of (M r − 1)² over the class layer's coefficients r in the last iteration that "
        "the model was trained with; 0 where all M parents get the same share of every child."
    )
    section = ["## Does the routing settle?", text, _markdown(headings, rows)]
    return "\n\n".join([*section, _picture(drawn["settling"])])


def _sharper(sharper: Mapping[str, dict[str, Any]]) -> str:
    if not sharper:
        return ""
    factors = next(iter(sharper.values()))["factors"]
    headings = ["model", "images", "transforms", "gains", *(f"× {factor:,}" for factor in factors)]
    rows = []
    for name, found in sharper.items():
        sizes = [", ".join(f"{x:.2g}" for x in found[key]) for key in ("transforms", "gains")]
        pairs = zip(found["accuracy"], found["unevenness"], strict=True)
        rows.append(
            [name, f"{found['images']:,}", *sizes, *(f"{a:.1f} ({u:.2g})" for a, u in pairs)]
        )
    text = (
        "Trained models, every agreement scaled by a factor (0: even shares), nothing else "
        "changed: the accuracy and, in brackets, the unevenness of the class layer "
        "(`tools/sharper_routing.py`). "
        "Transforms: how large those of each routed layer are beside their initial scale; gains: "
        "LayerNorm's, of the primary capsules and of each routed layer (root mean squares, 1 at "
        "first). A vote is as large as a transform times the gain below it."
    )
    return "\n\n".join(["## Would sharper routing help?", text, _markdown(headings, rows)])


def _progress(evidence: Evidence) -> str:
    printed = {row.experiment for table in all_tables()[:-1] for row in table.rows}
    ended = [name for name in printed if evidence.get(name)]
    verb = "has" if len(ended) == 1 else "have"
    return f"Of the paper's {len(printed)} experiments, {len(ended)} {verb} been run."


def _headings(table: Table) -> list[str]:
    ours = ["last epoch", "best test epoch", "against", "training"]
    return ["experiment", *table.headings, "params", "paper", *ours]


def _rows(table: Table, evidence: Evidence) -> list[list[str]]:
    return [_row(row, evidence.get(row.experiment, [])) for row in table.rows]


def _row(row: Row, runs: list[Result]) -> list[str]:
    chosen = preset(row.experiment)
    last, best = (spread(runs, f"test_accuracy_{epoch}") for epoch in ("last", "best"))
    paper = "–" if chosen.paper_accuracy is None else f"{chosen.paper_accuracy:.2f}"
    name = f"[{row.experiment}](results/{row.experiment})" if runs else row.experiment
    params = parameters(chosen.config.model)
    ours = [_number(last, runs), _number(best, runs)]
    against = _against(best, chosen.paper_accuracy, chosen.authors_average)
    return [name, *row.cells, f"{params:,}", paper, *ours, against, _time(counted(runs))]


@functools.cache
def parameters(model: ModelConfig) -> int:
    """Learned numbers of a model, which is built for its shapes alone."""
    with torch.device("meta"):
        built = create_model(model.model, **model.options())
    return sum(parameter.numel() for parameter in built.parameters())


def _number(value: Spread | None, runs: Iterable[Result]) -> str:
    diverged = sum(run.diverged for run in runs)
    failed = f"{diverged} diverged" if diverged else ""
    if value is None:
        return failed or NOT_RUN
    return f"{value} (n = {value.n}{', ' * bool(failed)}{failed})"


def _against(best: Spread | None, paper: float | None, average: float | None) -> str:
    if best is None:
        return "–"
    parts = [] if paper is None else [_difference(best.mean, paper)]
    if average is not None:
        parts.append(f"{_difference(best.mean, average)} (authors' average {average:.2f})")
    return "; ".join(parts) or "–"


def _difference(ours: float, theirs: float) -> str:
    difference = round(ours - theirs, 2)
    return f"▼ −{-difference:.2f}" if difference < 0 else f"+{difference:.2f}"


def _time(runs: list[Result]) -> str:
    minutes = spread(runs, "train_minutes")
    if minutes is None:
        return "–"
    devices = {run.summary["device"].removeprefix("NVIDIA ") for run in runs}
    return f"{minutes.mean:.1f} min on {_listed(devices)}"


def _picture(figure: Figure) -> str:
    return f"![{figure.caption}]({(FIGURES / figure.name).as_posix()}.png)\n\n*{figure.caption}*"


def _left_out(evidence: Evidence) -> str:
    """Runs whose config is not their preset's: shown, and in no average."""
    lines = [
        f"- `{run.experiment}`, seed {run.seed}: {'; '.join(run.departures())}"
        for runs in evidence.values()
        for run in runs
        if run.departures()
    ]
    if not lines:
        return ""
    about = "Their configs (there) depart from the presets of their names (here)."
    return "\n".join(["## Runs that are in no average", "", about, "", *lines])


def _runs(evidence: Evidence) -> str:
    """Every run, and where it came from."""
    rows = []
    for run in (run for runs in evidence.values() for run in runs):
        about = run.summary
        name = f"[{run.experiment}](results/{run.experiment}/seed{run.seed})"
        accuracies = [about.get(f"test_accuracy_{epoch}") for epoch in ("last", "best")]
        shown = ["diverged" if value is None else f"{value:.2f}" for value in accuracies]
        commit = f"`{str(about['commit'])[:8]}`{' with changes' if about['dirty'] else ''}"
        rows.append([name, str(run.seed), *shown, about["device"], about["torch"], commit])
    headings = ["run", "seed", "last epoch", "best test epoch", "device", "torch", "commit"]
    table = _markdown(headings, rows) if rows else f"None: {NOT_RUN}."
    return f"## Every run\n\n{table}"


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rules = ["---:" if heading in NUMBERS else "---" for heading in headings]
    lines = [headings, rules, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def figures(measured: Measured) -> list[Figure]:
    """What there are numbers for."""
    evidence, costs, movements, _ = measured
    found = []
    for table in all_tables():
        if panels := _panels(table, evidence):
            caption = f"Test accuracy while training, a curve for each seed ({table.title})"
            found.append(Figure(f"convergence_{table.key}", caption, convergence, panels))
    if lines := _iteration_lines(evidence):
        caption = "Accuracy at the best test epoch against routing iterations, CIFAR-10"
        found.append(Figure("iterations", caption, iterations, lines))
    if shown := cost_figure(costs):
        caption = f"Time and memory against routing iterations ({shown['title']})"
        found.append(Figure("cost", caption, cost, shown))
    if movements:
        lines = {
            name: {
                "initial_poses": each["initial_poses"],
                "class_movement": each["movement"][-1],
                "accuracy": each["accuracy"],
            }
            for name, each in movements.items()
        }
        caption = (
            "How far poses move, and the accuracy, when routing goes on for longer than trained"
        )
        found.append(Figure("settling", caption, settling, lines))
    return found


def _panels(table: Table, evidence: Evidence) -> dict[str, dict[str, list[Any]]]:
    panels: dict[str, dict[str, list[Any]]] = {}
    for row in table.rows:
        if runs := counted(evidence.get(row.experiment, [])):
            curves = [[_column(run, "epoch"), _column(run, "test_accuracy")] for run in runs]
            panels.setdefault(row.panel, {})[row.line] = curves
    return panels


def _column(run: Result, name: str) -> list[float]:
    return [record[name] for record in run.metrics]


def _iteration_lines(evidence: Evidence) -> dict[str, dict[str, Any]]:
    lines: dict[str, dict[str, Any]] = {}
    for routing, name in ROUTINGS.items():
        paper = [preset(f"{name}_r{count}").paper_accuracy for count in ITERATIONS]
        points = [
            (count, best.mean, best.std or 0.0)
            for count in ITERATIONS
            if (best := spread(evidence.get(f"{name}_r{count}", []), "test_accuracy_best"))
        ]
        lines[routing] = {"paper": [list(ITERATIONS), paper], "ours": points}
    return lines if any(line["ours"] for line in lines.values()) else {}


def write_report(results: Path, out: Path, timings: Path) -> list[Path]:
    """RESULTS.md, and figures under `out`; returns what was written."""
    measured = Measured.read(results, timings)
    drawn = figures(measured)
    written = [figure.write(out / FIGURES) for figure in drawn]
    path = out / "RESULTS.md"
    write_whole(path, results_text(measured, drawn).encode())
    return [path, *written]
