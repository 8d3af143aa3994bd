"""A run small enough to repeat often: a tiny capsule network on MNIST-like images."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from capsroute.train.config import Config, DataConfig, ModelConfig, OptimConfig


def make_folder(root: Path, classes: int = 3, images: int = 12, side: int = 16) -> Path:
    """A folder of images whose classes are stripes at different places."""
    rng = np.random.default_rng(0)
    for label in range(classes):
        folder = root / f"class{label}"
        folder.mkdir(parents=True)
        for index in range(images):
            pixels = rng.integers(0, 60, (side, side), dtype=np.uint8)
            pixels[4 * label + 2 : 4 * label + 5] += 150
            Image.fromarray(pixels).save(folder / f"{index}.png")
    return root


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("images") / "stripes")


@pytest.fixture
def own_folder():
    """Makes a folder that a test may change."""
    return make_folder


@pytest.fixture(scope="session")
def config(image_folder):
    """12 steps an epoch-and-a-bit, evaluated twice; random initial poses use torch's own RNG."""
    return Config(
        experiment="tiny",
        model=ModelConfig("inverted_small_multimnist", initial_poses="random"),
        data=DataConfig(str(image_folder), image_size=24, padding=2, flip=True, validation=0.2),
        optim=OptimConfig(optimizer="adam", lr=1e-3, lr_schedule="cosine", ema=0.9),
        batch_size=8,
        steps=12,
        eval_every=6,
        checkpoint_every=2,
        eval_batch_size=16,
    )


@pytest.fixture
def with_changes(config):
    return lambda **changes: dataclasses.replace(config, **changes)
