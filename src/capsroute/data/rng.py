"""Random numbers as a pure function of (seed, purpose, step, image).

Philox is a counter-based generator: the counter is the position, so any draw can be made
without those before it. A run therefore resumes from its step number alone, and each of
several processes draws exactly the numbers of its own images. NumPy keeps the raw stream of a
bit generator fixed for ever (NEP 19), which neither `torch.Generator` nor the distributions of
`numpy.random.Generator` promise: the same seed means the same data on every machine.
"""

from __future__ import annotations

import operator
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

DRAWS = 8
"""32-bit draws for each image: one Philox block of four 64-bit words."""


class Purpose(IntEnum):
    """Separate streams, so that one seed never uses the same numbers twice."""

    SHUFFLE = 1
    IMAGES = 2
    SPLIT = 3
    FIXED_SET = 4
    AUGMENT_GENERATED = 5


class AugmentDraws:
    """The columns of an image's draws that augmentation reads; its parts share none."""

    CROP = slice(0, 2)
    FLIP = 2
    CUTOUT = slice(3, 5)
    PARTNER = 5
    RECTANGLE = slice(6, 8)


class GeneratorDraws:
    """The columns that DiverseMultiMNIST reads, from draws other than those of augmentation.

    If they were the same, the place of an image's crop would tell which digit it shows.
    """

    SINGLE = 0
    FIRST = 1
    SECOND = 2
    SHIFTS = slice(3, 5)


def image_draws(
    seed: int, step: int, start: int, stop: int, *, purpose: Purpose = Purpose.IMAGES
) -> Tensor:
    """The draws of images `start … stop` of batch `step`: int64 `(images, 8)` in [0, 2³²)."""
    words = _philox(seed, purpose, step, start).random_raw(DRAWS // 2 * (stop - start))
    draws = words.astype("<u8", copy=False).view("<u4").astype(np.int64)
    return torch.from_numpy(draws.reshape(-1, DRAWS))


def below(draws: Tensor, limit: int | Tensor) -> Tensor:
    """Draws in [0, 2³²) to integers in [0, limit), uniform to within limit / 2³²."""
    return (draws * limit) >> 32


def random_keys(seed: int, purpose: Purpose, index: int, count: int) -> np.ndarray:
    """`count` random 64-bit keys, to sort by."""
    return _philox(seed, purpose, index, 0).random_raw(count)


def permutation(seed: int, epoch: int, count: int) -> Tensor:
    """The order in which epoch `epoch` visits `count` images."""
    keys = random_keys(seed, Purpose.SHUFFLE, epoch, count)
    return torch.from_numpy(np.argsort(keys, kind="stable"))


def check_seed(seed: int) -> int:
    """`seed` as an int that Philox takes as its key."""
    value = operator.index(seed)
    if not 0 <= value < 2**64:
        raise ValueError(f"`seed` (={seed}) must be in [0, 2**64)")
    return value


def _philox(seed: int, purpose: Purpose, step: int, start: int) -> np.random.Philox:
    key = np.array([check_seed(seed), int(purpose)], dtype=np.uint64)
    return np.random.Philox(key=key, counter=start + (step << 64))
