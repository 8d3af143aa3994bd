"""Count what the kernels' main loops issue, with no GPU: `python benchmarks/kernels/sass.py`.

For each layer and kernel: thread instructions of the main loop for a child-parent pair, by class,
and what a multiprocessor has room for. A pair's instructions times the pairs, over 128 a cycle and
multiprocessor, is the time below which the kernel cannot run (`issue µs`: 132 of them at 1.75 GHz).
"""

import argparse
import collections
import csv
import re
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "ops"), str(Path(__file__).parent)]

import triton_compiler  # noqa: E402

from layers import LAYERS, VOTES  # noqa: E402

CLASSES = {
    "FFMA": r"FFMA|FMUL|FADD",
    "HFMA2": r"HFMA2|HMUL2|HADD2",
    "MMA": r"HMMA|HGMMA",
    "MUFU": r"MUFU",
    "FMNMX": r"FMNMX|FSETP|FSEL",
    "SHFL": r"SHFL",
    "LDS": r"LDS",
    "STS": r"STS",
    "LDG": r"LDG|STG",
    "local": r"LDL|STL",
    "convert": r"PRMT|F2F|I2F|F2I",
    "barrier": r"BAR|FENCE|WARPGROUP",
}
COLUMNS = ("layer", "kernel", "a pair", *CLASSES, "other", "registers", "stack", "shared KiB")
COLUMNS = (*COLUMNS, "blocks/SM", "issue µs")


def classify(opcode):
    found = (name for name, pattern in CLASSES.items() if re.match(pattern, opcode))
    return next(found, "other")


def pairs_of_an_iteration(arguments):
    """Child-parent pairs that one turn of a kernel's main loop handles."""
    if "BLOCK_A" in arguments:  # large poses
        return arguments["BLOCK_N"] * arguments.get("CHILDREN", arguments.get("PARENTS"))
    children = 8 // arguments["A_PAD"] * arguments.get("HALVES", 2)
    rows = arguments.get("ROWS", 0) // arguments["R_PAD"] or arguments["BLOCK_N"]
    part = arguments.get("PART", arguments["COLUMNS"]) / arguments["COLUMNS"]
    return children * rows * arguments["N_OUT"] * part


def count(name, dtype, capability):
    """A row for each kernel of a layer that goes through its pairs."""
    shapes = (LAYERS | VOTES)[name]
    children, weight, stride = shapes
    k, _, n_in, n_out = weight[:4]
    positions = children[0] * ((children[1] - k) // stride + 1) * ((children[2] - k) // stride + 1)
    if name in VOTES:
        compiled = triton_compiler.compile_moments(shapes, dtype, capability, "by distance")
    else:
        compiled = triton_compiler.compile_step(shapes, dtype, capability)
    # backward may launch a kernel several times, for some of the children each
    once = {
        (kernel, *map(arguments.get, ("GIVEN", "PLANES", "ACTIVE"))): (kernel, arguments, made)
        for kernel, arguments, made in compiled
    }
    for kernel, arguments, made in once.values():
        if "A_PAD" not in arguments and "BLOCK_A" not in arguments:
            continue
        threads = 32 * arguments["num_warps"]
        loop = collections.Counter(map(classify, triton_compiler.main_loop(made)))
        a_pair = threads / pairs_of_an_iteration(arguments)
        registers, stack = triton_compiler.resources(made)
        shared = made.metadata.shared
        blocks = min(65536 // (-(-registers // 8) * 8 * threads), 233472 // (shared + 1024))
        total = a_pair * loop.total()
        microseconds = total * positions * k * k * n_in * n_out / (128 * 132 * 1.75e3)
        given = ", slopes given" if arguments.get("GIVEN") else ""
        backward = arguments.get("PLANES") == 2 or arguments.get("ACTIVE") is False
        given += ", backward" if backward else ""
        yield {
            "layer": name,
            "kernel": kernel.__name__ + given,
            "a pair": f"{total:.1f}",
            **{key: f"{a_pair * loop[key]:.1f}" for key in (*CLASSES, "other")},
            "registers": registers,
            "stack": stack,
            "shared KiB": f"{shared / 1024:.0f}",
            "blocks/SM": min(blocks, 2048 // threads),
            "issue µs": f"{microseconds:.0f}",
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", nargs="*", default=["cifar10 conv1"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--capability", type=int, default=90)
    options = parser.parse_args()
    writer = csv.DictWriter(sys.stdout, COLUMNS, delimiter="\t")
    writer.writeheader()
    for name in LAYERS | VOTES if options.layers == ["all"] else options.layers:
        writer.writerows(count(name, getattr(torch, options.dtype), options.capability))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
