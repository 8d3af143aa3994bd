"""Matplotlib figures, and their PNGs; matplotlib itself is imported late."""

import io
import logging
import warnings
from functools import cache
from typing import TYPE_CHECKING

from capsroute.logs import errors_only

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOXES = "Last Resort High-Efficiency"  # matplotlib's own: it has a box for every letter
_log = logging.getLogger("capsroute")


def figure(width: float, height: float, *, constrained: bool = True) -> "Figure":
    """An empty figure, in inches, without pyplot; `constrained` makes room for its labels."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained" if constrained else None)


def png(figure: "Figure", dpi: int = 120) -> bytes:
    _find_missing_letters(figure)
    data = io.BytesIO()
    # a font found for its letters may have one weight alone, which matplotlib logs for each text
    with warnings.catch_warnings(), errors_only("matplotlib.font_manager"):
        # letters that no font here has are drawn as boxes, which the log has said already
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(data, format="png", dpi=dpi)
    return data.getvalue()


def _find_missing_letters(figure: "Figure") -> None:
    """Take letters that the usual font lacks, such as a class name's 猫, from another one here."""
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.text import Text

    texts = figure.findobj(Text)
    letters = {letter for text in texts for letter in text.get_text() if not letter.isspace()}
    missing = letters - _letters_of(findfont(FontProperties()))
    families, missing = _families_with(missing) if missing else ([], missing)
    for text in texts if families else []:
        text.set_fontfamily([*text.get_fontfamily(), *families])
    if missing:
        shown = "".join(sorted(missing)[:5])
        _log.warning("no font here has the letters %s: they are drawn as boxes", shown)


def _families_with(missing: set[str]) -> tuple[list[str], set[str]]:
    """Installed fonts that together have the letters, and the letters that none has."""
    from matplotlib.font_manager import fontManager

    families = []
    for font in sorted(fontManager.ttflist, key=lambda font: font.name):
        found = missing & _letters_of(font.fname) if missing and font.name != BOXES else set()
        if found:
            families.append(font.name)
            missing = missing - found
    return families, missing


@cache
def _letters_of(path: str) -> frozenset[str]:
    from matplotlib.font_manager import get_font

    try:
        return frozenset(map(chr, get_font(path).get_charmap()))
    except (OSError, RuntimeError):  # a font of pictures, such as emoji
        return frozenset()
