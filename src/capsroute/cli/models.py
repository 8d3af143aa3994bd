"""`capsroute models`"""

from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import capsroute
from capsroute.cli.errors import UsageError
from capsroute.cli.parsing import parse
from capsroute.models import model_info
from capsroute.models.base import as_size
from capsroute.models.layer_table import layer_rows
from capsroute.models.pretrained import list_pretrained
from capsroute.nearest import nearest


@dataclass(frozen=True)
class Options:
    """List the models, or show one model's layers, as in the paper's appendix.

    For example `capsroute models 'inverted_*'`, `capsroute models inverted_resnet_cifar10`.
    """

    pattern: Annotated[str, tyro.conf.Positional] = "*"
    """A model's name, or a shell pattern that matches several."""


def main(arguments: list[str]) -> None:
    pattern = parse(Options, "models", arguments).pattern
    names = capsroute.list_models(pattern)
    if not names:
        raise UsageError(f"no model matches {pattern!r}{nearest(pattern, capsroute.list_models())}")
    Console().print(_layer_table(pattern) if names == [pattern] else _model_table(names))


def _model_table(names: list[str]) -> Table:
    """Narrow enough for 80 columns; the dataset is in the name, and in the model's own table."""
    table = Table(caption=SHIPPED, caption_justify="left", box=box.SIMPLE_HEAD, **NARROW)
    table.add_column("model", no_wrap=True)
    for heading in ("parameters", "test %\nin paper", "itera-\ntions", "input"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("weights", no_wrap=True)
    shipped = list_pretrained()
    for name in names:
        info = model_info(name)
        height, width = as_size(info.task.image_size)
        table.add_row(
            name,
            f"{info.parameters:,}",
            "–" if info.paper_accuracy is None else f"{info.paper_accuracy:.2f}",
            str(info.task.iterations or "–"),
            f"{height}x{width}x{info.task.in_channels}",
            "yes" if name in shipped else "–",
        )
    return table


SHIPPED = "weights: inside the package; `capsroute predict MODEL IMAGES` needs no more"
NARROW: Any = {"show_edge": False, "pad_edge": False, "collapse_padding": True}


def _layer_table(name: str) -> Table:
    info = model_info(name)
    weights = "weights inside the package" if name in list_pretrained() else "no weights"
    table = Table("operation", title=f"{name}: {info.summary}", title_justify="left")
    table.caption, table.caption_justify = f"dataset: {info.dataset}; {weights}", "left"
    table.add_column("output size", justify="right")
    table.add_column("parameters", justify="right")
    rows = layer_rows(capsroute.create_model(name))
    for row in rows:
        table.add_row(row.operation, row.output, f"{row.parameters:,}", end_section=True)
    table.add_row("total", "", f"{sum(row.parameters for row in rows):,}")
    return table
