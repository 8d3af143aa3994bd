"""Print times as the table of ops/inverted/README.md: `python benchmarks/kernels/table.py FILE`.

The first source in the file is the version now, another one is the version before.
"""

import collections
import json
import sys
from pathlib import Path

SMALL = ("small_coefficients_kernel", "route_kernel", "small_children_kernel")
SMALL = (*SMALL, "small_weight_kernel", "fold_kernel")
LARGE = ("coefficients_kernel", "aggregate_kernel", "large_children_kernel")
LARGE = (*LARGE, "large_weight_kernel", "fold_kernel")


def passes(records):
    """Forward, backward and the backward pass's kernels, in microseconds."""
    times = collections.Counter()
    for record in records:  # of a kernel several, if backward took some children at a time
        times[record["mode"], record["kernel"]] += record["us"]
    forward, both = times["forward", "all"], times["both", "all"]
    names = LARGE if ("both", LARGE[0]) in times else SMALL
    return forward, both - forward, [times.get(("both", name)) for name in names]


def main():
    records = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    sources = list(dict.fromkeys(record["source"] for record in records))
    for layer in dict.fromkeys(record["layer"] for record in records):
        versions = [
            passes(found)
            for source in reversed(sources)  # before, then now
            if (found := [r for r in records if (r["layer"], r["source"]) == (layer, source)])
        ]
        cells = [" → ".join(f"{v[i]:.0f}" for v in versions) for i in (0, 1)]
        kernels = [f"{us:.0f}" if us else "–" for us in versions[-1][2]]
        print(f"| {layer} | {' | '.join(cells)} | {' / '.join(kernels)} |")


if __name__ == "__main__":
    main()
