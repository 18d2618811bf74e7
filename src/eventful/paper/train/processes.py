"""The processes of a run: one, or as many as `torchrun` started."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from eventful.errors import ConfigError

_TIMEOUT = timedelta(
    hours=6
)  # timeout of a collective: one process may need long for its share of the data


@dataclass(frozen=True)
class Processes:
    """This process and its place among those of the run.

    Attributes:
        rank: from 0; number 0 writes files.
        world: how many there are.
        device: where this one computes.
    """

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    def gather(self, mine: Any) -> list[Any]:
        """The values of all processes, in the order of their ranks."""
        if self.world == 1:
            return [mine]
        everyone: list[Any] = [None] * self.world
        distributed.all_gather_object(everyone, mine)
        return everyone

    def wait(self) -> None:
        """Wait until all processes have reached this point."""
        if self.world > 1:
            distributed.barrier()

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of a tensor over the processes."""
        if self.world > 1:
            values = values.clone()
            distributed.all_reduce(values)
            values /= self.world
        return values


@contextmanager
def joined(device: str = "cpu") -> Iterator[Processes]:
    """Join the processes that `torchrun` started; without it this one is alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("There is no CUDA device here; train with --device cpu.")
    if world == 1:
        yield Processes(0, 1, torch.device(device))
        return
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    backend = "nccl" if place.type == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=_TIMEOUT)
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size(), place)
    finally:
        # A DistributedDataParallel is freed by the garbage collector alone, and holds the group.
        # Its threads would then outlive the interpreter, which ends the process with SIGABRT.
        gc.collect()
        distributed.destroy_process_group()
