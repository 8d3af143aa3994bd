"""An explanation as one PNG: heat maps, parse trees, how decided each layer is."""

import textwrap
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from capsroute import drawing
from capsroute.explain.decided import Decision
from capsroute.explain.explanation import Explanation, overlay, picture
from capsroute.explain.tree import Placed, place

MOST_DRAWN = 4  # classes; the page has them all
DIM = 0.45  # brightness of the picture under a heat map
WIDTH, MAPS = 9.6, 2.5  # inches of all, and of the heat maps' height
PATCH, FRAME = 40, 5  # points of a patch at most, and of what is around it
PLOT = 2.3  # inches of the entropy's height
FLAT = 0.99  # from this entropy on in every layer and iteration, a plot would show one line
BOLD, PLAIN, SMALL, LINE = 0.1, 0.08, 0.058, 0.18  # inches of a letter, and of lines, about
SOFT = "#5b5b66"


def draw_explanation(explanation: Explanation, image: Tensor) -> bytes:
    """Draw an explanation of a prepared image (C, H, W), as the bytes of a PNG."""
    classes = explanation.classes[:MOST_DRAWN]
    depth = len(explanation.layers)
    titles = _Titles.of(explanation, classes)
    flat = all(value >= FLAT for layer in explanation.layers for value in layer.entropy)
    last = LINE * (depth + 2.5) if flat else PLOT
    heights = [titles.height + MAPS, (0.9 + 1.15 * depth) * len(classes), last]
    figure = drawing.figure(WIDTH, sum(heights), constrained=False)
    parts: Any = figure.subfigures(3, 1, height_ratios=heights)
    maps, trees, decided = parts
    input_picture = picture(image)
    _draw_maps(maps, explanation, titles, input_picture)
    axes = trees.subplots(len(classes), 1, squeeze=False)[:, 0]
    trees.subplots_adjust(left=0.13, right=0.98, top=0.95, bottom=0.04, hspace=0.12)
    for axis, index in zip(axes, classes, strict=True):
        _draw_tree(axis, explanation, index, input_picture)
    (_write_decisions if flat else _draw_decisions)(decided, explanation)
    return drawing.png(figure)


class _Titles(NamedTuple):
    """What stands over the heat maps, short enough for its place."""

    headline: str
    of_maps: dict[int, str]

    @classmethod
    def of(cls, explanation: Explanation, classes: list[int]) -> "_Titles":
        letters = int(WIDTH / (1 + len(classes)) / BOLD)
        return cls(
            _headline(explanation, len(classes)),
            {index: _map_title(explanation, index, letters) for index in classes},
        )

    @property
    def height(self) -> float:
        """In inches, with a line between the two and around them."""
        most = max(title.count("\n") for title in self.of_maps.values())
        return LINE * (self.headline.count("\n") + most + 3.5)


def _headline(explanation: Explanation, drawn: int) -> str:
    """What was predicted, in two lines at most; and, in a third, that not all of it is drawn."""
    text = _wrapped(f"predicted: {explanation.answer}", int(0.96 * WIDTH / PLAIN))
    asked = len(explanation.classes)
    if drawn < asked:
        text += f"\n{drawn} of {asked} classes shown; the .html page has them all"
    return text


def _map_title(explanation: Explanation, index: int, letters: int) -> str:
    name = explanation.class_names[index]
    probability = f"{100 * explanation.probabilities[index]:.1f} %"
    fits = len(name) + len(probability) + 2 <= letters
    title = f"{name}: {probability}" if fits else f"{_wrapped(name, letters)}\n{probability}"
    return f"{title}\n{_wrapped(explanation.told_from(index), letters)}".rstrip()


def _wrapped(text: str, letters: int) -> str:
    return textwrap.fill(text, letters, max_lines=2, placeholder=" …")


def _draw_maps(
    figure: Any, explanation: Explanation, titles: _Titles, original: Image.Image
) -> None:
    axes = figure.subplots(1, 1 + len(titles.of_maps), squeeze=False)[0]
    height = titles.height + MAPS
    figure.subplots_adjust(left=0.02, right=0.98, top=MAPS / height, bottom=0, wspace=0.06)
    corner: Any = {"x": 0.02, "y": 1 - 0.5 * LINE / height, "ha": "left", "va": "top"}
    figure.suptitle(titles.headline, fontsize=10, parse_math=False, **corner)
    axes[0].imshow(original, interpolation="nearest")
    axes[0].set_title("the image", fontsize=10)
    dimmed = original.point(lambda value: DIM * value)
    for axis, (index, title) in zip(axes[1:], titles.of_maps.items(), strict=True):
        colour = explanation.colour(index)
        axis.imshow(dimmed, interpolation="nearest")
        axis.imshow(overlay(explanation.heat[index], colour), interpolation="nearest")
        axis.set_title(title, fontsize=10, color=colour, weight="bold", parse_math=False)
    for axis in axes:
        axis.set_anchor("N")  # under its title, whatever the picture's shape
        axis.set_axis_off()


def _draw_tree(axis: Any, explanation: Explanation, index: int, original: Image.Image) -> None:
    placed, colour = place(explanation.trees[index]), explanation.colour(index)
    depth = len(explanation.layers)
    axis.set(xlim=(0, 1), ylim=(depth + 0.7, -0.35))
    axis.set_axis_off()
    caption = f"{explanation.tree_caption(index)}; pictures: {explanation.patches}"
    lines = textwrap.fill(caption, int(0.85 * WIDTH / SMALL))
    axis.text(0, depth + 0.45, lines, va="top", fontsize=8, color=SOFT, parse_math=False)
    for level in range(depth + 1):
        name = explanation.layer_name(depth - level).replace(" ", "\n", 1)
        axis.text(-0.02, level, name, ha="right", va="center", fontsize=8)
    for item in placed:
        if item.parent is not None:
            _draw_link(axis, item, placed[item.parent], colour)
    points = 72 * WIDTH * axis.get_position().width
    for item in placed:
        if item.level:
            _draw_patch(axis, item, original, colour, _side(placed, item.level, points))
        else:
            box = {"boxstyle": "round,pad=0.4", "facecolor": colour, "edgecolor": "none"}
            name = textwrap.shorten(explanation.class_names[index], 60, placeholder=" …")
            style: Any = {"ha": "center", "va": "center", "color": "white", "weight": "bold"}
            axis.text(item.x, 0, name, bbox=box, parse_math=False, **style)


def _draw_link(axis: Any, child: Placed, parent: Placed, colour: str) -> None:
    ends = [parent.x, child.x], [parent.level, child.level]
    axis.plot(*ends, color=colour, linewidth=0.6 + 9 * child.node.share, alpha=0.55, zorder=1)
    middle = (parent.x + 2 * child.x) / 3, (parent.level + 2 * child.level) / 3 - 0.12
    label = f"{100 * child.node.share:.0f} %"
    axis.text(*middle, label, fontsize=7, ha="center", va="center", zorder=4, bbox=_BARE)


_BARE = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6}


def _side(placed: list[Placed], level: int, points: float) -> float:
    """Of a level's patches in points: small enough that neighbours and their frames fit."""
    across = sorted(item.x for item in placed if item.level == level)
    gap = min((right - left for left, right in pairwise(across)), default=1.0)
    return max(1.0, min(PATCH, gap * points - FRAME))


def _draw_patch(axis: Any, item: Placed, original: Image.Image, colour: str, side: float) -> None:
    from matplotlib.offsetbox import AnnotationBbox, OffsetImage

    top, left, bottom, right = item.node.capsule.shown
    patch = original.crop((left, top, right, bottom))
    zoom = side / max(patch.size)
    picture_box = OffsetImage(np.asarray(patch), zoom=zoom, interpolation="nearest")
    # filled: the patch's pixels do not end where the frame begins, and white would show between
    frame = {"edgecolor": colour, "facecolor": colour, "linewidth": 1.5}
    axis.add_artist(AnnotationBbox(picture_box, (item.x, item.level), pad=0.1, bboxprops=frame))


def _draw_decisions(figure: Any, explanation: Explanation) -> None:
    axis = figure.subplots()
    figure.subplots_adjust(left=0.09, right=0.62, top=0.86, bottom=0.22)
    for index, layer in enumerate(explanation.layers):
        # side by side, lest equal curves hide each other
        aside = DODGE * (index - (len(explanation.layers) - 1) / 2)
        rounds = [number + 1 + aside for number in range(len(layer.entropy))]
        look = {"marker": MARKERS[index % len(MARKERS)], "color": GREYS[index % len(GREYS)]}
        axis.plot(rounds, layer.entropy, "--", markerfacecolor="none", alpha=0.7, **look)
        used = slice(layer.used)
        label = _decision(explanation, layer)
        axis.plot(rounds[used], layer.entropy[used], "-", label=label, **look)
    axis.set(xlabel="iteration", ylabel="entropy / log M", ylim=(-0.05, 1.1))
    axis.set_xticks(range(1, max(len(layer.entropy) for layer in explanation.layers) + 1))
    axis.set_title("how decided the routing is (filled: reaches the scores)", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


DODGE = 0.035  # iterations between the curves of two layers
MARKERS = "osD^v"
GREYS = ("#8a8a94", "#1b1b1f", SOFT)  # of layers: colours are classes'


def _write_decisions(figure: Any, explanation: Explanation) -> None:
    """Where every curve would be a line at 1."""
    title = f"how decided the routing is: entropy at least {FLAT} log M in every layer"
    lines = [_decision(explanation, layer) for layer in reversed(explanation.layers)]
    figure.text(0.02, 0.95, title, fontsize=10, va="top")
    top = 0.95 - 1.3 / (len(lines) + 2.5)
    figure.text(0.02, top, "\n".join(lines), fontsize=8, va="top", linespacing=1.5)


def _decision(explanation: Explanation, layer: Decision) -> str:
    lost = "" if layer.never_win is None else f", {100 * layer.never_win:.0f} % never win"
    return f"{explanation.layer_name(layer.layer)}: {layer.state}{lost}"
