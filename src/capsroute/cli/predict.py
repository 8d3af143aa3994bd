"""`capsroute predict`"""

import csv
import glob
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from torch import Tensor

from capsroute.cli.errors import UsageError
from capsroute.cli.inputs import (
    STDIN,
    Broken,
    Source,
    from_file,
    from_stdin,
    load_predictor,
    read_image,
)
from capsroute.cli.parsing import FLAGS, optional, parse
from capsroute.cli.progress import progress_bars
from capsroute.data.listing import SUFFIXES, images_below
from capsroute.inference import Prediction, Predictor

READERS = 8  # threads; Pillow decodes outside Python's lock
TOP_K = 3
VISIBLE = 0.0005  # below it, a probability is 0.0 % in the table
REMARKS = 3  # of one kind that are told image by image


@dataclass(frozen=True)
class Options:
    """Classify images.

    The checkpoint says how images are brought to the model's size and colours. Nothing is
    inverted: the shipped digit models expect light digits on a dark background, as in MNIST.

    With --json, one object is printed per line, as `capsroute serve` answers:
    {"file", "labels", "ranked": [{"label", "probability"}, …], "remark"}.

    A file that cannot be read is named on stderr and skipped, and the exit status is then 1, or 2
    if no file can be read.

    For example `capsroute predict runs/pets photo.jpg`,
    `capsroute predict model.onnx photos/ '*.png' --json`,
    `curl … | capsroute predict inverted_small_multimnist -`.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run's folder, a checkpoint, a pretrained model's name, or an .onnx or .pt2 file."""
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES")] = ()
    """Files, folders (searched recursively), patterns, or - for one image on stdin."""
    from_list: Annotated[str | None, optional("FILE")] = None
    """A file with one path per line, or - for stdin; with or instead of IMAGES."""
    top_k: Annotated[int | None, optional("K")] = None
    """Classes to show, with probabilities. (default: 3; the table omits those shown as 0.0 %)"""
    json: bool = False
    """Print one JSON object per line."""
    csv: bool = False
    """Print CSV: a header, then one row per image."""
    strict: bool = False
    """Stop at the first file that cannot be read, with exit status 2."""
    iterations: Annotated[int | None, optional("N")] = None
    """Routing iterations. (default: the model's own)"""
    batch_size: Annotated[int, tyro.conf.arg(metavar="N")] = 64
    """Images per batch."""
    device: Annotated[str, tyro.conf.arg(metavar="DEVICE")] = "auto"
    """auto, cpu or cuda; exported files run on the CPU."""


def main(arguments: list[str]) -> None:
    options = parse(Options, "predict", arguments, config=FLAGS)
    _check(options)
    sources = find_images(options.images, options.from_list)
    predictor = load_predictor(options.model, iterations=options.iterations, device=options.device)
    top_k = min(options.top_k or TOP_K, len(predictor.class_names))
    write, finish = _writer(options, top_k)
    remarks = _Remarks()
    broken = 0
    for source, answer in _predict_all(predictor, sources, options.batch_size, top_k):
        if isinstance(answer, Broken):
            if options.strict or len(sources) == 1:
                why = " (`--strict`)" if options.strict else ""
                raise UsageError(f"{source.name}: {answer.reason}{why}")
            broken += 1
            print(f"{source.name}: {answer.reason}", file=sys.stderr)
            continue
        remarks.add(source.name, answer.remark)
        write(source.name, answer)
    finish()
    remarks.finish()
    if broken == len(sources):
        raise UsageError(f"none of the {broken} images could be read")
    if broken:
        files = "1 image" if broken == 1 else f"{broken} images"
        print(f"{files} of {len(sources)} could not be read", file=sys.stderr)
        sys.exit(1)


def _check(options: Options) -> None:
    if options.json and options.csv:
        raise UsageError("`--json` must not be given with `--csv`")
    for flag, value in (("--top-k", options.top_k), ("--batch-size", options.batch_size)):
        if value is not None and value < 1:
            raise UsageError(f"`{flag}` must be at least 1, got {value}")


def find_images(given: Sequence[str], from_list: str | None) -> list[Source]:
    """The images that the command line names, in its order; folders and patterns sorted."""
    listed = [] if from_list is None else _listed(from_list)
    sources = [source for name in given for source in _expand(name)]
    sources += [from_file(Path(name).expanduser()) for name in listed]
    if not sources:
        raise UsageError("`IMAGES` must name a file, a folder, a pattern or -, got nothing")
    return sources


def _listed(file: str) -> list[str]:
    try:
        text = sys.stdin.read() if file == STDIN else Path(file).expanduser().read_text()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"`--from-list` must name a file with one path per line, got {file}: {reason}"
        ) from error
    return [line for line in text.splitlines() if line.strip()]


def _expand(name: str) -> list[Source]:
    if name == STDIN:
        return [from_stdin()]
    path = Path(name).expanduser()
    if os.path.isdir(path):  # noqa: PTH112  (Path.is_dir raises where looking is not permitted)
        found = _below(path)
        if not found:
            raise UsageError(f"{path} holds no image ({' '.join(sorted(SUFFIXES))})")
        return found
    if glob.has_magic(name) and not os.path.exists(path):  # noqa: PTH110  (as above)
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207  (may be absolute)
        if not matches:
            raise UsageError(f"{name}: no file matches this pattern")
        return [source for match in matches for source in _matched(Path(match))]
    return [from_file(path)]


def _matched(path: Path) -> list[Source]:
    """A folder that a pattern names counts with all below it; an empty one does not matter."""
    return _below(path) if path.is_dir() else [from_file(path)]


def _below(folder: Path) -> list[Source]:
    """The images of a folder; a closed one below it is among them, and cannot be read."""
    files, closed = images_below(folder)
    return [from_file(path) for path in sorted([*files, *(skipped.path for skipped in closed)])]


def _predict_all(
    predictor: Predictor, sources: list[Source], batch_size: int, top_k: int
) -> Iterator[tuple[Source, Prediction | Broken]]:
    """Each source with its answer, in order."""
    with ThreadPoolExecutor(READERS) as pool, progress_bars() as begin:
        listen = begin("predicting")
        for first in range(0, len(sources), batch_size):
            listen(first, len(sources))
            batch = sources[first : first + batch_size]
            read = list(pool.map(lambda source: read_image(predictor, source), batch))
            good = [image for image in read if isinstance(image, Tensor)]
            answers = iter(predictor.answer(good, top_k))
            for source, image in zip(batch, read, strict=True):
                yield source, image if isinstance(image, Broken) else next(answers)


class _Remarks:
    """On stderr: the first few of each kind with their images, at the end how many more."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, remark: str | None) -> None:
        if remark is None:
            return
        self._counts[remark] += 1
        if self._counts[remark] <= REMARKS:
            print(f"{name}: {remark}", file=sys.stderr)

    def finish(self) -> None:
        for remark, count in self._counts.items():
            if more := max(0, count - REMARKS):
                images = "1 more image" if more == 1 else f"{more} more images"
                print(f"{images}: {remark}", file=sys.stderr)


Write = Callable[[str, Prediction], None]


def _writer(options: Options, top_k: int) -> tuple[Write, Callable[[], None]]:
    """What to do with an answer, and at the end."""
    if options.json:
        return _write_json, lambda: None
    if options.csv:
        rows = csv.writer(sys.stdout, lineterminator="\n")
        numbers = range(1, top_k + 1)
        pairs = [name for n in numbers for name in (f"class_{n}", f"probability_{n}")]
        rows.writerow(["file", "labels", *pairs])
        return lambda name, answer: rows.writerow(_csv_row(name, answer)), lambda: None
    table = Table()
    for heading in ("image", "answer", "likeliest"):
        table.add_column(heading, overflow="fold")
    least = 0.0 if options.top_k is not None else VISIBLE
    return (
        lambda name, answer: table.add_row(*_table_row(name, answer, least)),
        lambda: Console(highlight=False).print(table) if table.row_count else None,
    )


def _write_json(name: str, answer: Prediction) -> None:
    print(json.dumps({"file": name, **answer.as_dict()}, ensure_ascii=False), flush=True)


def _csv_row(name: str, answer: Prediction) -> list[str]:
    pairs = [cell for label, p in answer.ranked for cell in (label, f"{p:.6f}")]
    return [name, ";".join(answer.labels), *pairs]


def _table_row(name: str, answer: Prediction, least: float) -> list[RenderableType]:
    """The likeliest class, and those at least as likely as `least`."""
    shown = [answer.ranked[0], *(pair for pair in answer.ranked[1:] if pair[1] >= least)]
    ranked = [(label, f"{100 * p:.1f} %") for label, p in shown]
    return [Text(name), Text(", ".join(answer.labels) or "nothing"), _Ranked(ranked)]


@dataclass(frozen=True)
class _Ranked:
    """Classes with their probabilities, as many to a line as fit, and no number broken."""

    classes: list[tuple[str, str]]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widths = [cell_len(" ".join(pair)) for pair in self.classes]
        whole = sum(widths) + len(GAP) * (len(widths) - 1)
        return Measurement(max(widths), whole).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for phrase in self._phrases(options.max_width):
            longer = f"{line}{GAP}{phrase}" if line else phrase
            if line and cell_len(longer) > options.max_width:
                yield Text(line, overflow="fold")
                longer = phrase
            line = longer
        yield Text(line, overflow="fold")

    def _phrases(self, width: int) -> Iterator[str]:
        for pair in self.classes:
            together = " ".join(pair)
            yield from [together] if cell_len(together) <= width else pair


GAP = "  "
