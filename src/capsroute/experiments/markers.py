"""Numbers that pages take from results/ and benchmarks/, each after a comment that names it."""

import re
from collections.abc import Iterator
from pathlib import Path

from capsroute.experiments.costs import look_up
from capsroute.experiments.evidence import diverged, spread
from capsroute.experiments.report import Measured
from capsroute.files import write_whole

NUMBER = r" -->[*\s]*(?P<number>\d[\d,]*(?:\.\d+)?(?:\smillion)?)"
MARKERS = {
    "results": re.compile(
        r"<!-- results: (?P<name>(?P<subject>\S+) (?P<field>[\w. ]+) "
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


def marked_pages(root: Path) -> list[Path]:
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def check_markers(page: Path, measured: Measured, results: Path) -> list[str]:
    """Numbers after a marker are those that were measured, rounded as they are written."""
    text = _text(page)
    problems = []
    for start, kind, marker in _markers(text):
        line = text.count("\n", 0, start) + 1
        if marker is None:
            problems.append(f"{page}, line {line}: a marker must be {EXAMPLES[kind]}")
            continue
        before = text[:start].rpartition("\n")[2]
        if re.fullmatch(r"(?:[\s>*+-]|\d+\.)*", before):
            # Markdown takes what begins with a comment for HTML, and ends the paragraph
            problems.append(f"{page}, line {line}: a marker must not begin a line or an item")
        try:
            number = _as_written(_value(marker, measured, results), marker["number"])
        except ValueError as error:
            problems.append(f"{page}: {marker['name']}: {error}")
            continue
        if number != marker["number"]:
            both = f"{number} in the results, {marker['number']} in the text"
            problems.append(f"{page}: {marker['name']}: {both}")
    return problems


def fill_markers(page: Path, measured: Measured, results: Path) -> list[str]:
    """Write into a page what was measured, rounded as it was written; a line for each change.

    Markers that `check_markers` finds wrong keep their numbers.
    """
    text = _text(page)
    changes = []
    for _, _, marker in reversed(list(_markers(text))):
        try:
            number = marker and _as_written(_value(marker, measured, results), marker["number"])
        except ValueError:
            continue
        if marker and number != marker["number"]:
            text = text[: marker.start("number")] + f"{number}" + text[marker.end("number") :]
            changes.append(f"{page}: {marker['name']}: {marker['number']} → {number}")
    if changes:
        write_whole(page, text.encode())
    return changes[::-1]


def _text(page: Path) -> str:
    try:
        return page.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{page} must be text in UTF-8: {error}") from None


def _markers(text: str) -> Iterator[tuple[int, str, re.Match[str] | None]]:
    """Where each begins, its kind, and its parts if it has them all."""
    for start in re.finditer(r"(?<!`)<!-- (results|bench):", text):  # in backticks: an example
        yield start.start(), start[1], MARKERS[start[1]].match(text, start.start())


def _value(marker: re.Match[str], measured: Measured, results: Path) -> float:
    """What was measured, or a ValueError of one line."""
    names = marker["subject"], marker["field"], marker["statistic"]
    if marker.re is MARKERS["bench"]:
        return measured.costs.number(*names)
    return _result(*names, measured=measured, results=results)


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


def _as_written(value: float, number: str) -> str:
    """Rounded, and with separators, as another number is."""
    digits, *millions = number.split()
    whole, _, decimals = digits.partition(".")
    separated = "," in whole or len(whole) < 4
    rounded = f"{value / 1e6 if millions else value:{',' if separated else ''}.{len(decimals)}f}"
    return " ".join([rounded, *millions])
