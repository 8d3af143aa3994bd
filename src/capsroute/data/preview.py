"""A labelled contact sheet of images, as a PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

SMALLEST_SHOWN = 72
"""Images smaller than this are enlarged by a whole factor, so that pixels stay square."""
GAP = 6
Font = ImageFont.ImageFont | ImageFont.FreeTypeFont
CAPTION = 16


def contact_sheet(images: Tensor, labels: Sequence[str]) -> bytes:
    """A PNG of `images` `(n, 1 or 3, H, W)`, uint8 or float in [0, 1], each over its label.

    As many columns as rows, or one more.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3) or not len(images):
        raise ValueError(f"`images` has shape {tuple(images.shape)}; expected (n, 1 or 3, H, W)")
    if len(labels) != len(images):
        raise ValueError(f"`labels` has {len(labels)} entries for {len(images)} images")
    pictures = [_enlarge(image) for image in _to_bytes(images)]
    width, height = pictures[0].size
    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    cell_width, cell_height = width + GAP, height + CAPTION + GAP
    sheet = Image.new("RGB", (columns * cell_width + GAP, rows * cell_height + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for index, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        row, column = divmod(index, columns)
        x, y = GAP + column * cell_width, GAP + row * cell_height
        sheet.paste(picture, (x, y))
        caption = _shorten(label, width, draw, font)
        draw.text((x + width // 2, y + height + 2), caption, "black", font, anchor="ma")
    data = io.BytesIO()
    sheet.save(data, format="PNG")
    return data.getvalue()


def _to_bytes(images: Tensor) -> np.ndarray:
    """uint8 `(n, H, W, 3)`."""
    images = images.detach().cpu()
    if images.is_floating_point():
        images = (images.clamp(0, 1) * 255).round().byte()
    return images.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()


def _enlarge(pixels: np.ndarray) -> Image.Image:
    image = Image.fromarray(pixels)
    factor = math.ceil(SMALLEST_SHOWN / min(image.size))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _shorten(label: str, width: int, draw: ImageDraw.ImageDraw, font: Font) -> str:
    if draw.textlength(label, font) <= width:
        return label
    while label and draw.textlength(label + "…", font) > width:
        label = label[:-1]
    return label + "…"
