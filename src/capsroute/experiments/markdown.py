"""Tables and pictures as the report writes them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from capsroute.experiments.figures import Figure

FIGURES = Path("results/figures")
NUMBERS = (
    *("params", "paper", "ours", "last epoch", "best test epoch", "iterations", "seed"),
    *("batch", "ms", "÷ backbone", "peak MiB", "images/s"),
    *("poses made", "votes of an iteration", "peak", "peak, reference"),
    *("epochs", "held back", "as trained", "better statistics"),
)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rules = ["---:" if heading in NUMBERS else "---" for heading in headings]
    lines = [headings, rules, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def markdown_picture(figure: Figure) -> str:
    return f"![{figure.caption}]({(FIGURES / figure.name).as_posix()}.png)\n\n*{figure.caption}*"
