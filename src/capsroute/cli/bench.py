"""`capsroute bench`"""

import csv
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from capsroute.bench.cases import Case, Dtype, build_model, plan_cases
from capsroute.bench.check import agrees_with_reference
from capsroute.bench.rows import Row, append_row, find_row, read_rows
from capsroute.bench.timing import time_case
from capsroute.cli.errors import UsageError, one_line
from capsroute.cli.parsing import Flag, as_options, optional, parse
from capsroute.devices import choose_device
from capsroute.train.provenance import device_name, versions

DEFAULT = ("inverted_resnet_cifar10:1,2,4",)


@dataclass(frozen=True)
class Conditions:
    """How every case is measured."""

    batch: tuple[int, ...]
    dtype: Dtype
    repeats: int
    compile: bool

    def __str__(self) -> str:
        batch = ", ".join(map(str, self.batch))
        how = "compiled" if self.compile else "not compiled"
        return f"batch {batch}, {self.dtype}, {self.repeats} calls, {how}"


ON_GPU = Conditions(batch=(128,), dtype="bfloat16", repeats=50, compile=True)
ON_CPU = Conditions(batch=(8,), dtype="float32", repeats=5, compile=False)


@dataclass(frozen=True)
class Options:
    """Time whole training steps and forward passes of models, next to the backbone alone and to
    the formula as the paper writes it. A speed-up is shown only where both compute the same.

    Rows are added to --out as they are measured, and those already there are not measured again,
    so an interrupted benchmark resumes.

    For example `capsroute bench`, `capsroute bench inverted_resnet_cifar10:1,2,4 cnn_cifar10`,
    `capsroute bench inverted_simple_cifar10 --modes infer --batch 1 128 --out speed.csv`,
    `capsroute bench inverted_resnet_cifar10 --backbone timm/resnet50 --image-size 224`.
    """

    models: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME[:ITERATIONS,…]")
    ] = DEFAULT
    """Models, each with the iteration counts to measure, if not its own."""
    modes: tuple[Literal["train", "infer"], ...] = ("train", "infer")
    """Time training steps, forward passes, or both."""
    batch: Annotated[tuple[int, ...] | None, optional("N…")] = None
    """Batch sizes. (default: 128 on a GPU, 8 on a CPU)"""
    dtype: Annotated[Literal["float32", "bfloat16"] | None, optional("{float32,bfloat16}")] = None
    """bfloat16 covers convolutions and stored poses. (default: bfloat16 on a GPU, else float32)"""
    bn_group: Annotated[int | None, optional("N")] = None
    """Images per BatchNorm group (models with BatchNorm)."""
    impl: Literal["auto", "triton", "tiled"] = "auto"
    """Implementation of `capsroute.ops.inverted.routing_step` (inverted models)."""
    backbone: Annotated[str | None, optional("timm/NAME")] = None
    """A timm backbone below the capsules, such as timm/resnet50 (needs the extra `timm`)."""
    image_size: Annotated[int | None, optional("N")] = None
    """Height and width of the images. (default: the model's own)"""
    alone: bool = True
    """Also time a ResNet backbone alone, with average pooling and a linear layer."""
    reference: Flag = False
    """Also time `impl="reference"`, which holds every vote and may not fit in memory."""
    repeats: Annotated[int | None, optional("N")] = None
    """How many calls to time. (default: 50 on a GPU, 5 on a CPU)"""
    compile: Literal["auto", "yes", "no"] = "auto"
    """Use torch.compile; auto: on a GPU."""
    device: Annotated[str, tyro.conf.arg(metavar="DEVICE")] = "auto"
    """auto, cpu or cuda."""
    out: Annotated[Path | None, optional("FILE.csv")] = None
    """CSV file to add rows to."""


def main(arguments: list[str]) -> None:
    options = parse(Options, "bench", arguments)
    with as_options(Options, models="NAME"):
        _bench(options)


def _bench(options: Options) -> None:
    device = choose_device(options.device)
    conditions = _conditions(options, device)
    cases = _plan(options, conditions)
    known = _known(options.out)
    if device.type == "cpu":
        print(f"this measures a CPU, which is slow: {conditions}", flush=True)
    where = {"device": device_name(device), **versions()}
    rows: dict[Case, Row] = {}
    failed: list[Case] = []
    for number, case in enumerate(cases, start=1):
        print(f"[{number}/{len(cases)}] {case}: ", end="", flush=True)
        row = find_row(case, conditions.compile, known, where)
        if row is not None:
            print(f"in {options.out} already", flush=True)
            rows[case] = row
            continue
        try:
            row = _measure(case, device, conditions, where)
        except Exception as error:  # whatever a compiler makes of one case, the others go on
            print(f"failed: {one_line(str(error))[:300] or type(error).__name__}", flush=True)
            failed.append(case)
            continue
        rows[case] = row
        print(_summary(row), flush=True)
        if options.out:
            append_row(options.out, row)
    if rows:
        _print_table(rows)
    differ = [case for case, row in rows.items() if not row.checked]
    for what, found in (("failed", failed), ("differ from the reference", differ)):
        if found:
            print(f"error: {len(found)} of {len(cases)} {what}: {found[0]}", file=sys.stderr)
    if failed or differ:
        sys.exit(1)


def _conditions(options: Options, device: torch.device) -> Conditions:
    """What was given; the rest so that it ends within minutes where it runs."""
    usual = ON_CPU if device.type == "cpu" else ON_GPU
    if not options.modes:
        raise UsageError("`--modes` must name train, infer or both, got nothing")
    chosen = Conditions(
        batch=usual.batch if options.batch is None else options.batch,
        dtype=usual.dtype if options.dtype is None else options.dtype,
        repeats=usual.repeats if options.repeats is None else options.repeats,
        compile=usual.compile if options.compile == "auto" else options.compile == "yes",
    )
    for name, values in (("batch", chosen.batch), ("repeats", (chosen.repeats,))):
        if min(values, default=0) < 1:
            given = " ".join(map(str, values)) or "nothing"
            raise UsageError(f"`--{name}` must be at least 1, got {given}")
    return chosen


def _known(out: Path | None) -> list[dict[str, str]]:
    """Rows of --out; an error now, not after the first case, if none can be added to it."""
    if out is None:
        return []
    try:
        rows = read_rows(out)
        out.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, UnicodeDecodeError, csv.Error):
        rows = None
    if rows is None or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise UsageError(f"`--out` must be a CSV file that can be written, got {out}")
    return rows


def _plan(options: Options, conditions: Conditions) -> list[Case]:
    """All cases; an error now if their models cannot be built so."""
    cases = plan_cases(
        options.models,
        options.modes,
        conditions.batch,
        dtype=conditions.dtype,
        alone=options.alone,
        reference=options.reference,
        impl=options.impl,
        bn_group=options.bn_group,
        backbone=options.backbone,
        image_size=options.image_size,
    )
    for case in {(case.model, case.iterations): case for case in cases}.values():
        if (case.bn_group, case.backbone, case.image_size) != (None, None, None):
            build_model(case, torch.device("cpu"))
    return cases


def _measure(
    case: Case, device: torch.device, conditions: Conditions, where: dict[str, object]
) -> Row:
    checked = case.impl == "reference" or agrees_with_reference(case, device)
    timing = time_case(case, device, repeats=conditions.repeats, compile=conditions.compile)
    return Row(case, timing, conditions.compile, checked, where)


def _summary(row: Row) -> str:
    timing = row.timing
    text = f"{timing.median_ms:.3f} ms ({timing.p20_ms:.3f}–{timing.p80_ms:.3f})"
    if timing.peak_mib is not None:
        text += f", {timing.peak_mib:,.0f} MiB"
    return text if row.checked else f"{text}; DIFFERS FROM THE REFERENCE"


def _print_table(rows: dict[Case, Row]) -> None:
    where = next(iter(rows.values())).where["device"]
    table = Table(title=f"Medians on {where}", title_justify="left")
    table.add_column("model", overflow="fold")
    for heading in ("mode", "batch"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ms", "images/s", "MiB", "÷ backbone", "reference ÷"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case, row in rows.items():
        peak = row.timing.peak_mib
        table.add_row(
            case.what,
            case.mode,
            str(case.batch),
            f"{row.timing.median_ms:.3f}",
            f"{row.images_per_s:,.0f}",
            "" if peak is None else f"{peak:,.0f}",
            _ratio(row, rows.get(case.alone)),
            _ratio(rows.get(case.reference), row) if case.impl != "reference" else "",
        )
    # numbers are never cut: a pipe, or a narrow terminal, gets longer lines
    Console(width=max(Console().width, 120)).print(table)
    print("÷ backbone: how many times as long; reference ÷: how many times as fast")


def _ratio(row: Row | None, base: Row | None) -> str:
    """How many times as long, or nothing where that would be no honest comparison."""
    if row is None or base is None or row is base or not (row.checked and base.checked):
        return ""
    return f"{row.timing.median_ms / base.timing.median_ms:.2f}"
