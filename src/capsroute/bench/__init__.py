"""How long models take and what they hold: what `capsroute bench` runs."""

from capsroute.bench.cases import Case, plan_cases
from capsroute.bench.check import agrees_with_reference
from capsroute.bench.rows import COLUMNS, Row, append_row, read_rows
from capsroute.bench.timing import Timing, time_case

__all__ = [
    "COLUMNS",
    "Case",
    "Row",
    "Timing",
    "agrees_with_reference",
    "append_row",
    "plan_cases",
    "read_rows",
    "time_case",
]
