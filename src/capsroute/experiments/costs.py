"""What models cost: the rows of `capsroute bench` and benchmarks/memory.py, case by case."""

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from capsroute.bench.cases import Case, plan_cases
from capsroute.bench.rows import own_size, read_rows

Row = dict[str, str]
Place = tuple[str | None, ...]  # device, torch and commit
BATCH = 128  # the paper's
ROUTING = "routing"
"""The mode of memory.csv's rows: forward and backward pass through the capsule layers alone."""
USUAL = {"dtype": "bfloat16", "compiled": "True", "checked": "True", "bn_group": ""}
"""Of the rows that are shown. Their images have the model's own size, but on backbones of timm."""
MEMORY_COLUMNS = (
    *("model", "batch", "iterations", "impl"),
    *("peak_mib", "poses_mib", "weights_mib", "votes_mib", "device", "torch", "commit", "dirty"),
)
"""Of memory.csv; a file from before its rows named a commit lacks the last two."""
MODES = {"train": "a training step", "infer": "inference"}
OVERSTATED = frozenset(
    {
        "3caf1787885f8def3c8668069df13a36a99f7453",
        "e4c5d717bf92068495fc9f90beb69c5fab1882c3",
        "1ff01a4697909fa5f84a577b4f43710754fcd5b2",
    }
)
"""Commits of gpu.csv from before 20b715f. A case's peak memory included what cuBLAS had kept of the
cases before it in the process, 64 MiB of each: up to 0.7 GiB. Their rows are shown without it."""


@dataclass(frozen=True)
class Costs:
    """The newest row of every case, and what else was measured at each place, newest last."""

    folder: Path
    rows: Mapping[Case, Row]
    places: dict[Place, dict[Case, Row]]

    @classmethod
    def of(cls, folder: Path, rows: Iterable[Row]) -> "Costs":
        newest: dict[Case, Row] = {}
        places: dict[Place, dict[Case, Row]] = {}
        for row in rows:
            place = _place(row)  # with each row it moves to the end
            places[place] = {**places.pop(place, {}), _case(row): row}
            newest[_case(row)] = row
        return cls(folder, newest, places)

    def number(self, subject: str, what: str, quantity: str) -> float:
        """A number that a page marks, or a ValueError of one line.

        Args:
            subject: `NAME[:ITERATIONS]`, as `capsroute bench` takes it, with `/backbone` or
                `/reference` after it if that is meant, or `+timm/NAME@SIZE` for images of another
                size on a backbone of timm; or a JSON file of the folder.
            what: `train`, `infer` or `routing`, with `@BATCH` after it unless it is 128; or the
                number's place in the JSON file, such as `a.b.2`.
            quantity: a column; `÷backbone` or `÷SUBJECT`, how many times as long it takes; or
                `value`, of a JSON file.
        """
        if quantity == "value":
            return look_up(self.folder / f"{subject}.json", what)
        mode, _, batch = what.partition("@")
        case = _named(subject, mode, int(batch or BATCH))
        base = quantity.removeprefix("÷")
        if base == quantity:
            return self.column(case, quantity)
        return self.ratio(
            case, case.alone if base == "backbone" else _named(base, mode, case.batch)
        )

    def column(self, case: Case, name: str) -> float:
        value = self.rows.get(case, {}).get(name)
        if not value:
            raise ValueError(f"there is no `{name}` of {case}")
        return float(value)

    def ratio(self, case: Case, base: Case) -> float:
        """How many times as long `case` takes, at the newest place that has both, or ValueError."""
        for each in (case, base):
            self.column(each, "median_ms")
        for rows in reversed(self.places.values()):
            if case in rows and base in rows:
                return _ms(rows[case]) / _ms(rows[base])
        raise ValueError(f"{case}, and {base}, are of different code or machines")


def _named(subject: str, mode: str, batch: int) -> Case:
    subject, _, other = subject.partition("+")
    name, _, variant = subject.partition("/")
    (case,) = plan_cases([name], [mode], [batch], dtype="bfloat16", alone=False, reference=False)
    variants = {"": case, "backbone": case.alone, "reference": case.reference}
    if variant not in variants:
        raise ValueError(f"after {name}/ must come backbone or reference, got {variant!r}")
    backbone, _, size = other.partition("@")
    if not other:
        return variants[variant]
    return replace(variants[variant], backbone=backbone, image_size=int(size))


def look_up(path: Path, field: str) -> float:
    """The number at `a.b.2` of a JSON file, or a ValueError."""
    try:
        value = json.loads(path.read_text())
        for key in field.split("."):
            value = value[int(key)] if isinstance(value, list) else value[key]
        return float(value)
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"there is no such number ({error!r})") from None


def read_costs(timings: Path) -> Costs:
    """All rows of `timings` that can be shown, which are in order of time, and memory.csv's."""
    rows = [_believed(row) for row in read_rows(timings) if _shown(row)]
    return Costs.of(timings.parent, [*_read_memory(timings.with_name("memory.csv")), *rows])


def _shown(row: Row) -> bool:
    shown = USUAL.items() <= row.items() and row["impl"] in ("auto", "reference")
    return shown and (_usual_size(row) or bool(row["backbone"])) and _known_code(row)


def _believed(row: Row) -> Row:
    return row | {"peak_mib": ""} if row["commit"] in OVERSTATED else row


def _usual_size(row: Row) -> bool:
    return not row["image_size"] or row["image_size"] == own_size(row["model"])


def _known_code(row: Row) -> bool:
    return row.get("dirty") != "True"  # the same commit, and yet other code


def _place(row: Row) -> Place:
    return tuple(row.get(name) for name in ("device", "torch", "commit"))


def _ms(row: Row) -> float:
    return float(row["median_ms"])


def _case(row: Row) -> Case:
    iterations = int(row["iterations"]) if row["iterations"] else None
    case = Case(row["model"], iterations, row["mode"], row["part"], row["impl"], int(row["batch"]))
    if not row.get("backbone"):  # memory.csv has none
        return case
    return replace(case, backbone=row["backbone"], image_size=int(row["image_size"]))


def _read_memory(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) not in (MEMORY_COLUMNS, MEMORY_COLUMNS[:-2]):
            raise ValueError(f"{path} must be a file that benchmarks/memory.py wrote")
        rows = [{**row, "mode": ROUTING, "part": "model"} for row in reader]
    return [row for row in rows if _known_code(row)]


def step_table(costs: Costs) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: whole steps, each model's backbone first."""
    headings = ["model", "iterations", "mode", "batch"]
    headings += ["ms", "÷ backbone", "peak MiB", "images/s", "measured on"]
    cases = [case for case in costs.rows if case.mode != ROUTING]
    models = list(dict.fromkeys(case.model for case in cases))
    cases.sort(
        key=lambda case: (
            models.index(case.model),
            case.backbone or "",
            list(MODES).index(case.mode),
            case.batch,
            case.part,
            case.impl,
            case.iterations or 0,
        )
    )
    return headings, [_step_cells(case, costs) for case in cases]


def _step_cells(case: Case, costs: Costs) -> list[str]:
    row = costs.rows[case]
    alone = costs.places[_place(row)].get(case.alone)
    ratio = f"{_ms(row) / _ms(alone):.2f}" if alone else "–"
    peak = f"{float(row['peak_mib']):,.0f}" if row["peak_mib"] else "–"
    rate = f"{int(row['images_per_s']):,}"
    where = f"{row['device'].removeprefix('NVIDIA ')}, `{row['commit'][:8]}`"
    cells = [_what(case), row["iterations"] or "–", case.mode, f"{case.batch:,}"]
    return [*cells, f"{costs.column(case, 'median_ms'):.3f}", ratio, peak, rate, where]


def steps_stated(costs: Costs) -> str:
    """A sentence, if any, about rows of `step_table` whose commit nobody could check."""
    rows = [row for case, row in costs.rows.items() if case.mode != ROUTING]
    stated = sum(_is_stated(row) for row in rows)
    if not stated:
        return ""
    return f" {'All' if stated == len(rows) else f'{stated} of {len(rows)}'} commits are as stated."


def _is_stated(row: Row) -> bool:
    """A machine without git, which named the commit, could not say whether the tree was changed."""
    return not row.get("dirty")


def _what(case: Case) -> str:
    model = case.model
    if case.backbone:
        model += f" on {case.backbone}, images of {case.image_size}×{case.image_size}"
    if case.part == "backbone":
        return f"{model}, backbone alone"
    return model if case.impl == "auto" else f"{model}, every vote held (reference)"


def memory_table(costs: Costs) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: what routing alone holds, without its votes and with them."""
    headings = ["model", "batch", "iterations", "poses made", "votes of an iteration"]
    rows = []
    for case, row in costs.rows.items():
        if case.mode == ROUTING and case.impl == "auto":
            held = costs.rows.get(case.reference)
            sizes = [row["poses_mib"], row["votes_mib"], row["peak_mib"], held and held["peak_mib"]]
            cells = [f"{int(size):,}" if size else "–" for size in sizes]
            rows.append([case.model, f"{case.batch:,}", f"{case.iterations}", *cells])
    return [*headings, "peak", "peak, reference"], rows


def memory_origin(costs: Costs) -> str:
    """Where memory.csv was measured, and with which code."""
    rows = [row for case, row in costs.rows.items() if case.mode == ROUTING]
    return "; ".join(dict.fromkeys(f"{row['device']}, {_commit(row)}" for row in rows))


def _commit(row: Row) -> str:
    if not row.get("commit"):
        return "commit not recorded"
    return f"`{row['commit'][:8]}`{' as stated' if _is_stated(row) else ''}"


def cost_figure(costs: Costs) -> dict[str, Any]:
    """What the figure shows: the paper's batch, each mode at the newest place with a line.

    The reference, which few commits have, may be of another commit; a panel names both. A model
    with one number of iterations has no line; nothing is returned where none has.
    """
    panels: list[dict[str, Any]] = []
    devices: dict[str, None] = {}  # ordered, none twice
    for mode, step in MODES.items():
        place = _place_to_draw(mode, costs)
        if place is not None:
            for quantity in ("median_ms", "peak_mib"):
                if panel := _panel(mode, quantity, place, costs):
                    panels.append({"step": step, "quantity": quantity, **panel})
            devices[str(place[0])] = None
    title = f"{', '.join(devices)}, batch {BATCH}, {USUAL['dtype']}"
    return {"title": title, "panels": panels} if panels else {}


def _place_to_draw(mode: str, costs: Costs) -> Place | None:
    drawn = [place for place, rows in costs.places.items() if _lines(mode, "median_ms", rows)]
    return next(reversed(drawn), None)


def _panel(mode: str, quantity: str, place: Place, costs: Costs) -> dict[str, Any]:
    """Lines and the commits that they are of; nothing if there are none."""
    held = _place_of_reference(mode, place, costs)
    rows = {case: row for case, row in costs.places[place].items() if case.impl == "auto"}
    rows |= {case: row for case, row in costs.places[held].items() if case.impl == "reference"}
    lines = _lines(mode, quantity, rows)
    places = [place]
    if held != place and any(line["reference"][0] for line in lines.values()):
        places.append(held)
    commits = "commit " + ", reference ".join(f"{commit}"[:8] for _, _, commit in places)
    return {"commits": commits, "lines": lines} if lines else {}


def _place_of_reference(mode: str, place: Place, costs: Costs) -> Place:
    """`place` if it has the reference, or else the newest of the same device and torch."""
    found = [
        other
        for other, rows in costs.places.items()
        if other[:2] == place[:2] and any((c.mode, c.impl) == (mode, "reference") for c in rows)
    ]
    return place if place in found else next(reversed(found), place)


def _lines(mode: str, quantity: str, rows: Mapping[Case, Row]) -> dict[str, dict[str, Any]]:
    lines: dict[str, dict[str, Any]] = {}
    for case in sorted(rows, key=lambda case: case.iterations or 0):
        drawn = (case.mode, case.part, case.batch, case.backbone) == (mode, "model", BATCH, None)
        if drawn and case.iterations and rows[case][quantity]:
            line = lines.setdefault(case.model, {"auto": [[], []], "reference": [[], []]})
            line[case.impl][0].append(case.iterations)
            line[case.impl][1].append(float(rows[case][quantity]))
            alone = rows.get(case.alone, {}).get(quantity)
            line["backbone"] = float(alone) if alone else None
    return {model: line for model, line in lines.items() if len(line["auto"][0]) > 1}
