"""Which samples a process gets, in which order; interruptions do not change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from eventful.paper.train.processes import Processes
from eventful.paper.train.recipes import Recipe


class Samples(Protocol):
    """A dataset whose samples may differ from epoch to epoch, by number and epoch alone."""

    epoch: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Resumable(DistributedSampler[Any]):
    """torch's DistributedSampler, starting in the middle of an epoch.

    Process r of w takes every w-th sample of one shuffled order, so the steps of w processes see
    the same batches as those of one.

    Args:
        done: samples of the epoch already used, over all processes.
    """

    def __init__(self, data: Dataset[Any], recipe: Recipe, processes: Processes) -> None:
        super().__init__(
            data, num_replicas=processes.world, rank=processes.rank, shuffle=True, seed=recipe.seed
        )
        self.done = 0

    def __iter__(self) -> Iterator[Any]:
        order = list(super().__iter__())
        return iter(order[self.done // self.num_replicas :])


def loader(
    data: Samples,
    recipe: Recipe,
    processes: Processes,
    collate: Callable[[Sequence[Any]], Any],
    workers: int,
) -> tuple[DataLoader[Any], Resumable]:
    """Batches of this process's samples; `recipe.batch` is divided among the processes."""
    sampler = Resumable(data, recipe, processes)  # type: ignore[arg-type]
    batches: DataLoader[Any] = DataLoader(
        data,  # type: ignore[arg-type]
        batch_size=recipe.batch // processes.world,
        sampler=sampler,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=processes.device.type == "cuda",
        # With a generator of its own, making an iterator draws nothing from the run's.
        generator=torch.Generator().manual_seed(recipe.seed),
    )
    return batches, sampler


def chance(seed: int, epoch: int, index: int) -> torch.Generator:
    """Random numbers of one sample in one epoch, whichever process or worker makes it."""
    mixed = (seed * 1_000_003 + epoch) * 1_000_003 + index
    return torch.Generator().manual_seed(mixed % 2**63)
