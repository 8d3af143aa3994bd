"""The queue in front of the model."""

import asyncio
import threading
import time
from contextlib import ExitStack, asynccontextmanager

import pytest

from capsroute.serve.batching import Batcher, BusyError


class Doubler:
    """Doubles numbers and remembers its batches; fails on −1, refuses −2; can be held."""

    def __init__(self):
        self.batches = []
        self.may_go = threading.Event()
        self.may_go.set()

    def __call__(self, items):
        assert self.may_go.wait(10)
        self.batches.append(list(items))
        if -1 in items:
            raise ValueError("minus one")
        return [KeyError(item) if item == -2 else 2 * item for item in items]


@asynccontextmanager
async def batching(run, *, max_batch=8, max_wait=0.0, places=64):
    batcher = Batcher(run, max_batch=max_batch, max_wait=max_wait, places=places)
    try:
        yield batcher
    finally:
        await batcher.close()


def on_loop(test):
    """A coroutine as a test, with an end."""

    def run_test():
        asyncio.run(asyncio.wait_for(test(), 20))

    run_test.__name__ = test.__name__
    return run_test


async def submit(batcher, item):
    with batcher.place() as put:
        return await put(item)


@on_loop
async def test_what_waits_goes_together_and_every_answer_finds_its_caller():
    run = Doubler()
    run.may_go.clear()
    async with batching(run, max_batch=8) as batcher:
        tasks = [asyncio.create_task(submit(batcher, item)) for item in range(20)]
        await asyncio.sleep(0.05)
        run.may_go.set()
        assert await asyncio.gather(*tasks) == [2 * item for item in range(20)]
    assert max(map(len, run.batches)) == 8 and len(run.batches) <= 4
    assert [item for batch in run.batches for item in batch] == list(range(20))


@on_loop
async def test_a_lone_request_waits_for_nobody():
    async with batching(Doubler(), max_wait=15.0) as batcher:
        start = time.monotonic()
        assert await submit(batcher, 3) == 6
        assert time.monotonic() - start < 5


@on_loop
async def test_a_batch_waits_for_requests_that_are_on_their_way():
    run = Doubler()
    async with batching(run, max_wait=15.0) as batcher:

        async def slow_upload(item):
            with batcher.place() as put:
                await asyncio.sleep(0.1)
                return await put(item)

        assert await asyncio.gather(slow_upload(2), submit(batcher, 1)) == [4, 2]
    assert run.batches == [[1, 2]]


@on_loop
async def test_an_upload_that_breaks_off_is_not_waited_for():
    run = Doubler()
    async with batching(run, max_wait=15.0) as batcher:

        async def broken_upload():
            with batcher.place():
                await asyncio.sleep(0.1)

        start = time.monotonic()
        assert (await asyncio.gather(broken_upload(), submit(batcher, 1)))[1] == 2
        assert time.monotonic() - start < 5
    assert run.batches == [[1]]


@on_loop
async def test_no_longer_than_it_may():
    run = Doubler()
    async with batching(run, max_wait=0.05) as batcher:
        with batcher.place():  # an upload that does not come
            assert await submit(batcher, 1) == 2
    assert run.batches == [[1]]


@on_loop
async def test_places_run_out_and_come_back():
    async with batching(Doubler(), places=2) as batcher:
        with ExitStack() as taken:
            taken.enter_context(batcher.place())
            taken.enter_context(batcher.place())
            assert batcher.in_progress == 2
            with pytest.raises(BusyError):
                await submit(batcher, 1)
        assert batcher.in_progress == 0
        assert await submit(batcher, 1) == 2


@on_loop
async def test_an_error_reaches_its_batch_alone():
    async with batching(Doubler(), max_batch=1) as batcher:
        tasks = [asyncio.create_task(submit(batcher, item)) for item in (1, -1, 2)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[::2] == [2, 4] and isinstance(results[1], ValueError)


@on_loop
async def test_an_item_that_is_refused_does_not_touch_its_neighbours():
    run = Doubler()
    run.may_go.clear()
    async with batching(run) as batcher:
        tasks = [asyncio.create_task(submit(batcher, item)) for item in (0, 1, -2, 2)]
        await asyncio.sleep(0.05)
        run.may_go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert run.batches[-1][-3:] == [1, -2, 2]
    assert isinstance(results[2], KeyError) and results[:2] + results[3:] == [0, 2, 4]


@on_loop
async def test_who_has_gone_costs_the_model_nothing():
    run = Doubler()
    run.may_go.clear()
    async with batching(run, max_batch=1) as batcher:
        held = asyncio.create_task(submit(batcher, 1))
        gone = asyncio.create_task(submit(batcher, 2))
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.sleep(0)
        run.may_go.set()
        assert await held == 2
        assert await submit(batcher, 3) == 6
    assert run.batches == [[1], [3]]


@on_loop
async def test_closing_finishes_what_was_submitted():
    run = Doubler()
    run.may_go.clear()
    async with batching(run, max_batch=2) as batcher:
        tasks = [asyncio.create_task(submit(batcher, item)) for item in range(5)]
        await asyncio.sleep(0.05)
        threading.Timer(0.1, run.may_go.set).start()
    assert await asyncio.gather(*tasks) == [0, 2, 4, 6, 8]
