"""Time LayerNorm by rows of the primary capsules on a card, beside their convolution.

    python benchmarks/kernels/norm.py [--json FILE]

Capsules of `inverted_resnet_cifar10` and `_cifar100` at batch 128 in bf16. Medians over replays of
a CUDA graph; one object a line, with what the bytes alone would take at 4.8 TB/s.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from run import time_us

from capsroute.ops.inverted.norm import Norm
from capsroute.ops.inverted.triton import norm as kernels

POSES = {"cifar10": (16, 4), "cifar100": (36, 6)}  # elements and rows
BYTES_A_MICROSECOND = 4.8e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="add a line for each time to this file")
    options = parser.parse_args()
    for name, (d, rows) in POSES.items():
        for row in measure(d, rows):
            line = json.dumps({"layer": name, "device": torch.cuda.get_device_name(), **row})
            print(line, flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(line + "\n")


def measure(d, rows):
    options = {"device": "cuda", "dtype": torch.bfloat16}
    features = torch.randn(128, 16, 16, 128, **options)
    projection = torch.randn(32, d, 128, **options) / 128**0.5
    norm = Norm(torch.ones(d, device="cuda"), torch.zeros(d, device="cuda"), 1e-5)
    convolution = lambda: F.linear(features, projection.flatten(0, 1))  # noqa: E731
    poses = convolution().unflatten(-1, (32, d))
    grad = kernels.norm_by_rows(poses, *norm, rows)
    size = poses.numel() * 2
    yield time_row("convolution", convolution, size + features.numel() * 2)
    yield time_row("norm", lambda: kernels.norm_by_rows(poses, *norm, rows), 2 * size)
    backward = lambda: kernels.norm_by_rows_backward(grad, poses, norm.weight, norm.eps)  # noqa: E731
    yield time_row("norm, backward", backward, 3 * size)


def time_row(kernel, function, size):
    with torch.no_grad():
        return {"kernel": kernel, **time_us(function), "bytes_us": size / BYTES_A_MICROSECOND}


if __name__ == "__main__":
    main()
