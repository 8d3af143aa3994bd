"""The benchmark's report, and its clients for a few seconds: no error, memory that stays flat."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def serve_load(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)  # its clients are a process that imports it, too
    import serve_load

    yield serve_load
    del sys.modules["serve_load"]


def test_what_the_docs_say_of_the_load_was_measured():
    report = json.loads((BENCHMARKS / "serve_load.json").read_text())
    assert (report["clients"], report["cores"], report["dirty"]) == (32, 2, False)
    assert report["ratio"] >= 3
    for server in (report["batched"], report["unbatched"]):
        assert server["seconds"] == 30
        assert set(server["statuses"]) <= {"200", "503"} and server["statuses"]["200"] > 1000
        assert server["memory_mib"]["highest"] - server["memory_mib"]["start"] < 5
        assert abs(server["memory_mib"]["slope_per_minute"]) < 1


@pytest.mark.slow
def test_32_clients_see_no_error_and_memory_stays_flat(serve_load):
    with (
        serve_load.clients_process() as pool,
        serve_load.serving("inverted_small_multimnist") as (port, pid),
    ):
        serve_load.put_under_load(pool, port, pid, clients=32, seconds=2)  # buffers get their size
        load, memory = serve_load.put_under_load(pool, port, pid, clients=32, seconds=5)
    assert set(load.statuses) <= {200, 503} and load.statuses[200] > 100
    sizes = [size for _, size in memory]
    assert max(sizes) - sizes[0] < 20  # MiB; 10 KiB kept of each request would be more


@pytest.mark.slow
def test_more_clients_than_places_get_503_and_nothing_else(serve_load):
    with (
        serve_load.clients_process() as pool,
        serve_load.serving("inverted_small_multimnist", "--queue", "4") as (port, pid),
    ):
        load, _ = serve_load.put_under_load(pool, port, pid, clients=32, seconds=2)
    assert set(load.statuses) == {200, 503}
