"""One process or many: torchrun's environment, and the few collectives that training needs."""

import gc
import importlib
import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from capsroute.devices import choose_device


@dataclass(frozen=True)
class Processes:
    """This process's place among those of the job, and its device."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in each of them."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process."""
        if self.world == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)).item())

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in each of them."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def same(self, what: str, value: Any) -> Any:
        """The value, if every process has it; nodes without a common folder do not."""
        values = self.gather(value)
        if any(other != value for other in values):
            raise ValueError(
                f"`out` must be a folder that all processes share: {what} differs ({values})"
            )
        return value

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give every process the first one's values."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


@contextmanager
def processes(device: str = "auto") -> Iterator[Processes]:
    """Join the job that torchrun started, or be a job of one.

    Anything that still holds the group when the job ends keeps gloo's threads alive, and a thread
    that frees a tensor while Python shuts down aborts the process. So nothing that holds it, such
    as a model in `DistributedDataParallel`, may outlive this block, not even in an error's frames.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    where = choose_device(device, local)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if world == 1:
        yield Processes(0, 1, where)
        return
    # before there is a group: imported later, by DistributedDataParallel, its default arguments
    # would hold it
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    try:
        yield Processes(rank, world, where)
    except BaseException as error:
        _empty_frames(error)
        raise
    finally:
        gc.collect()
        dist.destroy_process_group()


def _empty_frames(error: BaseException) -> None:
    """Of an error and of those it arose from, whose tracebacks can still be printed."""
    chain = [error]
    for one in chain:
        traceback.clear_frames(one.__traceback__)
        before = (one.__cause__, one.__context__)
        chain += [other for other in before if other is not None and other not in chain]
