"""`capsroute explain`"""

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from capsroute.cli import to_type
from capsroute.cli.errors import UsageError, as_typed
from capsroute.cli.inputs import STDIN, Broken, from_file, from_stdin, load_predictor, read_image
from capsroute.cli.outputs import file_to_write, folder_to_write_to
from capsroute.cli.parsing import FLAGS, optional, parse
from capsroute.cli.progress import progress_bars
from capsroute.data.diverse_multimnist import CANVAS
from capsroute.explain import MAPS, Explanation, default_map, draw_explanation, page
from capsroute.explain import explain as explain_image
from capsroute.explain.separation import Separation, measure_separation, two_digit_images
from capsroute.explain.trace import check_explainable, why_unexplained
from capsroute.files import write_json, write_whole
from capsroute.inference import Predictor
from capsroute.models.base import CapsuleClassifier, ImageClassifier
from capsroute.models.weights import read_metadata
from capsroute.nearest import nearest
from capsroute.train.provenance import device_name, versions


@dataclass(frozen=True)
class Options:
    """Show how an image was routed: heat maps, the parse tree, and how decided the routing is.

    Writes files named after IMAGE that end in .explained.png and .explained.html. docs/explain.md
    says how the maps are made and how far to trust them. With --separation, that is measured for a
    model of overlapping digits, instead of explaining an image.

    The map is contrast by default, fields for an EM model, and grid where a primary capsule sees
    more than half of the image.

    For example `capsroute explain inverted_small_multimnist digits.png`,
    `capsroute explain runs/pets photo.jpg --classes cat dog --out pages`,
    `capsroute explain inverted_small_multimnist --separation 1000 --out separation.json`.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run's folder, a checkpoint or a pretrained model's name."""
    image: Annotated[str | None, tyro.conf.Positional, optional("IMAGE")] = None
    """An image file, or - for stdin."""
    out: Annotated[Path | None, optional("PATH")] = None
    """Folder for the files (default: this one); with --separation, file for the result."""
    classes: Annotated[tuple[str, ...], tyro.conf.arg(metavar="CLASS")] = ()
    """Names of the classes to explain. (default: those predicted)"""
    map: Annotated[str | None, optional("MAP")] = None
    """Heat map, by its name in docs/explain.md. (default: see above)"""
    json: bool = False
    """Print the explanation as JSON, with all notes and remarks, instead of a table."""
    separation: Annotated[int | None, optional("N")] = None
    """Measure how well each map separates the digits of N two-digit test images."""
    split: Literal["test", "choice"] = "test"
    """With --separation: the test images, or those that the default map was chosen on."""
    iterations: Annotated[int | None, optional("N")] = None
    """Routing iterations. (default: the model's own)"""
    device: Annotated[str, tyro.conf.arg(metavar="DEVICE")] = "auto"
    """auto, cpu or cuda."""


def main(arguments: list[str]) -> None:
    options = parse(Options, "explain", arguments, config=FLAGS)
    _check(options)
    predictor = load_predictor(options.model, iterations=options.iterations, device=options.device)
    if predictor.model is None:
        raise UsageError(
            f"`MODEL` must be a model's weights, got {options.model}: "
            f"{why_unexplained(predictor.model)}"
        )
    check_explainable(predictor.model)
    if options.separation is not None:
        _measure(predictor, predictor.model, options, arguments)
    else:
        _explain(predictor, predictor.model, options)


def _check(options: Options) -> None:
    if options.image is None and options.separation is None:
        raise UsageError("`IMAGE` must be given (or `--separation N`), got nothing to explain")
    if options.image is not None and options.separation is not None:
        raise UsageError("`--separation` must not be given with an IMAGE: it makes its own")
    if options.map is not None and options.map not in MAPS:
        hint = nearest(options.map, MAPS)
        raise UsageError(f"`--map` must be a definition of heat, got {options.map!r}{hint}")


def _explain(predictor: Predictor, model: ImageClassifier, options: Options) -> None:
    assert options.image is not None  # checked
    folder = folder_to_write_to(options.out or Path())
    source = from_stdin() if options.image == STDIN else from_file(Path(options.image).expanduser())
    stem = Path(source.name).stem
    png, html = (file_to_write(folder / f"{stem}.explained.{kind}") for kind in ("png", "html"))
    image = read_image(predictor, source)
    if isinstance(image, Broken):
        raise UsageError(f"{source.name}: {image.reason}")
    remark = predictor.remark(image)
    if remark is not None:
        print(f"{source.name}: {remark}", file=sys.stderr)
    with as_typed(classes="--classes", map="--map"):
        explanation = explain_image(model, image, options.classes, map=options.map)
    _write_together(
        {png: draw_explanation(explanation, image), html: page(explanation, image).encode()}
    )
    if options.json:
        print(json.dumps({**explanation.as_dict(), "remark": remark}))
        return
    _print(explanation)
    print(f"wrote {png}, {html}")


def _write_together(files: dict[Path, bytes]) -> None:
    """Into one folder, all of them or none: old files go only when all new ones are whole."""
    folder = next(iter(files)).parent
    try:
        with tempfile.TemporaryDirectory(prefix=".explained.", dir=folder) as aside:
            for path, data in files.items():
                write_whole(Path(aside) / path.name, data)
            for path in files:
                (Path(aside) / path.name).replace(path)
    except OSError as error:  # which names the temporary files
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        names = ", ".join(map(str, files))
        raise OSError(f"could not write {names}: {cause.strerror or cause}") from error


def _print(explanation: Explanation) -> None:
    print(f"predicted: {explanation.answer}")
    print(f"heat map: {explanation.map}")
    table = Table("layer", "routing")
    for heading in ("entropy / log M", "never win"):
        table.add_column(heading, justify="right")
    for layer in explanation.layers:
        entropy = f"{layer.entropy[layer.used - 1]:.3f}"
        never = "–" if layer.never_win is None else f"{100 * layer.never_win:.0f} %"
        name = explanation.layer_name(layer.layer)
        table.add_row(name, layer.state, entropy, never)
    Console(highlight=False).print(table)
    for note in explanation.notes():
        print(note)


def _measure(
    predictor: Predictor, model: ImageClassifier, options: Options, arguments: list[str]
) -> None:
    assert isinstance(model, CapsuleClassifier) and options.separation is not None  # checked
    if (model.in_channels, *model.image_size) != (1, CANVAS, CANVAS) or model.num_classes != 10:
        raise UsageError(
            f"`--separation` needs a model of overlapping digits (1×{CANVAS}×{CANVAS}, 10 "
            f"classes), got {model.name}"
        )
    out = None if options.out is None else file_to_write(options.out)
    with as_typed(count="--separation"):
        pairs = two_digit_images(options.separation, split=options.split)
    with progress_bars() as begin:
        separations, right = measure_separation(model, pairs, begin("measuring"))
    _print_separation(separations)
    if out is None:
        return
    result = {
        "command": to_type("explain", *arguments),
        "model": model.name,
        "iterations": model.iterations,
        "weights_sha256": _digest(predictor),
        "images": len(pairs.images),
        "split": options.split,
        "both_digits_named_percent": right,
        "chance": 0.5,
        "default_map": default_map(model),
        "maps": {name: asdict(value) for name, value in separations.items()},
        "device": device_name(next(model.parameters()).device),
        **versions(),
    }
    write_json(out, result)
    print(f"wrote {out}")


def _digest(predictor: Predictor) -> str | None:
    if predictor.checkpoint is None:
        return None
    return read_metadata(predictor.checkpoint).get("sha256")


def _print_separation(separations: dict[str, Separation]) -> None:
    table = Table(title="share of a class's heat on its own digit (chance 0.5)")
    # the headings give way first; on a terminal as narrow as a name, the name goes on below
    table.add_column("map", width=max(map(len, separations)), overflow="fold")
    for heading in ("share", "standard error", "where both were named"):
        table.add_column(heading, justify="right")
    for name, value in sorted(separations.items(), key=lambda item: -item[1].share):
        right = "–" if value.share_where_right is None else f"{value.share_where_right:.4f}"
        table.add_row(name, f"{value.share:.4f}", f"{value.error:.4f}", right)
    Console(highlight=False).print(table)
