"""The benchmark's file: CSV, one row for each case, with all that is needed to compare rows."""

import csv
import io
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from capsroute.bench.cases import Case
from capsroute.bench.timing import Timing
from capsroute.files import write_whole
from capsroute.models import model_info
from capsroute.models.base import as_size

SHAPES = ("channels", "classes")
"""Of the images and scores, beside `image_size`; rows from before these columns lack all three."""
PROVENANCE = ("device", "torch", "cuda", "triton", "python", "capsroute", "commit", "dirty")
COLUMNS = (
    *(field.name for field in fields(Case)),
    *SHAPES,
    *(field.name for field in fields(Timing)),
    "images_per_s",
    "compiled",
    "checked",
    *PROVENANCE,
)
OLD_COLUMNS = tuple(name for name in COLUMNS if name not in SHAPES)


@dataclass(frozen=True)
class Row:
    """A case, its timing, and where it was measured. `checked`: agrees with the reference."""

    case: Case
    timing: Timing
    compiled: bool
    checked: bool
    where: dict[str, Any]

    @property
    def images_per_s(self) -> float:
        return 1e3 * self.case.batch / self.timing.median_ms

    def as_dict(self) -> dict[str, Any]:
        timing = {key: _short(value) for key, value in asdict(self.timing).items()}
        rest = {"compiled": self.compiled, "checked": self.checked}
        return {
            **asdict(self.case),
            **_shapes(self.case),
            **timing,
            "images_per_s": round(self.images_per_s),
            **rest,
            **{key: self.where[key] for key in PROVENANCE},
        }


def _shapes(case: Case) -> dict[str, Any]:
    task = model_info(case.model).task
    own = own_size(case.model)
    return {
        "image_size": own if case.image_size is None else case.image_size,
        "channels": task.in_channels,
        "classes": task.num_classes,
    }


def own_size(model: str) -> str:
    """Of a model's images unless another is asked for: `32`, or `32x48` where they are no square.

    A row without a size, from before it was written, means this too.
    """
    height, width = as_size(model_info(model).task.image_size)
    return f"{height}" if height == width else f"{height}x{width}"


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a file, none if there is no file; a file of other columns is a ValueError.

    Those of a file from before `SHAPES` have nothing there.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) not in (COLUMNS, OLD_COLUMNS):
            raise ValueError(f"`out` must be a file that `capsroute bench` wrote, got {path}")
        return [dict.fromkeys(COLUMNS, "") | row for row in reader]


def append_row(path: Path, row: Row) -> None:
    """Add a row; the file is whole before and after."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(read_rows(path))
    writer.writerow(row.as_dict())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, buffer.getvalue().encode())


def find_row(
    case: Case, compiled: bool, rows: list[dict[str, str]], where: dict[str, Any]
) -> Row | None:
    """The row of the same case, machine, versions and commit, if it was measured already."""
    if where["dirty"]:
        return None  # the same commit, and yet other code
    wanted = {**asdict(case), "compiled": compiled, **where}
    wanted["image_size"] = _shapes(case)["image_size"]
    for row in rows:
        row = row | {"image_size": row["image_size"] or own_size(case.model)}
        if all(row[key] == _written(value) for key, value in wanted.items() if key in row):
            peak = float(row["peak_mib"]) if row["peak_mib"] else None
            median, p20, p80 = (float(row[key]) for key in ("median_ms", "p20_ms", "p80_ms"))
            timing = Timing(median, p20, p80, peak)
            return Row(case, timing, compiled, row["checked"] == "True", where)
    return None


def _written(value: Any) -> str:
    return "" if value is None else str(value)
