"""Figures of matplotlib, which is imported late, and their PNGs."""

import io
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(width: float, height: float, *, constrained: bool = True) -> "Figure":
    """An empty figure, in inches, without pyplot; `constrained` makes room for its labels."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained" if constrained else None)


def png(figure: "Figure", dpi: int = 120) -> bytes:
    data = io.BytesIO()
    with warnings.catch_warnings():
        # names in a script that the font lacks show as boxes; nothing to be done about it here
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(data, format="png", dpi=dpi)
    return data.getvalue()
