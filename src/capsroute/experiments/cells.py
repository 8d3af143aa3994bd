"""An experiment's row in a table of the report: the paper's numbers beside those of its runs."""

import functools

import torch

from capsroute.experiments.evidence import Result, Spread, counted, diverged, spread
from capsroute.experiments.presets import Preset, preset
from capsroute.experiments.tables import Row, Table
from capsroute.models import create_model
from capsroute.models.base import count_parameters
from capsroute.train.config import ModelConfig

NOT_RUN = "not run yet"


def row_headings(table: Table) -> list[str]:
    ours = ["last epoch", "best test epoch", "against", "training"]
    return ["experiment", *table.headings, "params", "paper", *ours]


def experiment_row(row: Row, runs: list[Result]) -> list[str]:
    """Cells under `row_headings`."""
    chosen = preset(row.experiment)
    paper = "–" if chosen.paper_accuracy is None else f"{chosen.paper_accuracy:.2f}"
    name = f"[{row.experiment}](results/{row.experiment})" if runs else row.experiment
    params = parameters(chosen.config.model)
    ours = [_number(runs, f"test_accuracy_{epoch}") for epoch in ("last", "best")]
    against = _against(runs, chosen)
    return [name, *row.cells, f"{params:,}", paper, *ours, against, _time(counted(runs))]


@functools.cache
def parameters(model: ModelConfig) -> int:
    """Learned numbers of a model, which is built for its shapes alone."""
    with torch.device("meta"):
        built = create_model(model.model, **model.options())
    return count_parameters(built)


def _number(runs: list[Result], field: str) -> str:
    value, failed = spread(runs, field), len(diverged(runs))
    if value is None:
        return f"diverged (n = {failed})" if failed else NOT_RUN
    return f"{value} (n = {value.n}{f', {failed} diverged' if failed else ''})"


def _against(runs: list[Result], chosen: Preset) -> str:
    """No judgement where a seed diverged: the others' mean is not the recipe's."""
    best = spread(runs, "test_accuracy_best")
    if best is None or diverged(runs):
        return "–"
    paper, average = chosen.paper_accuracy, chosen.authors_average
    parts = [] if paper is None else [_difference(best, paper)]
    if average is not None:
        parts.append(f"{_difference(best, average)} (authors' average {average:.2f})")
    return "; ".join(parts) or "–"


def _difference(ours: Spread, theirs: float) -> str:
    difference = round(ours.mean - theirs, 2)
    return f"▼ −{-difference:.2f}" if difference < 0 else f"+{difference:.2f}"


def _time(runs: list[Result]) -> str:
    minutes = spread(runs, "train_minutes")
    if minutes is None:
        return "–"
    devices = {run.summary["device"].removeprefix("NVIDIA ") for run in runs}
    return f"{minutes.mean:.1f} min on {' and '.join(sorted(devices))}"
