"""The report's figures. Each PNG carries a digest of the numbers that it was drawn from."""

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from capsroute.files import write_whole

DIGEST_KEY = "capsroute-data"
Curve = tuple[Sequence[float], Sequence[float]]
"""Values along x and y."""


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
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    metadata = PngInfo()
    metadata.add_text(DIGEST_KEY, digest)
    with Image.open(drawn) as image:
        picture = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        picture.save(small, format="png", optimize=True, pnginfo=metadata)
    return small.getvalue()


def drawn_from(path: Path) -> str | None:
    """The digest that a PNG carries, if any."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.info.get(DIGEST_KEY)
    except OSError:  # no such file, or no picture
        return None


def convergence(panels: Mapping[str, Mapping[str, Sequence[Curve]]]) -> Any:
    """Test accuracy against epochs: a panel for each group, a colour for each experiment."""
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = _figure(max(6.0, 4.0 * columns), 3.4 * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    labels = sorted(set(chain(*panels.values())))
    colors = {label: f"C{index}" for index, label in enumerate(labels)}
    known: dict[str, Any] = {}
    for axis, (title, lines) in zip(axes, panels.items(), strict=False):
        for label, curves in lines.items():
            for epochs, accuracies in curves:
                (known[label],) = axis.plot(epochs, accuracies, color=colors[label], lw=0.9)
        lowest = min(curve[1][-1] for curves in lines.values() for curve in curves)
        axis.set(title=title, xlabel="epoch", ylabel="test accuracy, %")
        axis.set_ylim(bottom=0.6 * lowest)  # how they end matters more than how they begin
        axis.grid(alpha=0.3)
    for axis in axes[len(panels) :]:
        axis.remove()
    _legend(figure, {label: known[label] for label in labels})
    return figure


def iterations(routings: Mapping[str, Mapping[str, Any]]) -> Any:
    """Accuracy against iterations, the paper's dashed and ours solid; right, the top in detail."""
    figure = _figure(10.0, 4.2)
    whole, detail = figure.subplots(1, 2)
    for index, (routing, lines) in enumerate(routings.items()):
        for axis in (whole, detail):
            paper = lines["paper"]
            axis.plot(*paper, "--", color=f"C{index}", lw=1.0, marker=".", alpha=0.6)
            counts, means, stds = zip(*lines["ours"], strict=True) if lines["ours"] else ([],) * 3
            axis.errorbar(
                counts, means, stds, color=f"C{index}", marker="o", capsize=3, label=routing
            )
    for axis in (whole, detail):
        axis.set(xlabel="routing iterations", ylabel="best test epoch, %", xticks=range(1, 6))
        axis.grid(alpha=0.3)
    detail.set(ylim=(79, 87))
    whole.legend(frameon=False, fontsize=8, title="solid: ours, dashed: the paper's")
    return figure


def cost(panels: Mapping[str, Mapping[str, Curve]]) -> Any:
    """Time and memory against iterations, a line for each model and implementation."""
    from matplotlib.ticker import LogLocator

    rows = (len(panels) + 1) // 2
    figure = _figure(10.0, 3.4 * rows)
    axes = figure.subplots(rows, 2, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    known: dict[str, Any] = {}
    for axis, (label, lines) in zip(axes.flat, panels.items(), strict=False):
        for name, (counts, values) in lines.items():
            (known[name],) = axis.plot(counts, values, "o-", ms=4)
        axis.set(xlabel="routing iterations", ylabel=label, yscale="log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    _legend(figure, known)
    return figure


def settling(models: Mapping[str, Mapping[str, Any]]) -> Any:
    """How far class poses move in each iteration, and the accuracy if routing stopped there."""
    figure = _figure(10.0, 3.6)
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


def _legend(figure: Any, lines: Mapping[str, Any]) -> None:
    """One for all panels, where it hides nothing."""
    position = "outside right upper"
    legend = figure.legend(lines.values(), lines.keys(), loc=position, frameon=False, fontsize=8)
    for line in legend.get_lines():
        line.set_linewidth(2.5)  # thin lines of similar colours look the same


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
