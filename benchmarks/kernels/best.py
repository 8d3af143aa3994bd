"""Print the fastest settings of a sweep: `python benchmarks/kernels/best.py sweep.jsonl`."""

import collections
import json
import sys
from pathlib import Path


def main():
    trials = collections.defaultdict(list)
    for line in Path(sys.argv[1]).read_text().splitlines():
        record = json.loads(line)
        if "us" in record:
            trials[record["layer"], record["sweep"]].append((record["us"], record["setting"]))
    for (layer, kernel), timed in trials.items():
        default = next((us for us, setting in timed if not setting), float("nan"))
        best = sorted(timed, key=lambda trial: trial[0])[:3]
        text = "  ".join(f"{us:.0f} {setting or 'as set'}" for us, setting in best)
        print(f"{layer} {kernel}: as set {default:.0f} µs; {text}")


if __name__ == "__main__":
    main()
