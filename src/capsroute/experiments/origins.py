"""Does evidence say where it was made, and by code that anybody can get?"""

import csv
import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from capsroute.experiments.evidence import Result
from capsroute.experiments.studies import OLD_TUNING_COLUMNS, TUNING, TUNING_COLUMNS
from capsroute.train.provenance import run_git

ORIGIN = ("device", "python", "torch", "capsroute", "commit")
COMMIT = re.compile(r"[0-9a-f]{40}")
CODE = "src/capsroute/__init__.py"
"""Tracked by a repository of ours, and not by another one that results may lie in."""
NO_MEASUREMENT = "unfinished/*.config.json"
"""Of results/: how a run that was cut was configured."""
Named = tuple[Path, str]  # a file, and a commit that it names


def check_origin(record: dict[str, Any], names: Sequence[str] = ORIGIN) -> list[str]:
    """Problems of a result that must name where it was made."""
    problems = [f"`{name}` is unknown" for name in names if record.get(name) is None]
    if "dirty" not in record:
        problems.append("it does not say whether the tree was changed (`dirty`)")
    elif record["dirty"]:
        problems.append("it was made from a changed tree (`dirty`), so nobody can run it again")
    commit = record.get("commit")
    if commit is not None and not COMMIT.fullmatch(str(commit)):
        problems.append(f"`commit` must be 40 hex digits, got {commit!r}")
    return problems


def check_studies(results: Path) -> list[str]:
    """Problems of the files that tools wrote beside the folders of runs."""
    problems = []
    for path in _studies(results):
        try:
            found = check_origin(_read_json(path), ("command", *ORIGIN))
        except ValueError as error:
            problems.append(str(error))
            continue
        problems += [f"{path}: {problem}" for problem in found]
    return problems


def _studies(results: Path) -> list[Path]:
    found = [*results.glob("*.json"), *results.glob("*/*.json")]
    return sorted(path for path in found if not path.match(NO_MEASUREMENT))


def check_tuning(results: Path) -> list[str]:
    """Problems of the files of tools/tune_recipe.py; those from before its newer columns pass."""
    problems = []
    for path in sorted((results / TUNING).glob("*.csv")):
        columns, rows = _read_csv(path)
        if columns not in (TUNING_COLUMNS, OLD_TUNING_COLUMNS):
            problems.append(f"{path} must have the columns that tools/tune_recipe.py writes")
            continue
        for line, row in enumerate(rows, 2):
            problems += [f"{path}, line {line}: {problem}" for problem in _check_row(row)]
    return problems


def _check_row(row: dict[str, Any]) -> list[str]:
    if None in row or None in row.values():
        return ["there must be a cell for each column"]
    known = {name: cell for name, cell in row.items() if cell}
    known["dirty"] = known.get("dirty") == "True"
    problems = check_origin(known, ("device", "commit"))
    try:
        float(known.get("val_accuracy", 0))  # none if the run diverged
    except ValueError:
        problems.append(f"`val_accuracy` must be a number, got {known['val_accuracy']!r}")
    return problems


def named_commits(runs: Iterable[Result], results: Path, benchmarks: Path) -> Iterator[Named]:
    """Commits named by runs, by the files beside them, and by benchmarks."""
    records: list[tuple[Path, dict[str, Any]]] = [(run.folder, run.summary) for run in runs]
    for path in [*_studies(results), *benchmarks.rglob("*.json")]:
        records.append((path, _read_json(path)))
    for path in [*(results / TUNING).glob("*.csv"), *benchmarks.rglob("*.csv")]:
        records += [(path, row) for row in _read_csv(path)[1]]
    for path, record in records:
        for leg in (record, *(record.get("resumed_from") or [])):
            if leg.get("commit"):
                yield path, str(leg["commit"])


def check_commits(named: Iterable[Named], root: Path) -> list[str]:
    """Problems of commits that the repository of `root` does not have.

    There are none where nobody can tell: without git, or with a part of the history alone.
    """
    files: dict[str, set[Path]] = {}
    for path, commit in named:
        files.setdefault(commit, set()).add(path)
    try:
        run_git(root, "ls-files", "--error-unmatch", CODE)
        if run_git(root, "rev-parse", "--is-shallow-repository") != "false":
            return []
        known = _known(files, root)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [
        f"{path}: there is no commit {commit} in this repository, so nobody can run it again"
        for commit in files
        if commit not in known
        for path in sorted(files[commit])
    ]


def _known(commits: Iterable[str], root: Path) -> set[str]:
    """Those that exist, whether or not a branch leads to them."""
    asked = "".join(f"{commit}\n" for commit in commits if COMMIT.fullmatch(commit))
    form = "--batch-check=%(objecttype) %(objectname)"
    answers = run_git(root, "cat-file", form, given=asked).splitlines()
    return {answer.removeprefix("commit ") for answer in answers if answer.startswith("commit ")}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} must be JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path} must be a JSON object, got {type(record).__name__}")
    return record


def _read_csv(path: Path) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        return tuple(reader.fieldnames or ()), list(reader)
