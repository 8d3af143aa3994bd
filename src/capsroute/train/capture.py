"""Steps as CUDA graphs: at this size, launching the kernels costs more than running them.

A captured step reads everything that changes (which images, their random numbers, the learning
rate) from tensors on the device, which are filled for many steps at once. So a step is one launch,
and within an epoch the host neither copies nor waits.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from capsroute.data import TrainBatches
from capsroute.data.splits import Batch, move
from capsroute.train.step import Moment, TrainStep

AHEAD = 64  # steps whose plans travel to the device together
WARM_UP = 3  # calls that run as they are: they compile, tune and allocate


class Graphs:
    """Turns functions without arguments into graphs that share their memory.

    No two of them may run at once, and what a function reads must lie at the same address at every
    call. On a CPU a function stays a function.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        # one stream for all: autograd remembers the stream on which it first saw a weight
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def replay(self, function: Callable[[], None]) -> Callable[[], None]:
        return function if self.stream is None else _Replay(function, self)


class _Replay:
    """A function that becomes a graph after a few calls, which count like any other."""

    def __init__(self, function: Callable[[], None], graphs: Graphs) -> None:
        self.function, self.graphs = function, graphs
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self.graph is None and self.calls < WARM_UP:
            self.calls += 1
            self._run_aside()
            return
        if self.graph is None:
            self.graph = self._capture()
        self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with (
            _no_garbage_collection(),
            torch.cuda.graph(
                graph,
                pool=self.graphs.pool,
                stream=self.graphs.stream,
                capture_error_mode="thread_local",  # other threads may go on using the device
            ),
        ):
            self.function()
        return graph

    def _run_aside(self) -> None:
        stream, current = self.graphs.stream, torch.cuda.current_stream(self.graphs.device)
        assert stream is not None
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.function()
        current.wait_stream(stream)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """An old graph or kernel that happens to be freed during a capture would spoil it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CapturedSteps:
    """Training steps in the order of a run, one graph for each size of batch.

    `moment(step)` gives a step's learning rate and epoch, `render` makes a whole batch of a plan;
    for a short one it need not be compiled.
    """

    def __init__(
        self,
        graphs: Graphs,
        batches: TrainBatches,
        render: Callable[[Tensor], Batch],
        train_step: TrainStep,
        moment: Callable[[int], Moment],
        steps: int,
    ) -> None:
        self.graphs, self.batches, self.render = graphs, batches, render
        self.train_step, self.moment, self.steps = train_step, moment, steps
        shape = (AHEAD, *batches.plan(0).shape)
        self.plans = torch.zeros(shape, dtype=torch.int64, device=graphs.device)
        self.moments = torch.zeros((AHEAD, 3), dtype=torch.float64, device=graphs.device)
        self.row = torch.zeros(1, dtype=torch.int64, device=graphs.device)
        self.staged = range(0)
        self.by_size: dict[int, Callable[[], None]] = {}

    def __call__(self, step: int) -> None:
        """Run a step; after the first call, the one that follows the step before."""
        if step not in self.staged:
            self._stage(range(step, min(step + AHEAD, self.steps)))
        size = self.batches.global_size(step)
        if size not in self.by_size:
            self.by_size[size] = self.graphs.replay(partial(self._run, size))
        self.by_size[size]()

    def _stage(self, steps: range) -> None:
        """Send the plans and moments of some steps to the device."""
        plans = torch.zeros(self.plans.shape, dtype=torch.int64)
        for row, step in enumerate(steps):
            plan = self.batches.plan(step)
            plans[row, : len(plan)] = plan
        moments = [self.moment(step) for step in steps]
        numbers = torch.tensor([[m.step, m.lr, m.epoch] for m in moments], dtype=torch.float64)
        self.plans.copy_(move(plans, self.graphs.device))
        self.moments[: len(steps)].copy_(move(numbers, self.graphs.device))
        self.row.zero_()
        self.staged = steps

    def _run(self, size: int) -> None:
        """The step at `row`, and on to the next."""
        plan = self.plans.index_select(0, self.row)[0, :size]
        step, lr, epoch = self.moments.index_select(0, self.row)[0].unbind()
        whole = self.batches.is_whole(size)
        images, targets = (self.render if whole else self.batches.render)(plan)
        self.train_step(images, targets, 1.0, Moment(step, lr, epoch), whole)
        self.row += 1
