"""Can every committed number be traced? Each problem is one line; no lines, no problems."""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from capsroute.experiments.cards import check_cards
from capsroute.experiments.cells import parameters
from capsroute.experiments.evidence import (
    DIVERGED,
    Result,
    find_evidence,
    read_evidence,
)
from capsroute.experiments.figures import drawn_from
from capsroute.experiments.markdown import FIGURES
from capsroute.experiments.markers import check_markers, marked_pages
from capsroute.experiments.origins import (
    ORIGIN,
    check_commits,
    check_origin,
    check_studies,
    check_tuning,
    named_commits,
)
from capsroute.experiments.presets import list_experiments
from capsroute.experiments.report import Measured, figures, results_text
from capsroute.models import model_info

NAMED = ("experiment", "seed", *ORIGIN)
"""What every run must name; the rest of a summary may be unknown."""
TIMES = ("seconds", "images_per_second")
"""Of metrics: what differs when the same run is made twice."""
MEASURED = {
    "epochs": "epoch",
    "steps": "step",
    "test_accuracy_last": "test_accuracy",
    "val_accuracy": "val_accuracy",
    "train_seconds": "seconds",
    "images_per_second": "images_per_second",
}
"""Fields of a summary, and those of the last line of metrics that they repeat."""

WEIGHTS = Path("src/capsroute/models/files")
"""Those that ship, and their cards, in a checkout."""


def check(results: Path, root: Path, timings: Path) -> list[str]:
    """Problems of the evidence; or else of what `root` holds.

    That is RESULTS.md, figures, marked numbers in pages, and cards of weights that ship.
    """
    problems = [line for folder in find_evidence(results) for line in _check_folder(folder)]
    problems += [*check_studies(results), *check_tuning(results)]
    if problems:  # nothing can be made of broken evidence
        return problems
    measured = Measured.read(results, timings)
    runs = chain.from_iterable(measured.evidence.values())
    return [
        *check_commits(named_commits(runs, results, timings.parent), results.parent),
        *(line for runs in measured.evidence.values() for line in _check_copies(runs)),
        *_check_report(measured, root),
        *(line for page in marked_pages(root) for line in check_markers(page, measured, results)),
        *check_cards(root / WEIGHTS, results),
    ]


def _check_folder(folder: Path) -> list[str]:
    try:
        result = read_evidence(folder)
        problems = _check_names(result) + ([] if result.diverged else _check_summary(result))
    except KeyError as error:
        return [f"{folder}: there is no field {error}"]
    except (ValueError, OSError) as error:
        return [str(error)]
    known = {"config.json", "metrics.jsonl", DIVERGED if result.diverged else "summary.json"}
    problems += [
        f"{path.name} is no part of the evidence"
        for path in sorted(folder.iterdir())
        if path.name not in known
    ]
    return [f"{folder}: {problem}" for problem in problems]


def _check_names(result: Result) -> list[str]:
    summary, config = result.summary, result.config
    problems = check_origin(summary, NAMED)
    legs = summary.get("resumed_from", [])
    if not isinstance(legs, list) or not all(isinstance(leg, dict) for leg in legs):
        problems.append(f"`resumed_from` must be a list of JSON objects, got {legs!r}")
        legs = []
    for number, leg in enumerate(legs, 1):
        found = check_origin(leg)
        problems += [f"leg {number} of a resumed run: {problem}" for problem in found]
    if result.experiment not in list_experiments():
        problems.append(f"no preset is called {result.experiment}, so nobody can run it again")
    for name, folder, written in (
        ("experiment", result.experiment, {config.experiment, summary.get("experiment")}),
        ("seed", result.seed, {config.seed, summary.get("seed")}),
    ):
        if written != {folder}:
            problems.append(f"`{name}` must be {folder!r}, the folder's, in config and summary")
    return problems


def _check_copies(runs: Sequence[Result]) -> list[str]:
    """Two seeds of an experiment never agree; those that diverged may have no metrics to tell."""
    problems: list[str] = []
    first: dict[str, Path] = {}
    for run in runs:
        curve = json.dumps([[v for k, v in r.items() if k not in TIMES] for r in run.metrics])
        original = first.setdefault(curve, run.folder)
        if original != run.folder and not run.diverged:
            problems.append(f"{run.folder}: its metrics are those of {original}, times apart")
    return problems


def _check_summary(result: Result) -> list[str]:
    """The summary is what metrics.jsonl says, and the run went to its end."""
    summary, config, metrics = result.summary, result.config, result.metrics
    last = metrics[-1]
    expected = {field: last[name] for field, name in MEASURED.items()}
    expected["test_accuracy_best"] = max(record["test_accuracy"] for record in metrics)
    expected["params"] = parameters(config.model)
    expected |= {"model": config.model.model, "dataset": config.data.data, "dtype": config.dtype}
    expected["iterations"] = (
        config.model.iterations or model_info(config.model.model).task.iterations
    )
    problems = [
        f"`{field}` must be {value!r}, got {summary.get(field)!r}"
        for field, value in expected.items()
        if summary.get(field) != value
    ]
    every = config.eval_every or round(last["step"] / (last["epoch"] or 1))
    if [record["step"] for record in metrics] != [*range(every, last["step"], every), last["step"]]:
        problems.append(
            f"metrics.jsonl must hold a line for every {every} steps and the last, in order, "
            "none twice"
        )
    reached, length = (
        (last["step"], config.steps) if config.steps else (last["epoch"], config.epochs)
    )
    if reached != length:
        problems.append(
            f"metrics.jsonl must end at {length}, the run's length, and not at {reached}"
        )
    return problems


def _check_report(measured: Measured, root: Path) -> list[str]:
    again = "; run `capsroute report`"
    drawn = figures(measured)
    page = root / "RESULTS.md"
    text = results_text(measured, drawn)
    problems = []
    if not page.is_file() or page.read_text() != text:
        problems.append(f"{page} is not what the results say{again}")
    wanted = {root / FIGURES / f"{figure.name}.png": figure.digest for figure in drawn}
    present = {path: drawn_from(path) for path in (root / FIGURES).glob("*")}
    for path in sorted(wanted.keys() | present.keys()):
        if wanted.get(path) != present.get(path):
            problems.append(f"{path} is not what the results say{again}")
    return problems
