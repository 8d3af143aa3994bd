"""One picture file to pixels, whatever its format and mode."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

GREY_MODES = {"1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N"}

# named, because Pillow would hand some other formats to external programs
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")


def open_image(file: Path | BinaryIO) -> Image.Image:
    """A picture of a format that is read here; no pixel is decoded yet."""
    return Image.open(file, formats=FORMATS)


def why_unreadable(error: Exception) -> str:
    """What opening or decoding a picture raised, in one line that does not repeat its name."""
    match error:
        case FileNotFoundError():
            return "no such file"
        case IsADirectoryError():
            return "a folder, not an image"
        case PermissionError():
            return "no permission to read it"
        case UnidentifiedImageError():
            return f"not an image of a kind that is read here ({', '.join(FORMATS)})"
        case Image.DecompressionBombError():
            return f"too many pixels; at most {2 * (Image.MAX_IMAGE_PIXELS or 0):,} are read"
    return " ".join(str(error).split()) or type(error).__name__


def decode(path: Path, image_size: tuple[int, int], channels: int) -> np.ndarray:
    """The image as uint8 `(channels, height, width)`."""
    with open_image(path) as file:
        return np.ascontiguousarray(fitted(file, image_size, channels).transpose(2, 0, 1))


def fitted(image: Image.Image, image_size: tuple[int, int], channels: int) -> np.ndarray:
    """An opened picture scaled to cover the size, the middle cut out: uint8 `(height, width, …)`.

    What training reads and what a trained model is asked about go through here alike.
    """
    height, width = image_size
    # lets a JPEG decode at a fraction of its size, still no smaller than what is needed
    image.draft(None, (2 * max(image_size), 2 * max(image_size)))
    coloured = to_mode(ImageOps.exif_transpose(image), "L" if channels == 1 else "RGB")
    covering = ImageOps.fit(coloured, (width, height), Image.Resampling.BILINEAR)
    return np.asarray(covering, dtype=np.uint8).reshape(height, width, channels)


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == "F":
        raise ValueError("floating-point pixels; expected 8 or 16 bits")
    if image.mode.startswith("I"):
        # Pillow's own conversion clips 16 bits at 255
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert(mode)
