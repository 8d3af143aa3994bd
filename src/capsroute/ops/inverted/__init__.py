"""Inverted dot-product attention routing. Start with README.md, then reference.py."""

from capsroute.ops.inverted.api import first_step, routing_step

__all__ = ["first_step", "routing_step"]
