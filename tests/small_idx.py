"""Small files in MNIST's idx format."""

import numpy as np


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


def write_digits(folder):
    """Forty training and twenty test images of 28×28, four and two of each class."""
    generator = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for part, count in (("train", 40), ("t10k", 20)):
        images = generator.integers(0, 256, (count, 28, 28))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(count) % 10))
    return folder
