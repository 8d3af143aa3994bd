"""Batches for training and evaluation.

A training batch is a pure function of (seed, step): nothing is carried from one step to the
next, so a run resumes at any step, and each of several processes makes its share of a batch.

    plan(step)     on the CPU: which images, and their random numbers; a few kilobytes
    render(plan)   on the device: gather or generate, augment, convert to float
    batch(step)    the two together

`render` of a resident split never waits for the device, so a CUDA graph can capture it; its
caller then copies each step's plan into the captured buffer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from capsroute.data.augment import Augment, center_crop, cutmix, to_float
from capsroute.data.rng import (
    DRAWS,
    AugmentDraws,
    Purpose,
    below,
    check_seed,
    image_draws,
    permutation,
)
from capsroute.data.splits import Batch, Split, move


class TrainBatches:
    """Shuffled, augmented training batches of `split`, as floats in [0, 1].

    `batch_size` is that of the whole job: process `rank` of `world` gets its share of each
    batch. Random numbers are drawn from (seed, step) for each place in the whole batch, whatever
    the rank: together, the processes see exactly the images, augmented or generated alike, that a
    single process would see, and no image twice.

    Shares differ by at most one image, and some are empty when the last batch of an epoch has
    fewer images than there are processes. Weight a share's mean loss by its number of images
    divided by `global_size(step)`.

    The last batch of an epoch is kept, however short: 50,000 images make 391 steps of 128, the
    last of 80.

    With `cutmix`, that fraction of the images get a rectangle of another image of the split, and
    all targets are rows with a share for each of `classes` classes.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        augment: Augment | None = None,
        cutmix: float = 0.0,
        classes: int = 0,
    ) -> None:
        _check_share(split, batch_size, rank, world)
        if cutmix and classes < 2:
            raise ValueError(f"`classes` (={classes}) must be at least 2 with `cutmix`")
        if batch_size < world:
            raise ValueError(f"`batch_size` (={batch_size}) must be at least `world` (={world})")
        self.split = split
        self.batch_size = batch_size
        self.seed = check_seed(seed)
        self.rank = rank
        self.world = world
        self.augment = augment
        self.cutmix = cutmix
        self.classes = classes
        self._order = lru_cache(maxsize=2)(lambda epoch: permutation(seed, epoch, len(split)))
        self._prepare = _ahead_of_need(split, self._make)

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in an epoch, including a shorter last one."""
        return -(-len(self.split) // self.batch_size)

    def global_size(self, step: int) -> int:
        """Images in batch `step` over all processes."""
        position = step % self.steps_per_epoch
        return min(self.batch_size, len(self.split) - position * self.batch_size)

    def images_before(self, step: int) -> int:
        """Images in all batches before `step`, over all processes."""
        epochs, position = divmod(step, self.steps_per_epoch)
        return epochs * len(self.split) + position * self.batch_size

    def is_whole(self, size: int) -> bool:
        """Whether a batch of so many images is no shorter than the others."""
        return size == self.global_size(0)

    def plan(self, step: int) -> Tensor:
        """This process's share of batch `step`: int64 `(n, 9)` on the CPU.

        Column 0 is an image's index in the split, the others are its random numbers. Images that
        are generated and augmented have eight more, of a stream of their own: the last eight are
        always those of augmentation.
        """
        epoch, position = divmod(step, self.steps_per_epoch)
        start, stop = _share(self.global_size(step), self.rank, self.world)
        first = position * self.batch_size
        rows = self._order(epoch)[first + start : first + stop]
        columns = [rows[:, None], image_draws(self.seed, step, start, stop)]
        if self.split.generated and self.augment is not None:
            purpose = Purpose.AUGMENT_GENERATED
            columns.append(image_draws(self.seed, step, start, stop, purpose=purpose))
        return torch.cat(columns, dim=1)

    def render(self, plan: Tensor) -> Batch:
        """Float images and targets of a plan, or of some rows of one.

        The plan lies on the split's device when the split is resident, on the CPU otherwise.
        """
        images, targets = self._augmented(plan)
        if self.cutmix:
            images, targets = self._mixed(images, targets, plan)
        return to_float(images), targets

    def _augmented(self, plan: Tensor) -> Batch:
        images, targets = self.split.render(plan)
        if self.augment is not None:
            images = self.augment(images, move(plan[:, -DRAWS:], self.split.device))
        return images, targets

    def _mixed(self, images: Tensor, targets: Tensor, plan: Tensor) -> Batch:
        """With rectangles of other images; their indices are random numbers of the plan, too."""
        draws = plan[:, -DRAWS:]
        partners = below(draws[:, AugmentDraws.PARTNER], len(self.split))
        others, their = self._augmented(torch.cat([partners[:, None], plan[:, 1:]], dim=1))
        rectangles = move(draws[:, AugmentDraws.RECTANGLE], self.split.device)
        images, share = cutmix(images, others, rectangles, self.cutmix)
        rows = [F.one_hot(labels, self.classes) for labels in (targets, their)]
        return images, rows[0] + share[:, None] * (rows[1] - rows[0])

    def batch(self, step: int) -> Batch:
        """This process's share of batch `step`, counted from 0 through all epochs."""
        return self._prepare(step)

    def _make(self, step: int) -> Batch:
        return self.render(_where_rendered(self.plan(step), self.split))


class EvalBatches:
    """Batches of every image of `split` once over all processes, in order, as floats in [0, 1].

    `batch_size` is that of one process. `crop` keeps the centre of each image, to match an
    `Augment` that crops.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        rank: int = 0,
        world: int = 1,
        crop: int | None = None,
    ) -> None:
        _check_share(split, batch_size, rank, world)
        self.split = split
        self.batch_size = batch_size
        self.crop = crop
        self.start, self.stop = _share(len(split), rank, world)

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return map(_ahead_of_need(self.split, self._make, len(self)), range(len(self)))

    def size(self, index: int) -> int:
        """Images in batch `index`."""
        return min(self.batch_size, self.stop - self.start - index * self.batch_size)

    def _make(self, index: int) -> Batch:
        first = self.start + index * self.batch_size
        rows = torch.arange(first, first + self.size(index))
        return self.render(_where_rendered(rows, self.split))

    def render(self, rows: Tensor) -> Batch:
        """Float images and targets of some rows of the split, as `TrainBatches.render` does it."""
        images, targets = self.split.render(rows[:, None])
        if self.crop is not None:
            images = center_crop(images, self.crop)
        return to_float(images), targets


class _Ahead:
    """A function of a step whose next values worker threads prepare meanwhile."""

    DEPTH = 3

    def __init__(self, split: Split, make: Callable[[int], Batch], stop: int | None) -> None:
        self.make = make
        self.stop = stop
        self.pending: dict[int, Future[Batch]] = {}
        self.pool = ThreadPoolExecutor(
            min(self.DEPTH, os.cpu_count() or 1), "capsroute-data", _use_device, (split.device,)
        )

    def __call__(self, step: int) -> Batch:
        until = step + self.DEPTH + 1
        wanted = range(step, until if self.stop is None else min(until, self.stop))
        for index in [index for index in self.pending if index not in wanted]:
            self.pending.pop(index).cancel()
        for index in wanted:
            if index not in self.pending:
                self.pending[index] = self.pool.submit(self.make, index)
        return self.pending.pop(step).result()


def _ahead_of_need(
    split: Split, make: Callable[[int], Batch], stop: int | None = None
) -> Callable[[int], Batch]:
    """`make`, prepared ahead by workers unless the device itself makes the batches."""
    return make if split.resident else _Ahead(split, make, stop)


def _use_device(device: torch.device) -> None:
    # pinned memory belongs to the thread's current GPU, which is the first unless told
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _where_rendered(plan: Tensor, split: Split) -> Tensor:
    return move(plan, split.device) if split.resident else plan


def _share(count: int, rank: int, world: int) -> tuple[int, int]:
    """The range of `count` things that falls to `rank`."""
    return count * rank // world, count * (rank + 1) // world


def _check_share(split: Split, batch_size: int, rank: int, world: int) -> None:
    if not hasattr(split, "render"):
        raise TypeError(
            f"`split` must be a part of a dataset, such as `dataset.train`, got a "
            f"{type(split).__name__}: PyTorch's `DataLoader` takes that"
        )
    if len(split) == 0:
        raise ValueError("`split` is empty; expected one image at least")
    if batch_size < 1:
        raise ValueError(f"`batch_size` (={batch_size}) must be at least 1")
    if not 0 <= rank < world:
        raise ValueError(f"`rank` (={rank}) must be in [0, {world}), `world` being {world}")
