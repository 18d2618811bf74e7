"""Random numbers by key: the same keys give the same number, in any order and on any device."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_STEP, _FIRST, _SECOND = -1640531527, 2146121005, -2073254261  # odd, as signed 32-bit numbers


def mixed(*keys: Tensor | int) -> Tensor:
    """Whole numbers of 32 bits from keys that broadcast; at least one is a tensor."""
    start = 0
    for place, key in enumerate(keys):
        if not isinstance(key, Tensor):
            start = _signed(start * 1_000_003 + (key + 1) * 7919 * (place + 1))
    made: Tensor | int = start
    for key in keys:
        if isinstance(key, Tensor):
            made = _scrambled(key.to(torch.int32) * _STEP + made * 31)
    assert isinstance(made, Tensor)
    return made


@lru_cache(maxsize=256)
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers (n,) on a device; made once, so that drawing can be recorded as a CUDA graph."""
    return torch.tensor(values, device=device)


def uniform(*keys: Tensor | int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Numbers from `low` to below `high`."""
    share = ((mixed(*keys) >> 8) & 0xFFFFFF).float() / 2**24
    return low + (high - low) * share


def choice(count: int, *keys: Tensor | int) -> Tensor:
    """Whole numbers from 0 to below `count`, all equally likely."""
    return ((mixed(*keys) >> 8) & 0xFFFFFF) % count


def normal(*keys: Tensor | int) -> Tensor:
    """About normal, mean 0 and deviation 1: the sum of the four bytes of a number."""
    number = mixed(*keys)
    total = sum((number >> shift) & 0xFF for shift in (0, 8, 16, 24))
    return (total.float() - 510.0) / 147.8  # type: ignore[union-attr]


def _scrambled(number: Tensor) -> Tensor:
    number = (number ^ ((number >> 16) & 0xFFFF)) * _FIRST
    number = (number ^ ((number >> 15) & 0x1FFFF)) * _SECOND
    return number ^ ((number >> 16) & 0xFFFF)


def _signed(number: int) -> int:
    """A whole number as the signed one of 32 bits that has the same last bits."""
    return (number + 2**31) % 2**32 - 2**31
