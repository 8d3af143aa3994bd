"""Can every committed number be traced? Each problem is one line; no lines, no problems."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capsroute.experiments.cards import check_cards
from capsroute.experiments.cells import parameters
from capsroute.experiments.costs import look_up
from capsroute.experiments.evidence import (
    DIVERGED,
    Result,
    diverged,
    find_evidence,
    read_evidence,
    spread,
)
from capsroute.experiments.figures import drawn_from
from capsroute.experiments.markdown import FIGURES
from capsroute.experiments.presets import list_experiments
from capsroute.experiments.report import Measured, figures, results_text
from capsroute.models import model_info

ORIGIN = ("device", "python", "torch", "capsroute", "commit")
NAMED = ("experiment", "seed", *ORIGIN)
"""What every result must name; the rest of a summary may be unknown."""
TIMES = ("seconds", "images_per_second")
"""Of metrics: what differs when the same run is made twice."""
MEASURED = {
    "epochs": "epoch",
    "steps": "step",
    "test_accuracy_last": "test_accuracy",
    "val_accuracy": "val_accuracy",
    "train_seconds": "seconds",
}
"""Fields of a summary, and those of the last line of metrics that they repeat."""

NUMBER = r" -->[*\s]*(?P<number>\d[\d,]*(?:\.\d+)?(?:\smillion)?)"
MARKERS = {
    "results": re.compile(
        r"<!-- results: (?P<name>(?P<subject>\S+) (?P<field>[\w.]+) "
        r"(?P<statistic>mean|std|n|seed\d+|percent|value))" + NUMBER
    ),
    "bench": re.compile(
        r"<!-- bench: (?P<name>(?P<subject>[\w:/+@]+) (?P<field>[\w.]+(?:@\d+)?) "
        r"(?P<statistic>median_ms|images_per_s|(?:peak|poses|votes)_mib|÷[\w:/]+|value))" + NUMBER
    ),
}
"""Before a number in a page: which result it is.

`results: EXPERIMENT FIELD` is of the seeds named, `results: FOLDER/FILE a.b.2 value` a number of
another file of results/, `percent` a hundred times it; `bench:` see `Costs.number`.
"""
EXAMPLES = {
    "results": "`<!-- results: inverted_resnet_cifar10_r2 test_accuracy_last mean -->94.6`",
    "bench": "`<!-- bench: inverted_resnet_cifar10:2 train ÷backbone -->1.21`",
}
WEIGHTS = Path("src/capsroute/models/files")
"""Those that ship, and their cards, in a checkout."""


def check(results: Path, root: Path, timings: Path) -> list[str]:
    """Problems of the evidence; or else of what `root` holds.

    That is RESULTS.md, figures, marked numbers in pages, and cards of weights that ship.
    """
    problems = [line for folder in find_evidence(results) for line in _check_folder(folder)]
    if problems:  # nothing can be made of broken evidence
        return problems
    measured = Measured.read(results, timings)
    return [
        *(line for runs in measured.evidence.values() for line in _check_copies(runs)),
        *_check_report(measured, root),
        *(line for page in _pages(root) for line in check_markers(page, measured, results)),
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
    problems = _check_origin(summary, NAMED)
    for number, leg in enumerate(summary.get("resumed_from", []), 1):
        found = _check_origin(leg, ORIGIN)
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


def _check_origin(record: dict[str, Any], names: Sequence[str]) -> list[str]:
    problems = [f"`{name}` is unknown" for name in names if record.get(name) is None]
    if record.get("dirty"):
        problems.append("it was made from a changed tree (`dirty`), so nobody can run it again")
    commit = record.get("commit")
    if commit is not None and not re.fullmatch(r"[0-9a-f]{40}", str(commit)):
        problems.append(f"`commit` must be 40 hex digits, got {commit!r}")
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


def _pages(root: Path) -> list[Path]:
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def check_markers(page: Path, measured: Measured, results: Path) -> list[str]:
    """Numbers after a marker are those that were measured, rounded as they are written."""
    text = page.read_text()
    problems = []
    for start in re.finditer(r"(?<!`)<!-- (results|bench):", text):  # in backticks: an example
        marker = MARKERS[start[1]].match(text, start.start())
        line = text.count("\n", 0, start.start()) + 1
        if marker is None:
            problems.append(f"{page}, line {line}: a marker must be {EXAMPLES[start[1]]}")
            continue
        before = text[: start.start()].rpartition("\n")[2]
        if re.fullmatch(r"(?:[\s>*+-]|\d+\.)*", before):
            # Markdown takes what begins with a comment for HTML, and ends the paragraph
            problems.append(f"{page}, line {line}: a marker must not begin a line or an item")
        names = marker["subject"], marker["field"], marker["statistic"]
        try:
            value = (
                measured.costs.number(*names)
                if start[1] == "bench"
                else _result(*names, measured=measured, results=results)
            )
            problem = _rounded_otherwise(value, marker["number"])
        except ValueError as error:
            problem = str(error)
        if problem:
            problems.append(f"{page}: {marker['name']}: {problem}")
    return problems


def _result(
    subject: str, field: str, statistic: str, *, measured: Measured, results: Path
) -> float:
    """A number of results/, or a ValueError of one line."""
    if statistic in ("percent", "value"):
        return (100 if statistic == "percent" else 1) * look_up(results / f"{subject}.json", field)
    runs = measured.evidence.get(subject, [])
    if statistic.startswith("seed"):
        runs = [run for run in runs if run.folder.name == statistic]
        statistic = "mean"
    elif failed := diverged(runs):
        seeds = " ".join(str(run.seed) for run in failed)
        raise ValueError(f"seed {seeds} diverged, so name the others one by one")
    try:
        value = getattr(spread(runs, field), statistic, None)
    except KeyError:
        raise ValueError(f"a summary has no field `{field}`") from None
    if value is None:
        raise ValueError("there are no such results")
    return value


def _rounded_otherwise(value: float, number: str) -> str | None:
    written, *millions = number.replace(",", "").split()
    decimals = len(written.partition(".")[2])
    rounded = f"{value / 1e6 if millions else value:.{decimals}f}"
    return None if rounded == written else f"{rounded} in the results, {written} in the text"
