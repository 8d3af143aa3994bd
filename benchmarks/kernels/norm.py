"""Time LayerNorm by rows of the primary capsules on a card, with and beside their convolution.

    python benchmarks/kernels/norm.py [--json FILE]
    python benchmarks/kernels/norm.py --count

Capsules of `inverted_resnet_cifar10` and `_cifar100` at batch 128 in bf16. Medians over replays of
a CUDA graph; one object a line, with what the bytes alone would take at 4.8 TB/s. `--count` needs
no card: thread instructions that the main loops issue for a pose on sm_90, the time in which an
H200 could issue them at best, registers, and how wide memory is read and written.
"""

import argparse
import collections
import json
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from run import commit, time_us

from capsroute.ops.inverted.norm import Norm
from capsroute.ops.inverted.triton import norm as kernels
from capsroute.ops.inverted.triton.projection import fits, project_by_rows

SHAPE = (128, 16, 16, 32)
POSES = {"cifar10": (16, 4), "cifar100": (36, 6)}  # elements and rows
BYTES_A_MICROSECOND = 4.8e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="add a line for each time to this file")
    parser.add_argument("--count", action="store_true", help="count instructions, time nothing")
    options = parser.parse_args()
    device = "sm_90" if options.count else torch.cuda.get_device_name()
    source = commit()
    if options.json and source is None:
        parser.error("results must name a commit: run it in a checkout, or set CAPSROUTE_COMMIT")
    for name, (d, rows) in POSES.items():
        for row in count(d, rows) if options.count else measure(d, rows):
            line = json.dumps({"source": source, "layer": name, "device": device, **row})
            print(line, flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(line + "\n")


def measure(d, rows):
    options = {"device": "cuda", "dtype": torch.bfloat16}
    features = torch.randn(*SHAPE[:3], 128, **options)
    projection = torch.randn(SHAPE[3], d, 128, **options) / 128**0.5
    norm = Norm(torch.ones(d, device="cuda"), torch.zeros(d, device="cuda"), 1e-5)
    convolution = lambda: F.linear(features, projection.flatten(0, 1))  # noqa: E731
    poses = convolution().unflatten(-1, (SHAPE[3], d))
    grad = kernels.norm_by_rows(poses, *norm, rows)
    size = poses.numel() * 2
    yield time_row("convolution", convolution, size + features.numel() * 2)
    if fits(features, projection, features.dtype):
        both = lambda: project_by_rows(features, projection, *norm, rows)  # noqa: E731
        yield time_row("both", both, size + features.numel() * 2)
    yield time_row("norm", lambda: kernels.norm_by_rows(poses, *norm, rows), 2 * size)
    backward = lambda: kernels.norm_by_rows_backward(grad, poses, norm.weight, norm.eps)  # noqa: E731
    yield time_row("norm, backward", backward, 3 * size)


def count(d, rows):
    import triton_compiler  # of tests/ops, which `run` has put on the path

    poses, weight = torch.empty(*SHAPE, d, dtype=torch.bfloat16), torch.empty(d)
    with triton_compiler.compiling(90) as compiled:
        out = kernels.norm_by_rows._init_fn(poses, weight, weight, 1e-5, rows)
        kernels.norm_by_rows_backward._init_fn(out, poses, weight, 1e-5)
        features, projection = poses.new_empty(*SHAPE[:3], 128), poses.new_empty(SHAPE[3], d, 128)
        if fits(features, projection, features.dtype):
            project_by_rows._init_fn(features, projection, weight, weight, 1e-5, rows)
    for kernel, arguments, made in compiled:
        if "BLOCK_M" not in arguments:
            continue  # it adds the programs' sums
        loop = triton_compiler.main_loop(made)
        tile = arguments["BLOCK_M"] * arguments.get("BLOCK_C", 1)
        a_pose = len(loop) * 32 * arguments["num_warps"] / tile
        registers, stack = triton_compiler.resources(made)
        moves = collections.Counter(filter(re.compile("LDG|STG|LDS|STS|SHFL|BAR").match, loop))
        yield {
            "kernel": kernel.__name__,
            "a_pose": a_pose,
            "issue_us": a_pose * poses.numel() / d / (128 * 132 * 1.75e3),
            "registers": registers,
            "stack": stack,
            "moves": dict(moves),
        }


def time_row(kernel, function, size):
    with torch.no_grad():
        return {"kernel": kernel, **time_us(function), "bytes_us": size / BYTES_A_MICROSECOND}


if __name__ == "__main__":
    main()
