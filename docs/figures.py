"""Draws the pictures of docs/routing.md: `python docs/figures.py`."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from capsroute.ops.schedule import light_cone

PICTURES = Path(__file__).parent / "pictures"
BLUE, GREY = "#3f51b5", "#c9ccd6"


def draw_light_cone(iterations: int = 5, layers: int = 3) -> Figure:
    """Iterations across, layers up; what reaches the scores is filled."""
    figure = Figure(figsize=(7, 3.1), layout="constrained")
    axes = figure.subplots()
    needed = light_cone(iterations, layers)
    for layer in range(1, layers + 1):
        for turn in range(1, iterations + 1):
            used = turn <= needed[layer - 1]
            axes.scatter(
                turn,
                layer,
                s=420,
                color=BLUE if used else "white",
                edgecolor=BLUE if used else GREY,
            )
            _arrows(axes, turn, layer, iterations, needed)
    names = [f"capsules {layer}" for layer in range(1, layers)] + ["classes"]
    axes.set(
        xticks=range(1, iterations + 1),
        yticks=range(1, layers + 1),
        yticklabels=names,
        xlabel="iteration",
        xlim=(0.5, iterations + 0.5),
        ylim=(0.5, layers + 0.5),
        title=f"{iterations} iterations: filled updates reach the scores, the others are left out",
    )
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def _arrows(axes, turn: int, layer: int, iterations: int, needed: list[int]) -> None:
    """From an update to those that read it."""
    readers = [(turn + 1, layer), (turn + 1, layer + 1)] if turn < iterations else []
    if turn == 1 and layer < len(needed):
        readers.append((1, layer + 1))  # the first pass goes from the bottom to the top
    for x, y in readers:
        if y > len(needed):
            continue
        used = x <= needed[y - 1] and turn <= needed[layer - 1]
        arrow = FancyArrowPatch(
            (turn, layer),
            (x, y),
            arrowstyle="-|>",
            mutation_scale=9,
            shrinkA=11,
            shrinkB=11,
            color=BLUE if used else GREY,
            linewidth=1.3 if used else 0.8,
        )
        axes.add_patch(arrow)


def draw_step() -> Figure:
    """One child's votes in the plane of two pose elements, and the shares that follow."""
    parents = np.array([[1.7, 0.15], [-0.4, 1.7], [-1.5, -0.9]])
    votes = np.array([[1.6, 0.95], [0.35, 1.05], [0.6, -0.5]])
    agreement = (parents * votes).sum(1) / np.sqrt(2)
    shares = np.exp(agreement) / np.exp(agreement).sum()
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    plane, bars = figure.subplots(1, 2, width_ratios=[3, 2])
    for index, colour in enumerate(("#3f51b5", "#e07a1f", "#2e8b57")):
        _arrow_from_origin(plane, parents[index], colour, "--", f"parent {index + 1}")
        _arrow_from_origin(plane, votes[index], colour, "-", f"vote for {index + 1}")
        bars.bar(index + 1, shares[index], color=colour)
        bars.text(index + 1, shares[index] + 0.02, f"{shares[index]:.2f}", ha="center")
    plane.set(xlim=(-2.7, 2.9), ylim=(-1.6, 2.3), xticks=[], yticks=[], aspect="equal")
    plane.set_title("poses (dashed) and one child's votes", fontsize=10)
    bars.set(xticks=[1, 2, 3], xlabel="parent", ylim=(0, 1.1))
    bars.set_title("the child's shares, by agreement", fontsize=10)
    for axes in (plane, bars):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _arrow_from_origin(axes, to, colour: str, style: str, label: str) -> None:
    axes.add_patch(
        FancyArrowPatch(
            (0, 0), tuple(to), arrowstyle="-|>", mutation_scale=12, color=colour, linestyle=style
        )
    )
    out = 10 * np.asarray(to) / np.linalg.norm(to)  # points beyond the arrow's head
    side = "left" if to[0] > 0 else "right"
    axes.annotate(
        label,
        to,
        xytext=tuple(out),
        textcoords="offset points",
        fontsize=8,
        color=colour,
        ha=side,
        va="center",
    )


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    draw_light_cone().savefig(PICTURES / "light_cone.png", dpi=120)
    draw_step().savefig(PICTURES / "step.png", dpi=120)
