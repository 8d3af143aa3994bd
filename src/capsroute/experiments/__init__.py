"""Presets: every experiment of the paper, and our own, each a whole config."""

from capsroute.experiments import paper  # importing registers its experiments
from capsroute.experiments.presets import DEFAULT, Preset, list_experiments, list_presets, preset

__all__ = ["DEFAULT", "Preset", "list_experiments", "list_presets", "paper", "preset"]
