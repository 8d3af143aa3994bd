"""Presets: every experiment of the paper, and our own, as functions that return a whole config."""

from capsroute.experiments.presets import DEFAULT, list_presets, preset, preset_summary

__all__ = ["DEFAULT", "list_presets", "preset", "preset_summary"]
