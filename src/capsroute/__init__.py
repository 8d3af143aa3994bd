"""Capsule networks with inverted dot-product attention routing, and the routings before it."""

from capsroute.models import create_model, list_models

__all__ = ["create_model", "list_models"]
__version__ = "0.1.0"
