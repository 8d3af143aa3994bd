"""RESULTS.md and its figures, from the committed evidence and timings alone."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from capsroute.bench.rows import read_rows
from capsroute.experiments.evidence import Result, Spread, counted, read_all, spread
from capsroute.experiments.figures import Figure, convergence, cost, iterations, settling
from capsroute.experiments.movement import SHOWN, read_movements
from capsroute.experiments.presets import preset
from capsroute.experiments.tables import ITERATIONS, ROUTINGS, Row, Table, all_tables
from capsroute.files import write_whole
from capsroute.models import create_model
from capsroute.train.config import ModelConfig

NOT_RUN = "not run yet"
NUMBERS = ("params", "paper", "last epoch", "best test epoch", "iterations", "seed")
FIGURES = Path("results/figures")
TIMINGS = Path("benchmarks/gpu.csv")
BATCH = 128  # the paper's
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


def results_text(
    evidence: Evidence, figures: Sequence[Figure], movements: Mapping[str, dict[str, Any]]
) -> str:
    """RESULTS.md."""
    drawn = {figure.name: figure for figure in figures}
    sections = [INTRODUCTION, _progress(evidence)]
    for table in all_tables():
        section = [f"## {table.title}", _markdown(_headings(table), _rows(table, evidence))]
        names = [f"convergence_{table.key}", table.key] + ["cost"] * (table.key == "iterations")
        section += [_picture(drawn[name]) for name in names if name in drawn]
        sections.append("\n\n".join(section))
    sections += [_settling(movements, drawn), _left_out(evidence), _runs(evidence)]
    return "\n\n".join(section.strip() for section in sections if section) + "\n"


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
    devices = sorted({run.summary["device"].removeprefix("NVIDIA ") for run in runs})
    return f"{minutes.mean:.1f} min on {' and '.join(devices)}"


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


def figures(
    evidence: Evidence, timings: Path, movements: Mapping[str, dict[str, Any]]
) -> list[Figure]:
    """What there are numbers for."""
    found = []
    for table in all_tables():
        if panels := _panels(table, evidence):
            caption = f"Test accuracy while training, a curve for each seed ({table.title})"
            found.append(Figure(f"convergence_{table.key}", caption, convergence, panels))
    if lines := _iteration_lines(evidence):
        caption = "Accuracy at the best test epoch against routing iterations, CIFAR-10"
        found.append(Figure("iterations", caption, iterations, lines))
    rows = _timings(timings)
    if costs := _cost_panels(rows):
        devices = ", ".join(sorted({row["device"] for row in rows}))
        caption = f"Time and memory of {BATCH} images on {devices}, by routing iterations"
        found.append(Figure("cost", caption, cost, costs))
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


def _timings(path: Path) -> list[dict[str, str]]:
    """Rows of `capsroute bench` that the figure shows: the paper's batch, whole models, checked."""
    wanted = {"batch": str(BATCH), "part": "model", "checked": "True"}
    wanted |= dict.fromkeys(("bn_group", "backbone", "image_size"), "")
    rows = [row for row in read_rows(path) if wanted.items() <= row.items() and row["iterations"]]
    # rows of other code or machines are no points of the same line; the newest are the last
    place = ("device", "torch", "commit")
    rows = [row for row in rows if all(row[key] == rows[-1][key] for key in place)]
    return sorted(rows, key=lambda row: int(row["iterations"]))


def _cost_panels(timings: Sequence[dict[str, str]]) -> dict[str, dict[str, list[list[float]]]]:
    """Panels of lines; a model with one number of iterations has no line."""
    panels: dict[str, dict[str, list[list[float]]]] = {}
    quantities = {"median_ms": "ms", "peak_mib": "MiB"}
    modes = {"train": "a training step", "infer": "inference"}
    for mode, what in modes.items():
        for column, unit in quantities.items():
            lines: dict[str, list[list[float]]] = {}
            for row in timings:
                if row["mode"] == mode and row[column]:
                    label = f"{row['model']}, {row['impl']}, {row['dtype']}"
                    points = lines.setdefault(label, [[], []])
                    points[0].append(float(row["iterations"]))
                    points[1].append(float(row[column]))
            lines = {label: points for label, points in lines.items() if len(points[0]) > 1}
            if lines:
                panels[f"{what}, {unit}"] = lines
    return panels


def write_report(results: Path, out: Path, timings: Path) -> list[Path]:
    """RESULTS.md, and figures under `out`; returns what was written."""
    evidence, movements = read_all(results), read_movements(results)
    drawn = figures(evidence, timings, movements)
    written = [figure.write(out / FIGURES) for figure in drawn]
    path = out / "RESULTS.md"
    write_whole(path, results_text(evidence, drawn, movements).encode())
    return [path, *written]
