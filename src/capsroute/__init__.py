"""Capsule networks with inverted dot-product attention routing, and with earlier routings."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capsroute.models import create_model, list_models, load_model

__all__ = ["create_model", "list_models", "load_model"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """PyTorch takes a second to import: `capsroute --help` and Ctrl-C need not wait for it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from capsroute import models

    return getattr(models, name)


def __dir__() -> list[str]:
    """With the names that are imported when asked for, without those that only serve here."""
    return sorted({*__all__, *globals()} - {"Any", "TYPE_CHECKING"})
