"""DiverseMultiMNIST (Tsai et al. 2020, appendix B.2), generated in batches on any device.

A 36×36 canvas holds one digit with probability 1/6 and two digits of different classes with
probability 5/6. Every digit is shifted by up to 4 pixels each way, all 81 shifts being equally
likely; a pair is the sum of its digits, clipped at 255.

The digit of a single image, and the first digit of a pair, is uniform over the digits of the
source. The second is uniform over the source's digits of the other nine classes. With p_k the
share of class k in the source, class k is therefore in an image with probability

    p_k/6 + 5/6 · (p_k + Σ_{j≠k} p_j · p_k / (1 − p_j)),

which is 1.83 p_k when all classes are equally common: 18.3 % for each digit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from capsroute.data.errors import DataError
from capsroute.data.rng import GeneratorDraws, Purpose, below, image_draws
from capsroute.data.splits import Batch, Split, render_one, resolve_device, row_of

CANVAS = 36
DIGIT = 28
SHIFTS = CANVAS - DIGIT + 1  # positions of a digit on each axis: 4 px either way, and none
AREA = CANVAS * CANVAS
CLASSES = 10
EPOCH = 60_000
"""Images in what the paper calls a step and we call an epoch."""

TEST_SEED = 2020
TEST_IMAGES = 10_000


@dataclass(frozen=True, eq=False)
class DiverseMultiMNIST(Split):
    """An endless source of images; a `Split` whose epochs are 60,000 new images each.

    `render` and `generate` run a dozen kernels on the device, never wait for it and depend on
    nothing but their arguments, so they can be captured in a CUDA graph.

    Placing a digit is one contiguous copy. Each digit is stored with 8 zero columns on its
    right and 8 zero rows below, 36 to a row. Reading 36×36 bytes from `8·36 + 8` or fewer bytes
    before a digit then gives the digit shifted down and right: whatever the window sees beyond
    the digit's edges is the padding of that digit or of the one before it.
    """

    pixels: Tensor
    """uint8, flat: zeros, the digits ordered by class, then a blank digit (singles' second)."""
    labels: Tensor
    """int64 `(digits + 1,)`: class of each digit, 10 for the blank one."""
    class_start: Tensor
    """int64 `(10,)`: position of the first digit of each class."""
    class_size: Tensor
    """int64 `(10,)`."""
    one_hot: Tensor
    """float `(11, 10)`: the target that a digit of each class adds; none for the blank one."""
    length: int = EPOCH
    resident = generated = True

    @classmethod
    def from_digits(cls, digits: Tensor, labels: Tensor, length: int = EPOCH) -> DiverseMultiMNIST:
        """A source over uint8 `digits` `(n, 28, 28)` and their int64 `labels` `(n,)`."""
        if digits.dtype != torch.uint8:
            raise DataError(f"`digits` is {digits.dtype}; expected uint8 in [0, 255]")
        if digits.shape[1:] != (DIGIT, DIGIT) or len(digits) != len(labels):
            raise DataError(
                f"`digits` has shape {tuple(digits.shape)} and `labels` {tuple(labels.shape)}; "
                f"expected (n, {DIGIT}, {DIGIT}) and (n,)"
            )
        order = torch.argsort(labels, stable=True)
        size = torch.bincount(labels, minlength=CLASSES)
        if len(size) > CLASSES or int((size > 0).sum()) < 2:
            raise DataError(
                f"`labels` holds classes {labels.unique().tolist()}; "
                f"expected two classes at least, of 0 to {CLASSES - 1}"
            )
        margin = CANVAS - DIGIT
        padded = F.pad(digits[order], (0, margin, 0, margin)).flatten()
        return cls(
            pixels=F.pad(padded, (margin * CANVAS + margin, AREA)),
            labels=F.pad(labels[order], (0, 1), value=CLASSES),
            class_start=size.cumsum(0) - size,
            class_size=size,
            one_hot=torch.eye(CLASSES + 1, CLASSES),
            length=length,
        )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        """Image `index` of one epoch, the same whenever asked; `TrainBatches` makes new ones."""
        row = row_of(self, index)
        draws = image_draws(0, 0, row, row + 1)
        return render_one(self, torch.cat([torch.tensor([[row]]), draws], dim=1))

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    def to(self, device: torch.device | str) -> DiverseMultiMNIST:
        where = resolve_device(device)
        moved: dict[str, Any] = {
            name: value.to(where) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def render(self, plan: Tensor) -> tuple[Tensor, Tensor]:
        """Images and targets of a plan (see `TrainBatches.plan`)."""
        images, targets, _ = self.generate(plan[:, 1:])
        return images, targets

    def generate(self, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images, targets and placed digits from random numbers.

        `draws` is int64 `(n, 5 or more)` with values in [0, 2³²), on the source's device, as
        `image_draws` gives it, or `torch.randint(2**32, (n, 8), device=…, generator=…)`.

        Returns uint8 images `(n, 1, 36, 36)`; float multi-hot targets `(n, 10)`; and the placed
        digits, uint8 `(n, 2, 36, 36)`, before they were added: masks of what belongs to whom.
        A single image's second digit is blank.
        """
        chosen, shifts = self.choose(draws)
        offset = (shifts // SHIFTS) * CANVAS + shifts % SHIFTS
        margin = (SHIFTS - 1) * (CANVAS + 1)
        start = (chosen * AREA + margin - offset).flatten()
        windows = self.pixels.unfold(0, AREA, 1)
        placed = windows.index_select(0, start).view(len(draws), 2, CANVAS, CANVAS)
        first, second = placed[:, :1], placed[:, 1:]
        images = first + torch.minimum(second, ~first)  # ~x is 255 − x: the sum stops at 255
        targets = self.one_hot[self.labels[chosen]].sum(1)
        return images, targets, placed

    def choose(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Which digits, and where: two int64 tensors `(n, 2)`.

        The first holds positions in `labels`; the second, shifts in [0, 81): row · 9 + column of
        the digit's upper left corner.
        """
        blank = len(self.labels) - 1
        first = below(draws[:, GeneratorDraws.FIRST], blank)
        kind = self.labels[first]
        start, size = self.class_start[kind], self.class_size[kind]
        # a uniform position among the digits outside [start, start + size)
        other = below(draws[:, GeneratorDraws.SECOND], blank - size)
        other = other + size * (other >= start)
        single = below(draws[:, GeneratorDraws.SINGLE], 6) == 0
        second = other.masked_fill(single, blank)
        shifts = below(draws[:, GeneratorDraws.SHIFTS], SHIFTS * SHIFTS)
        return torch.stack([first, second], dim=1), shifts

    def fixed_set(
        self, count: int = TEST_IMAGES, seed: int = TEST_SEED
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `generate` returns for `count` images that are the same bytes everywhere.

        They are made on the CPU whatever the source's device; move them where they are needed.
        """
        draws = image_draws(seed, 0, 0, count, purpose=Purpose.FIXED_SET)
        return self.to("cpu").generate(draws)
