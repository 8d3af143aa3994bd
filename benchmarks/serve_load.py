"""What batching gains `capsroute serve` under load, and whether its memory stays flat.

    python benchmarks/serve_load.py --out benchmarks/serve_load.json

One run on loopback: 32 clients, each with one connection and one request at a time, put a server as
it comes and one with `--max-batch 1` under load in turns, so that a noisy moment hits both, until
each has had `--seconds` of it. Reports throughput, latency, every status, and the servers' resident
memory over time. The clients run in a process of their own and share the machine's cores with the
server.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

MIB = 2**20
HEAD = re.compile(rb"HTTP/1\.1 (\d+).*?content-length: (\d+)\r\n", re.DOTALL | re.IGNORECASE)


@dataclass
class Load:
    """What the clients of one round, or of several, saw."""

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)

    def __add__(self, other: "Load") -> "Load":
        return Load(
            self.seconds + other.seconds,
            self.statuses + other.statuses,
            self.latencies + other.latencies,
        )

    @property
    def answered_per_second(self) -> float:
        return self.statuses[200] / self.seconds


def example_request() -> bytes:
    """A `POST /predict` of an image of two digits that ships with the package, whole."""
    data = (files("capsroute") / "data/samples/digits_2_4.png").read_bytes()
    head = (
        "POST /predict HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: image/png\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def _client(port: int, request: bytes, until: float, load: Load) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.monotonic() < until:
        start = time.monotonic()
        writer.write(request)
        head = HEAD.match(await reader.readuntil(b"\r\n\r\n"))
        assert head is not None
        await reader.readexactly(int(head[2]))
        load.statuses[int(head[1])] += 1
        load.latencies.append(time.monotonic() - start)
        if head[1] == b"503":
            await asyncio.sleep(0.01)
    writer.close()


async def _all_clients(port: int, clients: int, seconds: float) -> Load:
    load, request = Load(seconds), example_request()
    until = time.monotonic() + seconds
    await asyncio.gather(*(_client(port, request, until, load) for _ in range(clients)))
    return load


def _clients(port: int, clients: int, seconds: float) -> Load:
    return asyncio.run(_all_clients(port, clients, seconds))


@contextmanager
def serving(model: str, *options: str) -> Iterator[tuple[int, int]]:
    """A server on a free port, in a process of its own: (port, process id)."""
    command = [sys.executable, "-m", "capsroute", "serve", model, "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = re.search(r"http://[\d.]+:(\d+)", line)
            if address is None:
                raise RuntimeError(f"the server did not start: {line!r}")
            yield int(address[1]), process.pid
        finally:
            process.terminate()
            process.wait()


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


Memory = list[tuple[float, float]]
"""(seconds under load, MiB) of a server."""


@contextmanager
def clients_process() -> Iterator[Pool]:
    with get_context("spawn").Pool(1) as pool:
        pool.apply(_clients, (0, 0, 0.0))  # has imported all it needs before a clock starts
        yield pool


def put_under_load(
    pool: Pool, port: int, pid: int, *, clients: int, seconds: float
) -> tuple[Load, Memory]:
    """What the clients saw, and the server's memory, sampled all the while."""
    memory = []
    start = time.monotonic()
    result = pool.apply_async(_clients, (port, clients, seconds))
    while not result.ready():
        memory.append((time.monotonic() - start, resident_mib(pid)))
        result.wait(0.25)
    return result.get(), memory


def slope(memory: Memory) -> float:
    """MiB a second over the second half, when buffers have their size."""
    times, sizes = zip(*memory[len(memory) // 2 :], strict=True)
    return statistics.linear_regression(times, sizes).slope


def summary(load: Load, memory: Memory) -> dict[str, Any]:
    cuts = statistics.quantiles((1e3 * latency for latency in load.latencies), n=100)
    return {
        "seconds": round(load.seconds, 1),
        "answered_per_second": round(load.answered_per_second, 1),
        "statuses": {str(status): count for status, count in sorted(load.statuses.items())},
        "latency_ms": {"p50": round(cuts[49], 2), "p99": round(cuts[98], 2)},
        "memory_mib": {
            "start": round(memory[0][1], 1),
            "end": round(memory[-1][1], 1),
            "highest": round(max(size for _, size in memory), 1),
            "slope_per_minute": round(60 * slope(memory), 2),
        },
    }


def measure(model: str, clients: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Both servers in turns; the first round warms them up and is not counted."""
    options = {"batched": (), "unbatched": ("--max-batch", "1")}
    loads = dict.fromkeys(options, Load())
    memory: dict[str, Memory] = {name: [] for name in options}
    with ExitStack() as stack:
        pool = stack.enter_context(clients_process())
        servers = {
            name: stack.enter_context(serving(model, *flags)) for name, flags in options.items()
        }
        for number in range(rounds + 1):
            for name, (port, pid) in servers.items():
                load, sizes = put_under_load(
                    pool, port, pid, clients=clients, seconds=seconds / rounds
                )
                print(f"{number}: {name} {load.answered_per_second:.0f}/s", flush=True)
                if number:
                    memory[name] += [(loads[name].seconds + at, size) for at, size in sizes]
                    loads[name] += load
    report = {name: summary(loads[name], memory[name]) for name in options}
    speeds = [report[name]["answered_per_second"] for name in options]
    return {
        "model": model,
        "clients": clients,
        "cores": os.cpu_count(),
        **report,
        "ratio": round(speeds[0] / speeds[1], 2),
        **_where(),
    }


def _where() -> dict[str, Any]:
    import torch  # late: the clients' processes import this file too

    from capsroute.train.provenance import device_name, versions

    return {"device": device_name(torch.device("cpu")), **versions()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="inverted_small_multimnist")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    arguments = vars(parser.parse_args())
    out = arguments.pop("out")
    report = measure(**arguments)
    print(json.dumps(report, indent=1))
    if out:
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
