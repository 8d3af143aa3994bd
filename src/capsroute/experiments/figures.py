"""The report's figures. Each PNG carries a digest of the numbers that it was drawn from."""

import hashlib
import io
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from capsroute import drawing
from capsroute.experiments.cells import NOT_RUN
from capsroute.files import write_whole

DIGEST_KEY = "capsroute-data"
PIXELS_KEY = "capsroute-pixels"
Curve = tuple[Sequence[float], Sequence[float]] | tuple[Sequence[float], Sequence[float], str]
"""Values along x and y, and DIVERGED if the run did."""
DIVERGED = "diverged"
PAPER: dict[str, Any] = {"lw": 1.0, "marker": ".", "alpha": 0.6}
CROSS: dict[str, Any] = {"marker": "x", "ls": "", "ms": 7, "mew": 1.8}


@dataclass(frozen=True)
class Figure:
    """A figure that has not been drawn yet: how, and from which numbers (as JSON has them)."""

    name: str
    caption: str
    draw: Callable[[Any], Any]
    data: Any

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.data).encode()).hexdigest()

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.png"
        write_whole(path, _png(self.draw(self.data), self.digest))
        return path


def _png(figure: Any, digest: str) -> bytes:
    """With a palette, at a third of the size: the pictures are committed."""
    small = io.BytesIO()
    metadata = PngInfo()
    metadata.add_text(DIGEST_KEY, digest)
    with Image.open(io.BytesIO(drawing.png(figure, dpi=100))) as image:
        picture = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        metadata.add_text(PIXELS_KEY, _pixels(picture))
        picture.save(small, format="png", optimize=True, pnginfo=metadata)
    return small.getvalue()


def _pixels(image: Image.Image) -> str:
    """A digest of what is to be seen: another matplotlib draws otherwise, so none is redrawn."""
    return hashlib.sha256(repr(image.size).encode() + image.convert("RGB").tobytes()).hexdigest()


def drawn_from(path: Path) -> str | None:
    """The digest of numbers that a PNG carries, if any, and if its pixels are those drawn then."""
    try:
        with Image.open(path) as image:
            whole = image.info.get(PIXELS_KEY) == _pixels(image)
            return image.info.get(DIGEST_KEY) if whole else None
    except (OSError, SyntaxError):  # no such file, no picture, or a broken one
        return None


def convergence(panels: Mapping[str, Mapping[str, Sequence[Curve]]]) -> Any:
    """Test accuracy against epochs: a panel for each group, a colour for each experiment.

    A run that diverged ends in a cross, at its last evaluation.
    """
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = drawing.figure(max(6.0, 4.0 * columns), 3.4 * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    labels = sorted(set(chain(*panels.values())))
    colors = dict(zip(labels, _colors(len(labels)), strict=True))
    known: dict[str, Any] = {}
    crosses: dict[str, Any] = {}
    for axis, (title, lines) in zip(axes, panels.items(), strict=False):
        for label, curves in lines.items():
            for epochs, accuracies, *ended in curves:
                (known[label],) = axis.plot(epochs, accuracies, color=colors[label], lw=0.9)
                if ended == [DIVERGED]:
                    at = epochs[-1], accuracies[-1]
                    (crosses[DIVERGED],) = axis.plot(*at, **CROSS, color=colors[label])
        lowest = min(curve[1][-1] for curves in lines.values() for curve in curves)
        axis.set(title=title, xlabel="epoch", ylabel="test accuracy, %")
        axis.set_ylim(bottom=0.6 * lowest)  # how they end matters more than how they begin
        axis.grid(alpha=0.3)
    for axis in axes[len(panels) :]:
        axis.remove()
    _legend(figure, {label: known[label] for label in labels} | crosses)
    return figure


def _colors(count: int) -> list[Any]:
    """As many different ones, up to 20."""
    if count <= 10:
        return [f"C{index}" for index in range(count)]
    from matplotlib import colormaps

    return [colormaps["tab20"](index) for index in range(count)]


def iterations(routings: Mapping[str, Mapping[str, Any]]) -> Any:
    """Accuracy against iterations, the paper's dashed and ours solid; right, above 79 % in detail.

    A cross for each seed that diverged, at what chance would get.
    """
    figure = drawing.figure(10.0, 4.2)
    whole, detail = figure.subplots(1, 2)
    known: dict[str, Any] = {}
    for index, (routing, lines) in enumerate(routings.items()):
        ours = lines["ours"]
        missing = "" if ours else f", {DIVERGED if lines['diverged'] else NOT_RUN}"
        for axis in (whole, detail):
            drawn: Any
            (drawn,) = axis.plot(*lines["paper"], "--", color=f"C{index}", **PAPER)
            if ours:
                counts, means, stds = zip(*ours, strict=True)
                drawn = axis.errorbar(counts, means, stds, color=f"C{index}", marker="o", capsize=3)
            known[routing + missing] = drawn
    for axis in (whole, detail):
        axis.set(xlabel="routing iterations", ylabel="best test epoch, %", xticks=range(1, 6))
        axis.grid(alpha=0.3)
    best = [mean for lines in routings.values() for _, mean, _ in lines["ours"]]
    detail.set(ylim=(79, max([87, *best]) + 0.5))
    crosses = _draw_diverged(whole, [lines["diverged"] for lines in routings.values()])
    title = "solid: ours, dashed: the paper's" + (
        "\n×: a seed that diverged, at chance" if crosses else ""
    )
    style = {"frameon": False, "fontsize": 8, "title": title, "title_fontsize": 8}
    whole.legend(known.values(), known.keys(), **style)
    return figure


def _draw_diverged(axis: Any, routings: Sequence[Sequence[Sequence[float]]]) -> int:
    """A cross for each point (iterations, accuracy), in its routing's colour; how many."""
    crosses = sorted((*point, index) for index, points in enumerate(routings) for point in points)
    for _, group in groupby(crosses, key=lambda cross: cross[0]):
        beside = list(group)  # seeds that end alike: side by side, or they would look like one
        for place, (count, accuracy, index) in enumerate(beside):
            x = count + 0.12 * (place - (len(beside) - 1) / 2)
            axis.plot(x, accuracy, **CROSS, color=f"C{index}")
    return len(crosses)


def cost(shown: Mapping[str, Any]) -> Any:
    """Time and memory against iterations: a colour for each model, a style for what is timed."""
    panels = shown["panels"]
    rows = (len(panels) + 1) // 2
    figure = drawing.figure(10.0, 1.0 + 3.4 * rows)
    figure.suptitle(shown["title"])
    axes = list(figure.subplots(rows, 2, squeeze=False).flat)
    models = sorted(set(chain(*(panel["lines"] for panel in panels))))
    known: dict[str, Any] = {}
    for axis, panel in zip(axes, panels, strict=False):
        known |= _cost_panel(axis, panel, models)
    for axis in axes[len(panels) :]:
        axis.remove()
    style = {"loc": "outside lower center", "ncols": len(models), "handlelength": 4}
    _legend(figure, dict(sorted(known.items())), **style)
    return figure


def _cost_panel(axis: Any, panel: Mapping[str, Any], models: list[str]) -> dict[str, Any]:
    """What is drawn, by label."""
    known: dict[str, Any] = {}
    for model, line in panel["lines"].items():
        drawn = _cost_lines(axis, models.index(model), line)
        known |= {f"{model}{what}": artist for what, artist in drawn.items()}
    counts = {
        count
        for line in panel["lines"].values()
        for count in line["auto"][0] + line["reference"][0]
    }
    memory = panel["quantity"] == "peak_mib"
    axis.set(xlabel="routing iterations", xticks=sorted(counts))
    axis.set_title(panel["commits"], fontsize=9)
    axis.set_ylabel(f"{panel['step']}, {'peak memory' if memory else 'ms'}")
    _scale(axis, [*chain(*(line.get_ydata() for line in known.values()))], memory=memory)
    axis.grid(alpha=0.3)
    return known


def _cost_lines(axis: Any, index: int, line: Mapping[str, Any]) -> dict[str, Any]:
    """What is drawn of one model, by what its label ends with."""
    color = f"C{index}"
    drawn = {"": axis.plot(*line["auto"], "o-", ms=4, color=color)[0]}
    if line["backbone"] is not None:
        # backbones of similar cost lie over each other: the gaps of one show the other
        dashes = (4 * index, (4, 4))
        drawn[", backbone alone"] = axis.axhline(line["backbone"], color=color, ls=dashes, lw=1.2)
    if line["reference"][0]:
        style = {"ls": ":", "marker": "s", "ms": 4, "color": color}
        drawn[", every vote held (reference)"] = axis.plot(*line["reference"], **style)[0]
    return drawn


def _scale(axis: Any, values: Sequence[float], *, memory: bool) -> None:
    """A log axis between round numbers that enclose the values; of memory, powers of two."""
    low, high = min(values), max(values)
    if memory:
        steps = (1.0, 1.5) if high < 8 * low else (1.0,)
        numbers = [step * 2.0**power for power in range(-10, 40) for step in steps]
    else:
        numbers = [step * 10.0**power for power in range(-6, 9) for step in (1, 2, 5)]
    ticks = numbers[bisect_right(numbers, low) - 1 : bisect_left(numbers, high) + 1]
    axis.set(yscale="log", ylim=(0.95 * ticks[0], 1.05 * ticks[-1]))
    axis.set_yticks(ticks, labels=[_mebibytes(tick) if memory else f"{tick:g}" for tick in ticks])
    axis.minorticks_off()


def _mebibytes(number: float) -> str:
    return f"{number:g} MiB" if number < 1024 else f"{number / 1024:g} GiB"


def settling(models: Mapping[str, Mapping[str, Any]]) -> Any:
    """How far class poses move in each iteration, and the accuracy if routing stopped there."""
    figure = drawing.figure(10.0, 3.6)
    moved, accuracy = figure.subplots(1, 2)
    known: dict[str, Any] = {}
    for name, lines in models.items():
        style = "--" if lines["initial_poses"] == "random" else "-"
        steps = lines["class_movement"]
        color = known[name.rpartition(",")[0]].get_color() if style == "--" else None
        (line,) = moved.plot(range(2, 2 + len(steps)), steps, style, color=color)
        known[name] = line
        right = lines["accuracy"]
        accuracy.plot(range(1, 1 + len(right)), right, style, color=line.get_color())
    moved.set(ylabel="‖pₜ − pₜ₋₁‖ / ‖pₜ‖ of class capsules", yscale="log")
    accuracy.set(ylabel="test accuracy, %")
    for axis in (moved, accuracy):
        axis.set(xlabel="iteration t", xscale="log")
        axis.set_xticks([1, 2, 5, 10, 20, 50], labels=["1", "2", "5", "10", "20", "50"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    _legend(figure, known)
    return figure


def _legend(figure: Any, lines: Mapping[str, Any], **style: Any) -> None:
    """One for all panels, where it hides nothing."""
    style = {"loc": "outside right upper", "frameon": False, "fontsize": 8} | style
    legend = figure.legend(lines.values(), lines.keys(), **style)
    for line in legend.get_lines():
        line.set_linewidth(2.5)  # thin lines of similar colours look the same
