"""Check and time the Triton kernels on a card; lease.sh calls it for everything a lease is for.

    --check [N]    error against fp64 beside plain PyTorch's, odd shapes, three dtypes (case N only)
    --layers NAME  time layers of the models, forward and backward and kernel by kernel (those of
                   EM routing, "em …", a contest for the votes)
    --sweep NAME   time each kernel of a layer with other launch settings, and both passes with
                   other limits on the coefficients held
    --warm         compile what the others would run, and time nothing

KERNELS_SOURCE in the environment names the folder of another version of the package to time. Every
time is a median over replays of a CUDA graph that holds the call up to ten times. Results are added
to `--json` as one object a line. Their `source` is the commit: git's, with + if files differ from
it, or CAPSROUTE_COMMIT where there is no git; of another version git's, or its folder, which should
be named by the commit.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
OTHER = os.environ.get("KERNELS_SOURCE")
SOURCE = OTHER or str(ROOT / "src")
sys.path[:0] = [SOURCE, str(ROOT / "tests" / "ops"), str(Path(__file__).parent)]

import triton_cases as cases  # noqa: E402
import vote_checks as votes  # noqa: E402

from capsroute.ops.inverted import triton as kernels  # noqa: E402
from capsroute.ops.inverted.triton import geometry  # noqa: E402
from layers import LAYERS, VOTES  # noqa: E402

ACCUMULATOR = [
    {"num_stages": 2},
    {"num_stages": 4},
    {"resident": 1},
    {"resident": 3},
    {"resident": 4},
]
SWEEPS = {
    "route": ACCUMULATOR,
    "slopes": ACCUMULATOR,
    "coefficients": ACCUMULATOR,
    "children": [*ACCUMULATOR, {"resident": 2}, {"rows": 128, "num_warps": 8, "resident": 1}],
    "weight": [
        *({"halves": halves} for halves in (4, 6, 8, 12, 16)),
        *({"resident": resident} for resident in (2, 3, 4)),
        {"num_stages": 3},
        {"num_warps": 8, "resident": 1},
        {"rows": 32, "halves": 4, "resident": 4},
        {"rows": 32, "halves": 8, "num_stages": 3},
        {"rows": 64, "halves": 8, "resident": 2},
        {"rows": 64, "halves": 16, "resident": 2},
        {"rows": 128, "num_warps": 8, "halves": 8, "resident": 1},
    ],
}
# of large poses: 128 rows read every transform half as often, a larger group every pose; some of
# these take more shared memory than consumer cards have
TALL = {"rows": 128, "num_warps": 8}
SWEEPS |= {
    "large_shares": [{"num_stages": 2}, {"group": 1}, TALL, TALL | {"group": 1}],
    "large_slopes": [{"num_stages": 2}, {"group": 1}, TALL, TALL | {"num_stages": 2}],
    "large_votes": [{"num_stages": 2}, {"group": 1}, TALL, {"resident": 6}],
    "large_children": [
        {"num_stages": 2},
        {"group": 1},
        {"group": 4, "num_stages": 2},
        TALL | {"num_stages": 2},
        TALL,
    ],
    "large_weight": [
        {"num_stages": 2},
        {"group": 1},
        {"group": 4, "num_stages": 2},
        {"group": 4},
        {"rows": 128, "num_stages": 2},
    ],
}
CHUNKS = (32, 64, 128, 256, 1024)  # MiB of coefficients at a time
KERNELS = {
    "route": "route_kernel",
    "slopes": "route_kernel",
    "coefficients": "small_coefficients_kernel",
    "children": "small_children_kernel",
    "weight": "small_weight_kernel",
    "large_shares": "coefficients_kernel",
    "large_slopes": "coefficients_kernel",
    "large_votes": "aggregate_kernel",
    "large_children": "large_children_kernel",
    "large_weight": "large_weight_kernel",
}
FORWARD = ("route", "large_shares")


def commit():
    """Of the version that is timed, or None where nobody knows."""
    try:
        git("ls-files", "--error-unmatch", "capsroute/__init__.py")  # not of a repository around it
        return git("rev-parse", "--short=7", "HEAD") + "+" * bool(git("status", "--short", "."))
    except (OSError, subprocess.CalledProcessError):
        return OTHER or os.environ.get("CAPSROUTE_COMMIT", "")[:7] or None


def git(*arguments):
    command = ["git", "-C", SOURCE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def time_us(function, repeats=15):
    """Median, 20th and 80th percentile of one call, in microseconds."""
    stream = torch.cuda.Stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def elapsed(run):
        start.record()
        run()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    with torch.cuda.stream(stream):
        function()
        calls = min(10, max(1, round(5e3 / elapsed(function))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                function()
        graph.replay()
        times = sorted(elapsed(graph.replay) / calls for _ in range(repeats))
    return {"us": times[repeats // 2], "p20": times[repeats // 5], "p80": times[-repeats // 5]}


class Layer:
    """One routed step of a model, through the interface that every version has."""

    def __init__(self, name, dtype):
        shapes = LAYERS[name]
        self.tensors, self.stride, self.scale = cases.layer(shapes, dtype, 0, "cuda")

    def forward(self):
        with torch.no_grad():
            return kernels.routing_step(*self.tensors[:3], stride=self.stride, scale=self.scale)

    def both(self):
        return cases.run(kernels.routing_step, self.tensors, self.stride, self.scale)

    def launches(self, function):
        """What a pass launches: (name, grid, the launch again)."""
        recorded, run = [], geometry.launch

        def record(kernel, grid, **arguments):
            recorded.append((kernel.__name__, grid, lambda: run(kernel, grid, **arguments)))
            run(kernel, grid, **arguments)

        geometry.launch = record
        try:
            function()
        finally:
            geometry.launch = run
        return recorded


class Votes(Layer):
    """One contest for the votes of a layer, as EM routing holds it."""

    def __init__(self, name, dtype):
        self.inputs, self.cotangents, self.stride = votes.layer(VOTES[name], dtype, 0, "cuda")

    def forward(self):
        with torch.no_grad():
            return self.moments(self.inputs)

    def both(self):
        return votes.with_gradients(self.moments, self.inputs, self.cotangents)

    def moments(self, inputs):
        return votes.moments(inputs, self.stride, "by distance", "triton")


def measure(name, dtype, emit, warm):
    layer = (Votes if name in VOTES else Layer)(name, dtype)
    forward = layer.launches(layer.forward)
    launches = {"forward": forward, "both": layer.launches(layer.both)[len(forward) :]}
    if warm:
        return
    medians = []
    for mode, calls in launches.items():
        function = getattr(layer, mode)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        timed = time_us(function)
        medians.append(timed["us"])
        emit(layer=name, mode=mode, kernel="all", peak_mib=peak, **timed)
        for kernel, grid, call in calls:
            emit(layer=name, mode=mode, kernel=kernel, grid=grid, **time_us(call))
    print(f"{name:16s} forward {medians[0]:7.1f} backward {medians[1] - medians[0]:7.1f} µs")


def check(index, emit):
    """Case number `index`, or every case."""
    chosen = list(cases.ODD.items())
    for (name, shapes), dtype, seed in itertools.product(
        chosen if index < 0 else chosen[index : index + 1],
        (torch.bfloat16, torch.float16, torch.float32),
        range(5),
    ):
        try:
            found = cases.errors(shapes, dtype, seed, "cuda", draws=5)
        except Exception as error:  # report every case of a lease, not the first alone
            emit(check=name, dtype=str(dtype), seed=seed, good=False, error=str(error)[:300])
            continue
        ratios = {f"{what}, {measure}": a / b for (what, measure), (a, b) in found.items()}
        good = all(a <= cases.BUDGETS[what] * b for (what, _), (a, b) in found.items())  # not NaN
        emit(check=name, dtype=str(dtype), seed=seed, good=good, ratios=ratios)


def sweep(name, dtype, emit, warm, part, parts):
    """Time each kernel with each setting; `part` of `parts` only, to compile in parallel."""
    from capsroute.ops.inverted.triton import tuning

    layer = Layer(name, dtype)
    forward = len(layer.launches(layer.forward))
    launched = {kernel for kernel, *_ in layer.launches(layer.both)}
    trials = [
        (kind, setting)
        for kind, settings in SWEEPS.items()
        for setting in [{}, *settings]
        if KERNELS[kind] in launched
    ]
    for kind, setting in trials[part::parts]:
        tuning.OVERRIDES[kind] = setting
        try:
            calls = layer.launches(layer.both)
            calls = calls[:forward] if kind in FORWARD else calls[forward:]
            named = [call for kernel, _, call in calls if kernel == KERNELS[kind]]
            if not warm:
                timed = time_us(lambda named=named: [call() for call in named], 7)
                emit(layer=name, sweep=kind, setting=setting, **timed)
        except Exception as error:  # a setting that does not fit is a result too
            emit(layer=name, sweep=kind, setting=setting, error=str(error)[:200])
        del tuning.OVERRIDES[kind]
    if KERNELS["coefficients"] not in launched:
        return  # large poses hold the coefficients of all children
    whole = tuning.COEFFICIENT_BYTES
    for megabytes in CHUNKS[part::parts]:
        tuning.COEFFICIENT_BYTES = megabytes << 20
        setting = {"MiB": megabytes} if megabytes << 20 != whole else {}
        layer.both()
        if not warm:
            emit(layer=name, sweep="both", setting=setting, **time_us(layer.both, 7))
    tuning.COEFFICIENT_BYTES = whole


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", type=int, nargs="?", const=-1, help="a case's number, or all")
    parser.add_argument("--layers", nargs="*", default=[])
    parser.add_argument("--sweep", nargs="*", default=[])
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", default="/dev/null")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    source = commit()
    if source is None and options.json != parser.get_default("json"):
        parser.error("results must name a commit: run it in a checkout, or set CAPSROUTE_COMMIT")
    with Path(options.json).open("a") as file:

        def emit(**record):
            known = {"source": source, "dtype": options.dtype}
            print(json.dumps({**known, **record}), file=file, flush=True)

        if options.check is not None:
            check(options.check, emit)
        for name in LAYERS | VOTES if options.layers == ["all"] else options.layers:
            measure(name, dtype, emit, options.warm)
        for name in options.sweep:
            sweep(name, dtype, emit, options.warm, *options.part)


if __name__ == "__main__":
    main()
