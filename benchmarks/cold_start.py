"""How long a training takes to start where nothing has been compiled yet, and its epochs then.

    python benchmarks/cold_start.py                     # as it is
    python benchmarks/cold_start.py combo_kernels       # with these compiler options; `none`: none

Three epochs of fast_cifar100, so a GPU and CIFAR-100 are needed, with empty caches. Seconds count
training alone, as in a run's metrics.jsonl: the first epoch's hold the compiling of a training
step. `all_s` is everything after the imports, evaluations and what they compile included.
"""

import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from capsroute.experiments import preset
from capsroute.train import build
from capsroute.train.engine import train
from capsroute.train.metrics import MetricsFile
from capsroute.train.provenance import versions
from capsroute.train.reporting import Reporter


def main(options: list[str]) -> None:
    if options:
        build.COMPILER_OPTIONS = {name: True for name in options if name != "none"}
    config = dataclasses.replace(preset("fast_cifar100").config, epochs=3)
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ[cache] = str(Path(folder) / cache)
        start = time.monotonic()
        found = train(config, Path(folder) / "run", build.Runtime("cuda"), Reporter())
        whole = time.monotonic() - start
        records = MetricsFile(Path(folder) / "run" / "metrics.jsonl").read()
    at = [record["seconds"] for record in records]
    row = {
        "options": build.COMPILER_OPTIONS,
        "first_epoch_s": round(at[0], 1),
        "next_epoch_s": round((at[-1] - at[0]) / (len(at) - 1), 2),
        "all_s": round(whole, 1),
        "device": found["device"],
        **versions(),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1:])
