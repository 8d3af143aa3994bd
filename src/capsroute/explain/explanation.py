"""`explain`: one image, its classes, and what the routing says about them."""

import base64
import io
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from capsroute.explain.decided import Decision, decisions
from capsroute.explain.fields import primary_fields
from capsroute.explain.flow import follow, rivals
from capsroute.explain.heat import MAPS, default_map
from capsroute.explain.trace import check_explainable, trace
from capsroute.explain.tree import Link, Node, grow_tree, layer_pixels, links_of
from capsroute.models.base import ImageClassifier, class_names_of, evaluating, unwrapped
from capsroute.nearest import nearest

# Okabe and Ito's colours, told apart by colour-blind eyes too; class after class
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True)
class Explanation:
    """How an image was routed, for the classes that were asked for."""

    model: str
    iterations: int | None
    class_names: list[str]
    """Names of all classes."""
    probabilities: list[float]
    """Probabilities of all classes."""
    predicted: list[int]
    """The predicted classes, most likely first."""
    classes: list[int]
    """The classes explained here."""
    map: str
    """Which heat map: a name in `MAPS`."""
    heat: dict[int, np.ndarray]
    """For each of `classes`, (H, W) floats in [0, 1]; 1 is the hottest pixel of that class."""
    rivals: dict[int, int]
    """For each of `classes`, the class that its heat contrasts it with; only for `contrast`."""
    trees: dict[int, Node]
    """For each of `classes`, its parse tree."""
    layers: list[Decision]
    """How decided each routed layer is, from the bottom up."""
    sees_most: bool
    """Whether a primary capsule sees more than half of the image."""

    @property
    def answer(self) -> str:
        """The classes predicted, in words."""
        return ", ".join(self.class_names[index] for index in self.predicted) or "nothing"

    @property
    def links(self) -> list[Link]:
        """The strongest child-parent links of every class, parents first."""
        return [link for index in self.classes for link in links_of(index, self.trees[index])]

    def colour(self, class_index: int) -> str:
        return COLOURS[self.classes.index(class_index) % len(COLOURS)]

    def told_from(self, class_index: int) -> str:
        """Which class its heat holds it against, in words; nothing where there is none."""
        rival = self._rival_name(class_index)
        return "" if rival is None else f"what tells it from {rival}"

    def _rival_name(self, class_index: int) -> str | None:
        rival = self.rivals.get(class_index)
        return None if rival is None else self.class_names[rival]

    def layer_name(self, layer: int) -> str:
        if layer == len(self.layers):
            return "class capsules"
        return f"capsule layer {layer}" if layer else "primary capsules"

    def notes(self) -> list[str]:
        """What to know before trusting the pictures."""
        even = [layer for layer in self.layers if layer.even]
        hardly = [layer for layer in self.layers if not layer.routed and not layer.even]
        lost = [
            f"{100 * layer.nobody:.2g} % under {self.layer_name(layer.layer)}"
            for layer in self.layers
            if layer.nobody
        ]
        notes = [f"Went to no parent: {', '.join(lost)}."] if lost else []
        if len(even) == len(self.layers):
            return [
                *notes,
                "No layer routed: every parent got the same share of every child, so what is "
                "shown comes from the votes alone.",
            ]
        if hardly:
            most = max(hardly, key=lambda layer: layer.deviation).deviation_percent
            none_routed = len(even) + len(hardly) == len(self.layers)
            so = ", so what is shown comes almost from the votes alone" if none_routed else ""
            notes.append(
                f"Hardly routed: {self._names(hardly)}. Shares differ from even by at most "
                f"{most}{so}."
            )
        if even:
            notes.append(
                f"Shared evenly, not routed: {self._names(even)}. With {self.iterations} "
                "iterations, what lower layers would learn later never reaches the scores."
            )
        return notes

    def _names(self, layers: list[Decision]) -> str:
        return ", ".join(self.layer_name(layer.layer) for layer in layers)

    def carried(self, class_index: int) -> float:
        """The part of all that spoke for a class that the links shown to it carry."""
        return sum(child.share for child in self.trees[class_index].children)

    def tree_caption(self, class_index: int) -> str:
        """How much of a class its tree shows."""
        shown, carried = len(self.trees[class_index].children), self.carried(class_index)
        return (
            f"{shown} of {self.layers[-1].children} links to {self.class_names[class_index]} are "
            f"shown, with {100 * carried:.0f} % of all that spoke for it"
        )

    @property
    def patches(self) -> str:
        """What the pictures of a tree's capsules show."""
        if self.sees_most:
            return (
                "what lies around each capsule's place; through the backbone it sees more than "
                "half of the image"
            )
        return "the pixels that each capsule sees"

    def as_dict(self) -> dict[str, Any]:
        """The explanation as a dictionary that JSON can hold.

        `classes[i].heat` is a PNG data URI at the model's image size, to lay over the picture: the
        class's colour, with the heat (0 to 255) as its opacity. Boxes are pixels
        [top, left, bottom, right), the last two excluded: `box` is what a capsule sees, `shown`
        what to draw for it.
        """
        return {
            "model": self.model,
            "iterations": self.iterations,
            "map": self.map,
            "predicted": [self.class_names[index] for index in self.predicted],
            "classes": [
                {
                    "index": index,
                    "name": self.class_names[index],
                    "probability": self.probabilities[index],
                    "colour": self.colour(index),
                    "heat": png_uri(overlay(self.heat[index], self.colour(index))),
                    "rival": self._rival_name(index),
                    "carried": self.carried(index),
                    "caption": self.tree_caption(index),
                }
                for index in self.classes
            ],
            "patches": self.patches,
            "links": [link.as_dict() for link in self.links],
            "layers": [
                {"name": self.layer_name(layer.layer), **layer.as_dict()} for layer in self.layers
            ],
            "notes": self.notes(),
        }


def explain(
    model: ImageClassifier,
    image: Tensor,
    classes: Sequence[int | str] | int | str | None = None,
    *,
    map: str | None = None,
) -> Explanation:
    """Explain what a capsule network (inverted, dynamic or EM) sees in an image.

    Args:
        model: run in evaluation mode; its weights, statistics and mode are left as they are.
        image: (C, H, W), floats in [0, 1], as `Predictor.prepare` makes it from a picture.
        classes: name or index of the class to explain, or several of them; by default those
            predicted, or the likeliest if there are none.
        map: the heat map, a name in `MAPS`; by default, `default_map` chooses.
    """
    model = unwrapped(model)
    check_explainable(model)
    if map is not None and map not in MAPS:
        raise ValueError(f"`map` must be one of {', '.join(MAPS)}, got {map!r}")
    _check_image(image)
    asked = [] if classes is None else _class_indices(classes, class_names_of(model))
    with evaluating(model), torch.inference_mode(False):  # the heat is made of gradients
        image = image.clone().to(next(model.parameters()).device)
        return _explain(model, image, asked, map)


def _explain(
    model: ImageClassifier, image: Tensor, asked: list[int], map: str | None
) -> Explanation:
    traced = trace(model, image[None])
    probabilities = model.probabilities(traced.routing.scores)[0].tolist()
    answer = model.decide(traced.routing.scores)[0].tolist()
    ranked = sorted(range(model.num_classes), key=lambda index: -probabilities[index])
    predicted = [index for index in ranked if answer[index]]
    chosen = asked or predicted or ranked[:1]
    fields = primary_fields(traced.model)
    pixels = layer_pixels(fields, traced.layers, model.image_size)
    map = map or default_map(traced.model)
    heat, against, trees = {}, {}, {}
    for index in chosen:
        which = torch.tensor([index], device=image.device)
        heat[index] = _to_unit(MAPS[map](traced, which)[0])
        if map == "contrast" and model.num_classes > 1:
            # of the scores that the heat is of: rounding may part them from the model's own
            against[index] = int(rivals(traced.rebuilt.scores, which))
        links = [link[0] for link in follow(traced, which).links]
        trees[index] = grow_tree(index, traced.layers, links, pixels)
    return Explanation(
        model=model.name,
        iterations=model.iterations,
        class_names=class_names_of(model),
        probabilities=probabilities,
        predicted=predicted,
        classes=chosen,
        map=map,
        heat=heat,
        rivals=against,
        trees=trees,
        layers=decisions(traced.routing.coefficients, traced.routing.used),
        sees_most=fields.see_most(model.image_size),
    )


def _class_indices(classes: Any, names: list[str]) -> list[int]:
    # one index may come as NumPy and PyTorch count, such as `scores.argmax()`
    if isinstance(classes, int | str) or getattr(classes, "ndim", None) == 0:
        classes = [classes]
    try:
        indices = [_class_index(one, names) for one in classes]
    except TypeError:
        raise ValueError(f"`classes` must name classes, or count them, got {classes!r}") from None
    return list(dict.fromkeys(indices))


def _class_index(one: int | str, names: list[str]) -> int:
    if isinstance(one, str):
        if one not in names:
            raise ValueError(f"`classes` must name classes, got {one!r}{nearest(one, names)}")
        return names.index(one)
    index = operator.index(one)  # JSON takes Python's integers alone
    if not 0 <= index < len(names):
        raise ValueError(f"`classes` must be between 0 and {len(names) - 1}, got {index}")
    return index


def _check_image(image: Tensor) -> None:
    if not isinstance(image, Tensor):
        raise TypeError(
            f"`image` must be a tensor (C, H, W), got {type(image).__name__}; "
            "`Predictor.prepare` makes one of a picture"
        )
    if image.ndim != 3:
        raise ValueError(f"`image` must have shape (C, H, W), got {tuple(image.shape)}")


def _to_unit(heat: Tensor) -> np.ndarray:
    values = heat.detach().cpu().double().numpy()
    return values / max(values.max(), 1e-30)


def overlay(heat: np.ndarray, colour: str) -> Image.Image:
    """The colour, as opaque as the heat."""
    rgb = [int(colour[start : start + 2], 16) for start in (1, 3, 5)]
    pixels = np.empty((*heat.shape, 4), dtype=np.uint8)
    pixels[..., :3] = rgb
    pixels[..., 3] = np.rint(255 * heat)
    return Image.fromarray(pixels)


def picture(image: Tensor) -> Image.Image:
    """A prepared image, (C, H, W) in [0, 1], as one to look at."""
    _check_image(image)
    pixels = (image.detach().cpu().clamp(0, 1) * 255).round().byte()
    if len(pixels) not in (1, 3):  # neither grey nor colour: the mean of the channels
        pixels = pixels.float().mean(dim=0, keepdim=True).round().byte()
    array = pixels.permute(1, 2, 0).numpy()
    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).convert("RGB")


def png_uri(image: Image.Image) -> str:
    data = io.BytesIO()
    image.save(data, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
