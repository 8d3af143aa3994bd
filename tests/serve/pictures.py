"""Pictures, whole and broken, as bytes."""

import io
import struct
import zlib

import numpy as np
from PIL import Image


def encoded(image, kind="PNG", **options):
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def grey(side=36, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side), dtype=np.uint8)
    return Image.fromarray(pixels)


def colour(width=60, height=40):
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def form(data, name="image", boundary="boundary"):
    """(body, content type) of a form with one file."""
    head = (
        f'--{boundary}\r\ncontent-disposition: form-data; name="{name}"; filename="a.png"\r\n\r\n'
    )
    body = head.encode() + data + f"\r\n--{boundary}--\r\n".encode()
    return body, f"multipart/form-data; boundary={boundary}"


def png_of_size(width, height):
    """A PNG whose header promises many pixels and whose data holds none."""

    def chunk(kind, data):
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def sixteen_bit():
    return Image.fromarray(np.linspace(0, 65535, 900).reshape(30, 30).astype(np.uint16))


def rotated_by_exif():
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(colour(), "JPEG", exif=exif)


def animation(kind):
    frames = [grey(side=40, seed=seed) for seed in range(3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], loop=0)


UNUSUAL = {
    "16 bits": encoded(sixteen_bit()),
    "CMYK": encoded(colour().convert("CMYK"), "JPEG"),
    "palette": encoded(colour().convert("P")),
    "palette with transparency": encoded(colour().convert("P"), transparency=0),
    "transparent": encoded(grey().convert("LA")),
    "one bit": encoded(grey().convert("1")),
    "animated GIF": animation("GIF"),
    "animated WebP": animation("WEBP"),
    "animated PNG": animation("PNG"),
    "turned by EXIF": rotated_by_exif(),
    "one pixel": encoded(grey(1)),
    "very wide": encoded(Image.new("L", (5000, 2), 200)),
    "larger than decoded in place": encoded(colour(700, 500), "BMP"),
}

BROKEN = {
    "no bytes": (b"", 422),
    "a text": (b"hello, I am not an image", 415),
    "a web page": (b"<!doctype html><svg></svg>", 415),
    "a cut header": (encoded(grey())[:20], 422),
    "cut pixels": (encoded(grey(100))[:-4000], 422),
    "cut JPEG": (encoded(colour(), "JPEG")[:600], 422),
    "cut GIF": (animation("GIF")[:600], 422),
    "cut WebP": (encoded(grey(), "WEBP")[:60], 422),
    "flipped bytes": (encoded(grey(100)).replace(b"IDAT", b"IDAT\xff\xff\xff", 1), 422),
    "a format that is not taken": (encoded(colour(), "TIFF"), 415),
    "floating-point pixels": (encoded(Image.new("F", (8, 8)), "TIFF"), 415),
    "a bomb": (png_of_size(20_000, 20_000), 413),
    "a bomb that Pillow refuses itself": (png_of_size(60_000, 60_000), 413),
}
