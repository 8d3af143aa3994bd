"""How well heat maps tell two overlapping digits apart.

Each image holds two digits of different classes. Among the pixels that only one of the two
covers, the share of a class's heat that lies on its own digit: 1 is perfect, and any map that
does not depend on the class gets 0.5 on average, whatever it looks like.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from capsroute.data.diverse_multimnist import TEST_IMAGES, TEST_SEED, DiverseMultiMNIST
from capsroute.data.mnist import load_mnist
from capsroute.data.rng import Purpose, image_draws
from capsroute.explain.heat import EM_MAPS, ROUTING_MAPS, gradient_maps
from capsroute.explain.trace import trace
from capsroute.models.base import CapsuleClassifier
from capsroute.progress import Progress

CHOICE_SEED = 77
"""Of the images, made from training digits, on which the default map was chosen."""
BATCH = 50


@dataclass(frozen=True)
class Pairs:
    """Images of two digits: floats (n, 1, H, W), classes (n, 2), and each digit's own pixels."""

    images: Tensor
    classes: Tensor
    digits: Tensor


def two_digit_images(count: int, *, split: str = "test") -> Pairs:
    """The first `count` images of two digits.

    `test`: of the test set that every run is measured on. `choice`: made from training digits.
    """
    if count < 1:
        raise ValueError(f"`count` must be at least 1, got {count}")
    # five in six hold two, so this many are enough; the first of them are always the same
    drawn = min(TEST_IMAGES, 2 * count + 50)
    arrays = load_mnist()
    if split == "test":
        source = DiverseMultiMNIST.from_digits(arrays.test_images, arrays.test_labels)
        seed = TEST_SEED
    else:
        source = DiverseMultiMNIST.from_digits(arrays.train_images, arrays.train_labels)
        seed = CHOICE_SEED
    images, targets, digits = source.fixed_set(drawn, seed)
    pairs = (targets.sum(dim=1) == 2).nonzero()[:, 0]
    if count > len(pairs):
        raise ValueError(f"`count` must be at most {len(pairs)}, the pairs there are, got {count}")
    chosen, _ = source.choose(image_draws(seed, 0, 0, drawn, purpose=Purpose.FIXED_SET))
    rows = pairs[:count]
    classes = source.labels[chosen][rows]
    return Pairs(images[rows].float() / 255.0, classes, digits[rows])


@dataclass(frozen=True)
class Separation:
    """Of one map over all images and both of their classes."""

    share: float
    """Mean share of a class's heat on its own digit."""
    error: float
    """Standard error of that mean, over images."""
    share_where_right: float | None
    """The same over the images whose two digits the model named; None if there is none."""


def measure_separation(
    model: CapsuleClassifier, pairs: Pairs, progress: Progress | None = None
) -> tuple[dict[str, Separation], float]:
    """Of every map that the model has, and the percentage of images whose two digits were named."""
    device = next(model.parameters()).device
    shares: dict[str, list[Tensor]] = {}
    right: list[Tensor] = []
    total = len(pairs.images)
    for first in range(0, total, BATCH):
        rows = slice(first, first + BATCH)
        images, classes = pairs.images[rows].to(device), pairs.classes[rows].to(device)
        digits = pairs.digits[rows].to(device) > 0
        routed = trace(model, images)
        right.append(_named_both(model, routed.routing.scores, classes))
        both = []
        for index in range(2):
            own, other = digits[:, index], digits[:, 1 - index]
            maps = {
                name: draw(routed, classes[:, index])
                for name, draw in ROUTING_MAPS.items()
                if routed.is_linear or name in EM_MAPS
            }
            maps |= gradient_maps(model, images, classes[:, index])
            both.append({name: _own_share(heat, own, other) for name, heat in maps.items()})
        for name in both[0]:
            shares.setdefault(name, []).append((both[0][name] + both[1][name]).cpu() / 2)
        if progress is not None:
            progress(min(first + BATCH, total), total)
    named = torch.cat(right)
    summary = {name: _summary(torch.cat(parts), named) for name, parts in shares.items()}
    return summary, 100.0 * int(named.sum()) / len(named)


def _own_share(heat: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """(B,): of the heat where one digit is alone, the part where it is this one."""
    mine = (heat * (own & ~other)).sum(dim=(1, 2), dtype=torch.float64)
    both = (heat * (own ^ other)).sum(dim=(1, 2), dtype=torch.float64)
    # no heat on either says nothing: chance
    return torch.where(both > 0, mine / both.clamp_min(1e-300), 0.5)


def _named_both(model: CapsuleClassifier, scores: Tensor, classes: Tensor) -> Tensor:
    wanted = torch.zeros_like(scores, dtype=torch.bool).scatter(1, classes, True)
    return (model.decide(scores) == wanted).all(dim=1).cpu()


def _summary(shares: Tensor, right: Tensor) -> Separation:
    count = len(shares)
    error = (shares.std() / count**0.5).item() if count > 1 else float("nan")
    where_right = shares[right].mean().item() if right.any() else None
    return Separation(shares.mean().item(), error, where_right)
