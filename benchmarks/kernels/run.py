"""Check and time the Triton kernels on a card: `python benchmarks/kernels/run.py --layers all`.

    --layers all   time the layers of the models
    --check        error against fp64 beside plain PyTorch's, odd shapes, three dtypes
    --sweep NAME   try launch settings on one layer, print the best of each kernel
Every number is a median over replays of a CUDA graph that holds the kernel ten times.
"""

import argparse
import csv
import itertools
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "ops")]

import triton_cases as cases  # noqa: E402

from capsroute.ops.inverted.triton import backward, forward, geometry  # noqa: E402
from capsroute.ops.inverted.triton.geometry import Geometry  # noqa: E402

B = 128
LAYERS = {
    "cifar10 conv1": ((B, 16, 16, 32, 16), (3, 3, 32, 32, 4, 4), 2),
    "cifar10 conv2": ((B, 7, 7, 32, 16), (3, 3, 32, 32, 4, 4), 1),
    "cifar10 class": ((B, 1, 1, 800, 16), (1, 1, 800, 10, 4, 4), 1),
    "cifar100 conv1": ((B, 16, 16, 32, 36), (3, 3, 32, 32, 6, 6), 2),
    "cifar100 conv2": ((B, 7, 7, 32, 36), (3, 3, 32, 32, 6, 6), 1),
    "cifar100 800-20": ((B, 1, 1, 800, 36), (1, 1, 800, 20, 6, 6), 1),
    "cifar100 20-100": ((B, 1, 1, 20, 36), (1, 1, 20, 100, 6, 6), 1),
    "matrix conv": ((B, 8, 8, 16, 64), (3, 3, 16, 16, 8, 8), 1),
    "matrix class": ((B, 1, 1, 576, 64), (1, 1, 576, 10, 8, 8), 1),
    "wide class": ((B, 1, 1, 2304, 64), (1, 1, 2304, 10, 8, 8), 1),
    "vector conv": ((B, 8, 8, 16, 64), (3, 3, 16, 16, 64, 64), 1),
    "vector class": ((B, 1, 1, 576, 64), (1, 1, 576, 10, 64, 64), 1),
}


def time_us(function, inner=10, repeats=15):
    """Median, 20th and 80th percentile of one call, in microseconds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(inner):
                function()
        graph.replay()
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end) / inner)
    times.sort()
    return times[repeats // 2], times[repeats // 5], times[4 * repeats // 5]


class Layer:
    def __init__(self, name, dtype):
        tensors, self.stride, self.scale = cases.layer(LAYERS[name], dtype, 0, "cuda")
        self.children, weight, self.parents, self.cotangent = tensors
        self.sizes = Geometry.of(self.children, weight, self.stride, False)
        self.weight = weight.transpose(3, 4).contiguous() if self.sizes.small else weight

    def forward(self):
        return forward.weighted_votes(
            self.children, self.weight, self.parents, None, self.sizes, self.scale, False
        )

    def backward(self):
        return backward.gradients(
            self.cotangent, self.children, self.weight, self.parents, self.sizes, self.scale
        )

    def launches(self, function):
        """What a pass launches, each as a function to time."""
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

    def pairs(self):
        return self.sizes.positions * self.sizes.window * self.sizes.n_out

    def flops(self, backward):
        n = self.sizes
        product, pose = n.rows * n.a * n.b, n.rows * n.b
        return 2 * self.pairs() * ((3 * product + 5 * pose) if backward else (product + 2 * pose))


def measure(names, dtype, writer):
    for name in names:
        layer = Layer(name, dtype)
        line = f"{name:16s}"
        for mode in ("forward", "backward"):
            function = getattr(layer, mode)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            function()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
            median, p20, p80 = time_us(function)
            rate = layer.flops(mode == "backward") / median / 1e6
            line += f" | {mode} {median:7.1f} µs {rate:5.1f} TF/s {peak:5.0f} MiB:"
            writer.writerow([name, str(dtype), mode, "all", median, p20, p80, rate, peak])
            for kernel, grid, call in layer.launches(function):
                median, p20, p80 = time_us(call)
                line += f" {kernel.removesuffix('_kernel')}{grid} {median:.1f}"
                writer.writerow([name, str(dtype), mode, kernel, median, p20, p80, "", ""])
        print(line, flush=True)


def check(index):
    """Case number `index`, or every case."""
    worst = 0.0
    chosen = list(cases.ODD.items())[slice(None) if index is None else slice(index, index + 1)]
    for (name, shapes), dtype, seed in itertools.product(
        chosen, (torch.bfloat16, torch.float16, torch.float32), range(3)
    ):
        try:
            rows = cases.errors(shapes, dtype, seed, "cuda")
        except Exception as error:  # report every case of a lease, not the first alone
            print(f"FAIL {name} {dtype}: {type(error).__name__} {str(error)[:300]}", flush=True)
            continue
        ratios = [ours / theirs for _, ours, theirs in rows]
        good = all(ratio <= budget for ratio, budget in zip(ratios, cases.BUDGETS, strict=True))
        worst = max(worst, *ratios)
        if not good:
            print("FAIL", name, dtype, *[f"{r:.2f}" for r in ratios], flush=True)
    print(f"check {index}: worst ratio {worst:.2f}")


SWEEPS = {
    "route": {
        "pairs": (1, 2, 4),
        "num_warps": (4,),
        "programs": (24,),
        "unroll": (1, 2),
        "prefetch": (0, 1),
    },
    "gradients": {
        "c_rows": (32, 64),
        "w_rows": (64,),
        "columns": (64, 128),
        "group": (2, 4),
        "num_warps": (4, 8),
        "programs": (8,),
    },
}


def sweep(name, dtype, which, part, parts):
    """Time each kernel with each setting; `part` of `parts` only, to fill the cache in parallel."""
    layer = Layer(name, dtype)
    saved = forward.route_tuning, backward.gradient_tuning
    for kind, mode in (("route", "forward"), ("route", "backward"), ("gradients", "backward")):
        if which not in ("all", kind):
            continue
        space, results = SWEEPS[kind], {}
        settings = list(itertools.product(*space.values()))[part::parts]
        for values in settings:
            setting = dict(zip(space, values, strict=True))
            if kind == "route":
                forward.route_tuning = lambda *_, s=setting: s
            else:
                backward.gradient_tuning = lambda *_, s=setting: s
            try:
                for kernel, _, call in layer.launches(getattr(layer, mode)):
                    if ("route" in kernel) == (kind == "route"):
                        median = time_us(call, 4, 5)[0] if parts == 1 else 0.0
                        results.setdefault(kernel, []).append((median, values))
            except Exception as error:
                print(f"{name} {kind} {setting}: {str(error)[:80]}", flush=True)
            torch.cuda.empty_cache()
        forward.route_tuning, backward.gradient_tuning = saved
        if parts > 1:
            continue
        for kernel, timed in results.items():
            timed.sort()
            picked = [*timed[:5], timed[len(timed) // 2], timed[-1]]
            text = " ".join(
                f"{median:.0f}:{','.join(map(str, values))}" for median, values in picked
            )
            print(f"{name} {mode} {kernel} ({','.join(space)}) {text}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", type=int, nargs="?", const=-1, help="a case's number, or all")
    parser.add_argument("--layers", nargs="*", default=[])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sweep", nargs="*", default=[])
    parser.add_argument("--kind", default="all")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1))
    parser.add_argument("--csv", default="/dev/null")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    if options.check is not None:
        check(None if options.check < 0 else options.check)
    names = list(LAYERS) if options.layers == ["all"] else options.layers
    with Path(options.csv).open("w") as file:
        measure(names, dtype, csv.writer(file))
    for name in options.sweep:
        sweep(name, dtype, options.kind, *options.part)


if __name__ == "__main__":
    main()
