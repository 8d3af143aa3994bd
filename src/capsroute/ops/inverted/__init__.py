"""Inverted dot-product attention routing. Start with README.md, then reference.py."""

from capsroute.ops.inverted.api import routing_step

__all__ = ["routing_step"]
