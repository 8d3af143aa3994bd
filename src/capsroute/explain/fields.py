"""Which pixels a capsule sees: receptive fields, exact for any backbone."""

import copy
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from capsroute.explain.trace import Layer
from capsroute.models.base import CapsuleClassifier

PROBES_AT_ONCE = 32
MOST = 0.5  # of an image: capsules that see more are told apart by place, not by what they see
PLACE = 0.25  # of an image's side: what is shown around a place, at least


class Box(NamedTuple):
    """Pixels [top, bottom) × [left, right)."""

    top: int
    left: int
    bottom: int
    right: int


class Fields(NamedTuple):
    """First pixel, and one past the last, that each position of a layer sees: (n, 2) each."""

    rows: np.ndarray
    columns: np.ndarray

    def box(self, row: int, column: int) -> Box:
        (top, bottom), (left, right) = self.rows[row].tolist(), self.columns[column].tolist()
        return Box(top, left, bottom, right)

    def seen_through(self, layer: Layer) -> "Fields":
        """What the parents see that look at these children."""
        if layer.linear:
            return Fields(_union(self.rows), _union(self.columns))
        return Fields(*(_windows(axis, layer.kernel, layer.stride) for axis in self))

    def spread(self, values: Tensor, image_size: tuple[int, int]) -> Tensor:
        """(B, rows, columns) to (B, H, W): each value under a tent over its field, sum kept.

        The middle of a receptive field weighs most in a convolution's output, its edge least; a
        tent says so without looking at the weights.
        """
        sides = zip(self, image_size, strict=True)
        return _lay(values, *(_tents(*_field_tents(axis, size), size) for axis, size in sides))

    def interpolate(self, values: Tensor, image_size: tuple[int, int]) -> Tensor:
        """(B, rows, columns) to (B, H, W): linear between the fields' middles, sum kept."""
        sides = zip(self, image_size, strict=True)
        return _lay(values, *(_tents(*_middles(axis, size), size) for axis, size in sides))

    def see_most(self, image_size: tuple[int, int]) -> bool:
        """Whether the largest field covers more than half of the image."""
        down, across = (int((axis[:, 1] - axis[:, 0]).max()) for axis in self)
        return down * across > MOST * image_size[0] * image_size[1]

    def places(self, image_size: tuple[int, int]) -> "Fields":
        """What lies around the middle of each field: as far as the next one's part, or more."""
        return Fields(*(_around(axis, size) for axis, size in zip(self, image_size, strict=True)))


_CACHE: WeakKeyDictionary[nn.Module, Fields] = WeakKeyDictionary()


def primary_fields(model: CapsuleClassifier) -> Fields:
    """Receptive fields of the primary capsules, found by poisoning pixels.

    A row (then a column) of NaN reaches exactly those positions that look at it, whatever the
    weights are: NaN survives products with zero, ReLU and pooling. In float64 on the CPU, where
    convolutions are plain products; fast algorithms would mix neighbouring outputs.
    """
    if model not in _CACHE:
        backbone, primary = model.backbone, model.primary
        assert isinstance(backbone, nn.Module) and isinstance(primary, nn.Module)
        stem = nn.Sequential(*map(copy.deepcopy, (backbone, primary))).cpu().double().eval()
        rows, columns = (_poisoned(stem, model, axis) for axis in (2, 3))
        _CACHE[model] = Fields(rows, columns)
    return _CACHE[model]


@torch.no_grad()
def _poisoned(stem: nn.Module, model: CapsuleClassifier, axis: int) -> np.ndarray:
    """[first, last + 1) pixel of `axis` that each position of the primary capsules looks at."""
    size = model.image_size[axis - 2]
    reached = []
    for first in range(0, size, PROBES_AT_ONCE):
        lines = range(first, min(size, first + PROBES_AT_ONCE))
        images = torch.zeros(len(lines), model.in_channels, *model.image_size).double()
        for probe, line in enumerate(lines):
            images[probe].select(axis - 1, line).fill_(torch.nan)
        capsules = stem(images)
        poses = capsules if isinstance(capsules, Tensor) else capsules[0]
        reached.append(poses.isnan().flatten(3).any(dim=3).any(dim=2 if axis == 2 else 1))
    seen = torch.cat(reached).numpy()  # (pixels, positions)
    return np.stack([seen.argmax(axis=0), size - seen[::-1].argmax(axis=0)], axis=1)


def _windows(axis: np.ndarray, kernel: int, stride: int) -> np.ndarray:
    positions = range(0, len(axis) - kernel + 1, stride)
    return np.concatenate([_union(axis[p : p + kernel]) for p in positions])


def _union(axis: np.ndarray) -> np.ndarray:
    return np.array([[axis[:, 0].min(), axis[:, 1].max()]])


def _around(axis: np.ndarray, size: int) -> np.ndarray:
    middles, step = _middles(axis, size)
    reach = max(1.5 * step, PLACE * size / 2)
    first, end = np.ceil(middles - reach), np.floor(middles + reach) + 1
    return np.stack([first.clip(0, size - 1), end.clip(1, size)], axis=1).astype(int)


def _lay(values: Tensor, down: Tensor, across: Tensor) -> Tensor:
    return torch.einsum("bhw,hy,wx->byx", values, down.to(values), across.to(values))


def _tents(middles: np.ndarray, reach: float, size: int) -> Tensor:
    """(positions, pixels), each row a tent around its middle that sums to 1 within the image."""
    distance = np.abs(np.arange(size) - middles[:, None])
    tents = np.clip(1 - distance / reach, 0, None)
    return torch.from_numpy(tents / np.maximum(tents.sum(axis=1, keepdims=True), 1e-9))


def _field_tents(axis: np.ndarray, size: int) -> tuple[np.ndarray, float]:
    middles, extent = _uncut(axis, size)
    return middles, (extent + 1) / 2


def _middles(axis: np.ndarray, size: int) -> tuple[np.ndarray, float]:
    """Middle of each field, and how far it is to the next."""
    middles, _ = _uncut(axis, size)
    return middles, float(middles[1] - middles[0]) if len(middles) > 1 else float(size)


def _uncut(axis: np.ndarray, size: int) -> tuple[np.ndarray, float]:
    """Middle of each field and the fields' extent, had the image no border to cut them.

    Fields are evenly spaced, so an end that lies within the image gives all the others. Where no
    end does, every position sees everything, and the middles are spread over the image.
    """
    positions = np.arange(len(axis))
    firsts, ends = axis[:, 0] > 0, axis[:, 1] < size
    step = _spacing(axis[firsts, 0]) or _spacing(axis[ends, 1])
    if step is None or not firsts.any() or not ends.any():
        return (positions + 0.5) * size / len(axis) - 0.5, float(size)
    first = (axis[firsts, 0] - step * positions[firsts])[0] + step * positions
    end = (axis[ends, 1] - step * positions[ends])[0] + step * positions
    return (first + end - 1) / 2, float((end - first)[0])


def _spacing(ends: np.ndarray) -> float | None:
    return float(ends[1] - ends[0]) if len(ends) > 1 else None
