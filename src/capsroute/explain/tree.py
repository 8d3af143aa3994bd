"""The parse tree of a class: the links that gave most to it, from the class down to the image."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capsroute.explain.fields import Box, Fields
from capsroute.explain.trace import Layer

WIDTHS = (3, 2)  # children shown of a class, and of every capsule below it


@dataclass(frozen=True)
class Capsule:
    """One capsule and its pixels. Layer 0 holds the primary capsules."""

    layer: int
    row: int
    column: int
    capsule: int
    box: Box
    """What it sees."""
    shown: Box
    """What stands for it in a picture: that, or what lies around its place."""

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "box": list(self.box), "shown": list(self.shown)}


@dataclass(frozen=True)
class Node:
    """A capsule in a class's tree."""

    capsule: Capsule
    share: float
    """Its part of all that spoke for its parent; 1 for the class itself."""
    coefficient: float
    """Routing coefficient of the link to its parent; 1 for the class itself."""
    children: list["Node"] = field(default_factory=list)

    def walk(self) -> Iterator["Node"]:
        """This node, then all below it."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Link:
    """A child and a parent of one class's tree."""

    class_index: int
    child: Capsule
    parent: Capsule
    share: float
    coefficient: float

    def as_dict(self) -> dict[str, Any]:
        ends = {"child": self.child.as_dict(), "parent": self.parent.as_dict()}
        return {**vars(self), **ends}


def links_of(class_index: int, root: Node) -> list[Link]:
    """Every link of a tree, parents before their children."""
    return [
        Link(class_index, child.capsule, node.capsule, child.share, child.coefficient)
        for node in root.walk()
        for child in node.children
    ]


def layer_fields(primary: Fields, layers: Sequence[Layer]) -> list[Fields]:
    """Receptive fields of the primary capsules and of every layer above them."""
    fields = [primary]
    for layer in layers:
        fields.append(fields[-1].seen_through(layer))
    return fields


class Pixels(NamedTuple):
    """What the capsules of a layer see, and what is shown of it."""

    seen: Fields
    shown: Fields

    def capsule(self, layer: int, row: int, column: int, capsule: int) -> Capsule:
        boxes = self.seen.box(row, column), self.shown.box(row, column)
        return Capsule(layer, row, column, capsule, *boxes)


def layer_pixels(
    primary: Fields, layers: Sequence[Layer], image_size: tuple[int, int]
) -> list[Pixels]:
    """Of the primary capsules and of every layer above them.

    Capsules that see most of the image would all look alike, so their places are shown instead.
    """
    shown = primary.places(image_size) if primary.see_most(image_size) else primary
    pairs = zip(layer_fields(primary, layers), layer_fields(shown, layers), strict=True)
    return [Pixels(*pair) for pair in pairs]


def grow_tree(
    class_index: int, layers: Sequence[Layer], links: Sequence[Tensor], pixels: Sequence[Pixels]
) -> Node:
    """The tree of one class of one image.

    `links` are `Flow.links` of that class, without the batch; what speaks against a parent is not
    shown.
    """
    root = Node(pixels[-1].capsule(len(layers), 0, 0, class_index), 1.0, 1.0)
    level = [root]
    for depth in range(len(layers)):
        index = len(layers) - 1 - depth
        width = WIDTHS[min(depth, len(WIDTHS) - 1)]
        for node in level:
            found = _strongest(node.capsule, layers[index], links[index], pixels[index], width)
            node.children.extend(found)
        level = [child for node in level for child in node.children]
    return root


def _strongest(
    parent: Capsule, layer: Layer, links: Tensor, pixels: Pixels, width: int
) -> list[Node]:
    """The children that gave most to a parent, strongest first."""
    position = () if layer.linear else (parent.row, parent.column)
    mine = (*position, Ellipsis, parent.capsule)
    parts, r = links[mine].clamp_min(0.0).flatten(), layer.coefficients[0][mine].flatten()
    total = parts.sum().item()
    if not total > 0:
        return []
    strength, order = torch.topk(parts, min(width, len(parts)))
    return [
        Node(_child(index, parent, layer, pixels), part / total, r[index].item())
        for part, index in zip(strength.tolist(), order.tolist(), strict=True)
        if part > 0
    ]


def _child(index: int, parent: Capsule, layer: Layer, pixels: Pixels) -> Capsule:
    """The child that a parent's flattened window holds at `index`."""
    _, columns, capsules = layer.children
    position, capsule = divmod(index, capsules)
    if layer.linear:
        row, column = divmod(position, columns)
    else:
        y, x = divmod(position, layer.kernel)
        row, column = parent.row * layer.stride + y, parent.column * layer.stride + x
    return pixels.capsule(parent.layer - 1, row, column, capsule)


@dataclass(frozen=True)
class Placed:
    """A node on a unit-wide drawing: x from 0 to 1, level 0 at the top."""

    node: Node
    x: float
    level: int
    parent: int | None
    """Position of the parent in the list."""


def place(root: Node) -> list[Placed]:
    """Leaves evenly spaced, parents over the middle of their children; parents first."""
    leaves = sum(1 for node in root.walk() if not node.children)
    placed: list[Placed] = []
    done = 0

    def put(node: Node, level: int, parent: int | None) -> float:
        nonlocal done
        here = len(placed)
        placed.append(Placed(node, 0.0, level, parent))
        if node.children:
            across = [put(child, level + 1, here) for child in node.children]
            x = (across[0] + across[-1]) / 2
        else:
            x = (done + 0.5) / leaves
            done += 1
        placed[here] = Placed(node, x, level, parent)
        return x

    put(root, 0, None)
    return placed
