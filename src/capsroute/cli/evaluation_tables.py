"""An evaluation as `capsroute eval` prints it."""

from typing import Any

from rich.console import Console
from rich.table import Table

from capsroute.train.evaluation import CountRow, Evaluation, Point

HEADINGS = {"rotation": "rotated by °", "shift": "shifted by px"}


def print_tables(report: dict[str, Any], evaluation: Evaluation, points: list[Point]) -> None:
    """What was measured; then tables by number of labels, by class, by rotation and by shift."""
    iterations = report["iterations"]
    plural = "" if iterations == 1 else "s"
    routing = f", {iterations} routing iteration{plural}" if iterations else ""
    print(f"{report['model']}{routing}, on {evaluation.images:,} {report['split']} images")
    what = "every label of an image right" if evaluation.multilabel else "accuracy"
    print(f"{what}: {evaluation.accuracy:.2f} %")
    tables = [_by_count(evaluation.counts)] if evaluation.counts else []
    tables.append(_by_class(report["classes"]))
    for kind, heading in HEADINGS.items():
        chosen = [point for point in points if point.kind == kind]
        tables += [_by_value(heading, chosen)] if chosen else []
    console = Console(highlight=False)
    for table in tables:
        console.print(table)


def _by_count(rows: tuple[CountRow, ...]) -> Table:
    table = _table("labels", "images", "accuracy %")
    for labels, images, accuracy in rows:
        table.add_row(str(labels), f"{images:,}", f"{accuracy:.2f}")
    return table


def _by_class(rows: list[dict[str, Any]]) -> Table:
    table = _table("class", "images", "recall %", "precision %")
    for row in rows:
        shares = [row["recall"], row["precision"]]
        cells = ["–" if share is None else f"{share:.2f}" for share in shares]
        table.add_row(row["name"].replace("[", r"\["), f"{row['support']:,}", *cells)
    return table


def _by_value(heading: str, points: list[Point]) -> Table:
    table = _table(heading, "accuracy %")
    for point in points:
        table.add_row(f"{point.value:g}", f"{point.accuracy:.2f}")
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table
