"""Augmentation, batched on the images' device, as pure functions of (images, random numbers).

Images are uint8 in [0, 255] or float in [0, 1], `(n, C, H, W)`. Nothing is normalised here (a
model does that itself), so what is padded or cut out is black before normalisation. The random
numbers are int64 in [0, 2³²), one row an image: see `rng.image_draws`. Nothing waits for the
device, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from capsroute.data.errors import DataError
from capsroute.data.rng import AugmentDraws, below


@dataclass(frozen=True)
class Augment:
    """Random crop, horizontal flip and cutout, each on its own columns of the draws.

    The defaults are the paper's recipe for CIFAR. Digits are trained without augmentation.
    """

    padding: int = 4
    """Black pixels added on every side before the random crop."""
    flip: bool = True
    """Mirror each image with probability 1/2."""
    cutout: int = 0
    """Side of the square blacked out; 0: none."""
    crop: int | None = None
    """Side of the random crop; None: the images keep their size."""

    def __post_init__(self) -> None:
        for name, least in (("padding", 0), ("cutout", 0), ("crop", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"`{name}` (={value}) must be at least {least}")

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        if self.padding or self.crop:
            images = random_crop(images, draws[:, AugmentDraws.CROP], self.padding, self.crop)
        if self.flip:
            images = random_flip(images, draws[:, AugmentDraws.FLIP])
        if self.cutout:
            images = cutout(images, draws[:, AugmentDraws.CUTOUT], self.cutout)
        return images


def random_crop(images: Tensor, draws: Tensor, padding: int, size: int | None = None) -> Tensor:
    """A random `size`×`size` window (the images' own size by default) of the padded images."""
    count, _, height, width = images.shape
    rows, columns = (height, width) if size is None else (size, size)
    _check_crop(height + 2 * padding, width + 2 * padding, rows, columns)
    padded = F.pad(images, (padding,) * 4)
    windows = padded.unfold(2, rows, 1).unfold(3, columns, 1)  # a view: no window is copied yet
    top = below(draws[:, 0], windows.shape[2])
    left = below(draws[:, 1], windows.shape[3])
    return windows[torch.arange(count, device=images.device), :, top, left]


def center_crop(images: Tensor, size: int) -> Tensor:
    """The `size`×`size` centre of the images."""
    height, width = images.shape[-2:]
    _check_crop(height, width, size, size)
    top, left = (height - size) // 2, (width - size) // 2
    return images[..., top : top + size, left : left + size]


def random_flip(images: Tensor, draws: Tensor) -> Tensor:
    """Each image mirrored left to right with probability 1/2."""
    mirrored = (below(draws, 2) == 0)[:, None, None, None]
    return torch.where(mirrored, images.flip(3), images)


def cutout(images: Tensor, draws: Tensor, size: int) -> Tensor:
    """A black `size`×`size` square whose centre is uniform over the image.

    Near an edge, part of the square falls outside (DeVries and Taylor 2017).
    """
    height, width = images.shape[-2:]
    top = below(draws[:, 0], height)[:, None] - size // 2
    left = below(draws[:, 1], width)[:, None] - size // 2
    row = torch.arange(height, device=images.device)
    column = torch.arange(width, device=images.device)
    in_rows = (row >= top) & (row < top + size)
    in_columns = (column >= left) & (column < left + size)
    square = in_rows[:, None, :, None] & in_columns[:, None, None, :]
    return images.masked_fill(square, 0)


def cutmix(
    images: Tensor, others: Tensor, draws: Tensor, probability: float
) -> tuple[Tensor, Tensor]:
    """Images with a rectangle of the others, and the share of the pixels that is theirs.

    Yun et al. 2019.

    With `probability` an image gets one, of the image's proportions; the area is uniform, and
    so is the centre, and what falls outside is lost. Takes two columns of draws.
    """
    height, width = images.shape[-2:]
    # one number decides whether there is a rectangle and how large it is; doubles, so that every
    # device rounds alike
    area = draws[:, 0].double() / (probability * 2**32)
    side = torch.where(area < 1, area.sqrt(), 0.0)
    centres = below(draws[:, 1], height), below((draws[:, 1] << 16) & 0xFFFF0000, width)
    inside = []
    for centre, length in zip(centres, (height, width), strict=True):
        extent = (side * length).long()
        first = (centre - extent // 2)[:, None]
        place = torch.arange(length, device=images.device)
        inside.append((place >= first) & (place < first + extent[:, None]))
    rectangle = inside[0][:, None, :, None] & inside[1][:, None, None, :]
    share = inside[0].sum(1) * inside[1].sum(1) / (height * width)
    return torch.where(rectangle, others, images), share


def to_float(images: Tensor) -> Tensor:
    """uint8 images as float32 in [0, 1]; float images as they are."""
    if images.dtype != torch.uint8:
        return images
    # a product, since CUDA divides by a constant as a product anyway: the same bits everywhere
    return images.float() * (1 / 255)


def rotate_shift(
    images: Tensor, degrees: float | Tensor, dx: float | Tensor = 0, dy: float | Tensor = 0
) -> Tensor:
    """Float images turned about their centre, then shifted; bilinear, black outside.

    `degrees` counts anticlockwise; `dx` pixels go right, `dy` down. Each is one number, or a
    tensor of one number an image.
    """
    if not images.is_floating_point():
        raise TypeError(f"`images` is {images.dtype}; expected float (see `to_float`)")
    height, width = images.shape[2:]
    angle, right, down = (
        _one_an_image(value, images).view(-1, 1, 1) for value in (degrees, dx, dy)
    )
    angle = angle * (math.pi / 180)
    # grid_sample asks where an output pixel comes from: undo the shift, then the rotation.
    # Its coordinates run from -1 to 1 along either axis: hence the ratios of the sides.
    # (`F.affine_grid` would make the host wait for the device.)
    x = _pixel_centres(width, images) - 2 * right / width
    y = _pixel_centres(height, images)[:, None] - 2 * down / height
    cos, sin = torch.cos(angle), torch.sin(angle)
    from_x = cos * x - sin * (height / width) * y
    from_y = cos * y + sin * (width / height) * x
    grid = torch.stack([from_x, from_y], dim=-1)
    return F.grid_sample(images, grid, mode="bilinear", align_corners=False)


def _pixel_centres(count: int, images: Tensor) -> Tensor:
    """Where the pixels of a side lie, from -1 to 1: as `align_corners=False` counts."""
    places = torch.arange(count, device=images.device, dtype=images.dtype)
    return (2 * places + 1) / count - 1


def _one_an_image(value: float | Tensor, images: Tensor) -> Tensor:
    """A number for every image; filled in there, since copying one to a GPU waits for it."""
    if isinstance(value, Tensor):
        return value.to(images.device, images.dtype).expand(len(images))
    return images.new_full((len(images),), float(value))


def _check_crop(height: int, width: int, rows: int, columns: int) -> None:
    if height < rows or width < columns:
        raise DataError(
            f"images of {height}×{width} pixels (with padding) are smaller than the crop "
            f"of {rows}×{columns}"
        )
