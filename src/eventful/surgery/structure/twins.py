"""Copies of blocks to be tried: random weights of usual size, in double precision, on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from eventful.surgery.clones import bare_tree

_NUMBERS = 262_147  # random numbers that weights are filled from; a prime, so that no rows repeat


def healthy_twin(block: nn.Module) -> nn.Module:
    """A copy on the CPU in double precision whose random weights are all of usual size."""
    bare = bare_tree(block)
    memo: dict[int, Any] = {}
    for name, weight in bare.named_parameters():
        if type(weight) is nn.Parameter and weight.is_floating_point():
            memo[id(weight)] = nn.Parameter(_healthy(name, weight.shape), requires_grad=False)
    for value in (value for part in bare.modules() for value in vars(part).values()):
        if isinstance(value, Tensor):  # a result that a block keeps may have a history
            memo[id(value)] = value.detach().clone()
    # `deepcopy` takes what `memo` has in place of a copy: weights are not copied to be replaced.
    twin = copy.deepcopy(bare, memo).to(device="cpu", dtype=torch.float64).eval()
    made = {id(weight) for weight in memo.values() if isinstance(weight, Tensor)}
    with torch.no_grad():
        for name, weight in twin.named_parameters():
            weight.requires_grad_(False)
            if id(weight) not in made:  # of a class of its own
                weight.copy_(_healthy(name, weight.shape))
    return twin


def _healthy(name: str, shape: torch.Size) -> Tensor:
    noise = _noise(name, shape)
    if _of_layer(shape):
        return noise.mul_(shape[1:].numel() ** -0.5)
    if name.rpartition(".")[2].endswith("bias"):
        return noise.mul_(0.2)
    return noise.mul_(0.2).add_(1)  # of a norm, or a layer scale


def _of_layer(shape: torch.Size) -> bool:
    """Whether a weight is that of a linear layer or a convolution, not of a norm or a scale."""
    return len(shape) > 1 and min(shape) > 1


def _noise(name: str, shape: torch.Size) -> Tensor:
    """Normal random numbers, others for each name."""
    numbers, count = _numbers(), shape.numel()
    start = crc32(name.encode()) % _NUMBERS
    times = -(-(start + count) // _NUMBERS)
    return numbers.repeat(times)[start : start + count].reshape(shape)


@lru_cache(maxsize=1)
def _numbers() -> Tensor:
    return torch.randn(_NUMBERS, generator=generator(0), dtype=torch.float64)


def generator(seed: int) -> torch.Generator:
    """A generator of its own for random numbers that do not depend on the global one."""
    return torch.Generator().manual_seed(seed)


@contextmanager
def louder(twin: nn.Module, gains: Callable[[str], float]) -> Iterator[None]:
    """The weights of a twin's layers times a power of two, so that its parts see large values.

    Args:
        gains: by the name of a weight.
    """
    layers = {n: p for n, p in twin.named_parameters() if _of_layer(p.shape)}
    with torch.no_grad():
        for name, weight in layers.items():
            weight.mul_(gains(name))
        try:
            yield
        finally:
            for name, weight in layers.items():
                weight.div_(gains(name))


@contextmanager
def other_weights(twin: nn.Module) -> Iterator[None]:
    """Other values in every weight of a twin: a number that was read from a weight does not fit."""
    with torch.no_grad():
        kept = [(p, p.clone()) for p in twin.parameters() if not _of_layer(p.shape)]
        layers = [p for p in twin.parameters() if _of_layer(p.shape)]
        for at, (weight, before) in enumerate(kept):
            weight.copy_(before + _healthy(f"other {at}", before.shape) / 2)
        for weight in layers:
            weight.copy_(weight.flip(0).mul_(-1))
        try:
            yield
        finally:
            for weight, before in kept:
                weight.copy_(before)
            for weight in layers:
                weight.copy_(weight.flip(0).mul_(-1))
