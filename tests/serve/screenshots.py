"""Makes the pictures of docs/serve.md.

    python tests/serve/screenshots.py docs/pictures

Needs Chromium. Draws two digits with the mouse on the page of the shipped model.
"""

import io
import sys
from pathlib import Path

from browser import Page, chromium, find_chromium
from PIL import Image
from servers import running

from capsroute.inference import Predictor

ANSWERED = "document.querySelectorAll('#heat figcaption b').length === 2"
# (digit, middle from the left, middle from the top, height), in shares of the canvas
DIGITS = (("4", 0.39, 0.5, 0.68), ("5", 0.61, 0.5, 0.68))


def draw(page: Page) -> None:
    for digit, x, y, height in DIGITS:
        strokes = page.evaluate(
            f"import('/page/digits.js').then((m) => m.strokesOf('{digit}', {x}, {y}, {height}))"
        )
        for stroke in strokes:
            page.stroke("#sketch", [tuple(point) for point in stroke])
    page.wait_for(ANSWERED)
    page.evaluate("document.activeElement.blur(); new Promise((r) => setTimeout(r, 500))")


def save(page: Page, path: Path, height: int | None = None) -> None:
    """At most 256 colours, which is a fifth of the bytes."""
    page.screenshot(path)
    with Image.open(path) as shot:
        part = shot.crop((0, 0, shot.width, height or shot.height)).convert("RGB")
    data = io.BytesIO()
    part.quantize(256, dither=Image.Dither.NONE).save(data, "PNG", optimize=True)
    path.write_bytes(data.getvalue())


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    binary = find_chromium()
    assert binary, "no Chromium here: apt-get install chromium"
    predictor = Predictor.load("inverted_small_multimnist", device="cpu")
    with running(predictor) as server, chromium(binary) as page:
        address = f"http://127.0.0.1:{server.port}/"
        for name, width, phone, dark in (
            ("serve", 1280, False, False),
            ("serve_phone", 375, True, True),
        ):
            page.view(width, 900, phone=phone, dark=dark)
            page.open(f"{address}?{name}")
            page.wait_for("document.querySelector('#bars').children.length == 10")
            draw(page)
            save(page, folder / f"{name}.png", height=1700 if phone else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
