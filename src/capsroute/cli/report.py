"""`capsroute report`"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from capsroute.cli.parsing import FLAGS, optional, parse
from capsroute.experiments.check import check
from capsroute.experiments.evidence import find_evidence
from capsroute.experiments.markers import fill_markers, marked_pages
from capsroute.experiments.report import TIMINGS, Measured, left_out, write_report


@dataclass(frozen=True)
class Options:
    """Make RESULTS.md and its figures from results and benchmarks, or check that they agree.

    Numbers that pages mark with an HTML comment (see CONTRIBUTING.md) are written anew, and each
    change is told, since the words around it may have to change, too.

    With --check, nothing is written. Each result must name its config, seed, device, versions and
    commit; its metrics must be complete, not another seed's, and match its summary. Whatever else
    the folder of results holds must name where and by which commit it was measured. In a checkout
    with its whole history, every commit must exist. RESULTS.md, the figures and the marked numbers
    must match the results. The exit status is 1 if anything is wrong.

    For example `capsroute report`, `capsroute report --check`.
    """

    check: bool = False
    """Check only; write nothing."""
    results: Path = Path("results")
    """Folder of the evidence, which `capsroute reproduce` fills."""
    out: Annotated[Path | None, optional("DIR")] = None
    """Folder for RESULTS.md and results/figures. (default: the one that holds --results)"""


def main(arguments: list[str]) -> None:
    options = parse(Options, "report", arguments, config=(*FLAGS, tyro.conf.OmitArgPrefixes))
    results = options.results.expanduser()
    root = (options.out or results.parent).expanduser()
    if options.check:
        _check(results, root)
        return
    root.mkdir(parents=True, exist_ok=True)
    measured = Measured.read(results, results.parent / TIMINGS)
    written = write_report(measured, root)
    print(f"wrote {', '.join(map(str, written))}")
    for page in marked_pages(root):
        for change in fill_markers(page, measured, results):
            print(change)
    for line in left_out(measured.evidence):
        print(f"in no average: {line}", file=sys.stderr)
    if not (results.parent / TIMINGS).is_file():
        print(f"no {results.parent / TIMINGS}: the figure of time and memory is left out")


def _check(results: Path, root: Path) -> None:
    problems = check(results, root, results.parent / TIMINGS)
    for problem in problems:
        print(problem)
    if problems:
        sys.exit(1)
    count = len(find_evidence(results))
    print(f"{'1 result' if count == 1 else f'{count} results'}, all traced")
