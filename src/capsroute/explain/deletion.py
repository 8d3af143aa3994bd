"""How much of an answer hangs on what a heat map calls hot.

A share of the pixels is blurred and the model asked again. Of a map that shows what the model went
by, the hottest pixels cost the predicted class more of its probability than the coldest, and more
than as many pixels of the same shape in the wrong place: those that are hottest for another image.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from capsroute.explain.heat import MAPS, gradient_maps
from capsroute.explain.trace import trace
from capsroute.models.base import ImageClassifier
from capsroute.progress import Progress

SHARE = 0.2  # of the pixels
BATCH = 25
BASELINE = "gradient_times_input_smoothed"


@dataclass(frozen=True)
class Deletion:
    """Of one map over all images: how much probability the predicted class loses, on average."""

    hottest: float
    """With the hottest pixels blurred."""
    misplaced: float
    """With those blurred that are hottest for another image."""
    coldest: float
    """With the coldest pixels blurred."""
    gain: float
    """`hottest` less `misplaced`."""
    error: float
    """Standard error of `gain`, over images."""
    kept: float
    """The probability that is left when all but the hottest pixels are blurred."""


def measure_deletion(
    model: ImageClassifier, images: Tensor, names: list[str], progress: Progress | None = None
) -> dict[str, Deletion]:
    """Of the named maps and some that know nothing, on images (n, C, H, W), floats in [0, 1].

    Each image's other image lies half of all images on; where they are sorted by class, it is of
    another one.
    """
    blurred = blur(images)
    before, classes = _probabilities(model, images).max(dim=1)
    found = {}
    for name, heat in _maps(model, images, classes, names, progress).items():
        hot, cold = hottest(heat), hottest(heat, largest=False)
        other = hot.roll(len(images) // 2, dims=0)
        own, misplaced, coldest, kept = (
            _probability(model, torch.where(gone, blurred, images), classes)
            for gone in (hot, other, cold, ~hot)
        )
        gain = misplaced - own
        found[name] = Deletion(
            hottest=(before - own).mean().item(),
            misplaced=(before - misplaced).mean().item(),
            coldest=(before - coldest).mean().item(),
            gain=gain.mean().item(),
            error=(gain.std() / len(gain) ** 0.5).item(),
            kept=kept.mean().item(),
        )
    return found


def hottest(heat: Tensor, *, largest: bool = True) -> Tensor:
    """(n, H, W) to a mask (n, 1, H, W) of the hottest (or coldest) pixels of each image.

    Of pixels that are equally cold, those are coldest that are furthest from any heat.
    """
    ranked = (heat + 1e-3 * blur(heat[:, None])[:, 0]).flatten(1)
    chosen = ranked.topk(round(SHARE * ranked.shape[1]), dim=1, largest=largest).indices
    mask = torch.zeros_like(ranked, dtype=torch.bool).scatter(1, chosen, True)
    return mask.view_as(heat)[:, None]


def blur(images: Tensor) -> Tensor:
    """By a Gaussian as wide as an eighth of the image, which leaves its colours."""
    channels, sigma = images.shape[1], max(images.shape[2:]) / 8
    reach = min(int(3 * sigma), min(images.shape[2:]) - 1)
    weights = torch.exp(-(torch.arange(-reach, reach + 1) ** 2) / (2 * sigma**2)).to(images)
    weights = (weights / weights.sum()).expand(channels, 1, -1)
    padded = F.pad(images, [reach] * 4, mode="replicate")
    down = F.conv2d(padded, weights[..., None], groups=channels)
    return F.conv2d(down, weights[:, :, None], groups=channels)


def _maps(
    model: ImageClassifier,
    images: Tensor,
    classes: Tensor,
    names: list[str],
    progress: Progress | None,
) -> dict[str, Tensor]:
    drawn: dict[str, list[Tensor]] = {}
    for first in range(0, len(images), BATCH):
        rows = slice(first, first + BATCH)
        traced = trace(model, images[rows])
        maps = {name: MAPS[name](traced, classes[rows]) for name in names}
        maps[BASELINE] = gradient_maps(model, images[rows], classes[rows])[BASELINE]
        for name, heat in maps.items():
            drawn.setdefault(name, []).append(heat)
        if progress is not None:
            progress(min(first + BATCH, len(images)), len(images))
    return {name: torch.cat(parts) for name, parts in drawn.items()} | _blind(images)


def _blind(images: Tensor) -> dict[str, Tensor]:
    """Maps that look at neither image nor model."""
    generator = torch.Generator().manual_seed(0)
    height, width = images.shape[2:]
    anywhere = torch.rand(len(images), height, width, generator=generator)
    row, column = (torch.linspace(-1, 1, side) for side in (height, width))
    middle = 2 - row[:, None] ** 2 - column**2
    return {
        "middle_of_the_image": middle.expand(len(images), height, width),
        "random_pixels": anywhere,
    }


@torch.no_grad()
def _probabilities(model: ImageClassifier, images: Tensor) -> Tensor:
    return torch.cat([model.probabilities(model(batch)) for batch in images.split(BATCH)])


def _probability(model: ImageClassifier, images: Tensor, classes: Tensor) -> Tensor:
    return _probabilities(model, images).gather(1, classes[:, None])[:, 0]
