"""An upload becomes a picture, or a refusal with the reason in one line.

The header is read first: a picture of too many pixels is refused before any is decoded.
"""

import io
import warnings
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from PIL import Image, UnidentifiedImageError
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

# the browser's formats; TIFF and the rest have decoders too large to trust with strangers' bytes
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
BEGINNINGS = (b"\x89PNG", b"\xff\xd8", b"GIF8", b"RIFF", b"BM")

Prepared = TypeVar("Prepared")


class RefusedError(Exception):
    """An upload that is not taken: HTTP status and one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def refuse_bombs() -> None:
    """Pillow's warning about huge pictures becomes an error, for this process.

    `open_picture` has a limit of its own; this keeps the warning off the server's log.
    """
    warnings.filterwarnings("error", category=Image.DecompressionBombWarning)


async def read_upload(request: Request, most: int) -> bytes:
    """The image's bytes, out of a form or as the body itself."""
    body = await _read_body(request, most)
    kind = request.headers.get("content-type", "")
    # whatever else the type says, such as curl's default, the bytes themselves decide
    if not kind.lower().startswith("multipart/"):
        return body
    return await _file_of_form(request, body)


async def _read_body(request: Request, most: int) -> bytes:
    refusal = RefusedError(413, f"the upload is too large; at most {most:,} bytes are taken")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise refusal
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise refusal
    return bytes(body)


async def _file_of_form(request: Request, body: bytes) -> bytes:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body
        yield b""

    parser = MultiPartParser(request.headers, stream(), max_files=1, max_fields=8)
    parser.spool_max_size = len(body)  # in memory, where the whole of it is already
    try:
        form = await parser.parse()
    except (MultiPartException, ValueError, KeyError, LookupError):
        raise RefusedError(422, "the form cannot be read; expected one file, `image`") from None
    try:
        file = form.get("image")
        if file is None or isinstance(file, str):
            raise RefusedError(422, "the form has no file `image`")
        return await file.read()
    finally:
        await form.close()


def open_picture(data: bytes, max_pixels: int) -> Image.Image:
    """The header alone; no pixel is decoded yet."""
    if not data:
        raise RefusedError(422, "the upload is empty; expected an image")
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        if data.startswith(BEGINNINGS):
            raise _damaged("image") from None
        expected = ", ".join(FORMATS[:-1])
        raise RefusedError(
            415, f"the upload is no image that can be read; expected {expected} or {FORMATS[-1]}"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels(max_pixels) from None
    except Exception:  # Pillow's parsers raise nearly anything on a broken header
        raise _damaged("image") from None
    if picture.width * picture.height > max_pixels:
        raise _too_many_pixels(max_pixels)
    return picture


def decode(picture: Image.Image, prepare: Callable[[Image.Image], Prepared]) -> Prepared:
    """`prepare(picture)`, which decodes it; whatever breaks on the way is the upload's fault."""
    try:
        return prepare(picture)
    except MemoryError:
        raise
    except Exception:  # as above, for decoders
        raise _damaged(picture.format or "image") from None


def _too_many_pixels(most: int) -> RefusedError:
    return RefusedError(413, f"the image has too many pixels; at most {most:,} are taken")


def _damaged(kind: str) -> RefusedError:
    return RefusedError(422, f"the {kind} is damaged, cut short or of a kind that is not read")
