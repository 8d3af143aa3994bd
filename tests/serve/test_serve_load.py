"""The benchmark's clients, for a few seconds: no error, and memory that does not grow."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.slow


@pytest.fixture
def serve_load(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)  # its clients are a process that imports it, too
    import serve_load

    yield serve_load
    del sys.modules["serve_load"]


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


def test_more_clients_than_places_get_503_and_nothing_else(serve_load):
    with (
        serve_load.clients_process() as pool,
        serve_load.serving("inverted_small_multimnist", "--queue", "4") as (port, pid),
    ):
        load, _ = serve_load.put_under_load(pool, port, pid, clients=32, seconds=2)
    assert set(load.statuses) == {200, 503}
