"""Requests that come at the same time go through the model together.

A request takes its place before its upload is read, so it is known who is on the way: a batch
waits for them alone, and a lone request for nobody. All bookkeeping is in the event loop; the one
worker thread is told of whole batches, since waking it costs more than anything else here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class BusyError(Exception):
    """Every place is taken."""


class _Job(NamedTuple, Generic[Item, Result]):
    item: Item
    answer: "asyncio.Future[Result]"


class Batcher(Generic[Item, Result]):
    """Runs `run(items) -> results`, in order, on up to `max_batch` items at a time.

    Args:
        run: called in the worker thread, one batch after the other; a result that is an exception
            is raised for the item's caller alone.
        max_batch: items in one call.
        max_wait: seconds that the first item of a batch waits for uploads under way.
        places: requests in progress at most, from before the upload is read to the answer.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Result | Exception]],
        *,
        max_batch: int,
        max_wait: float,
        places: int,
    ) -> None:
        self._run = run
        self._max_batch = max_batch
        self._max_wait = max_wait
        self._places = places
        self._taken = 0
        self._coming = 0  # have a place, and have not submitted
        self._waiting: list[_Job[Item, Result]] = []
        self._running = False
        self._timer: asyncio.TimerHandle | None = None
        self._done = asyncio.Event()
        self._worker = ThreadPoolExecutor(1, "capsroute-model")

    @property
    def in_progress(self) -> int:
        return self._taken

    async def close(self) -> None:
        """Finish what was submitted, then end the worker."""
        while self._waiting or self._running:
            self._done.clear()
            await self._done.wait()
        self._worker.shutdown()

    @contextmanager
    def place(self) -> Iterator[Callable[[Item], Awaitable[Result]]]:
        """A place for the whole of a request, or BusyError at once; gives what submits its item.

        A caller that is cancelled before its batch begins costs the model nothing.
        """
        if self._taken >= self._places:
            raise BusyError
        self._taken += 1
        self._coming += 1
        submitted = False

        def submit(item: Item) -> Awaitable[Result]:
            nonlocal submitted
            submitted = True
            return self._submit(item)

        try:
            yield submit
        finally:
            self._taken -= 1
            if not submitted:  # an upload that was refused, or broke off
                self._coming -= 1
                self._begin_if_ready()

    def _submit(self, item: Item) -> "asyncio.Future[Result]":
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._coming -= 1
        self._waiting.append(_Job(item, answer))
        self._begin_if_ready()
        return answer

    def _begin_if_ready(self) -> None:
        if self._running or not self._waiting:
            return
        if len(self._waiting) >= self._max_batch or not self._coming:
            self._begin()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._max_wait, self._begin)

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting = [job for job in self._waiting if not job.answer.done()]
        batch = self._waiting[: self._max_batch]
        del self._waiting[: self._max_batch]
        if not batch:
            self._done.set()
            return
        self._running = True
        items = [job.item for job in batch]
        call = asyncio.get_running_loop().run_in_executor(self._worker, self._run, items)
        call.add_done_callback(lambda finished: self._finish(batch, finished))

    def _finish(
        self,
        batch: list[_Job[Item, Result]],
        call: "asyncio.Future[Sequence[Result | Exception]]",
    ) -> None:
        self._running = False
        error = call.exception()
        results = call.result() if error is None else [error] * len(batch)
        for (_, answer), result in zip(batch, results, strict=True):
            if answer.done():  # its caller has gone
                continue
            if isinstance(result, BaseException):
                answer.set_exception(result)
            else:
                answer.set_result(result)
        self._begin_if_ready()
        self._done.set()
