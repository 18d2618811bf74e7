"""Times single calls and pipelined calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Forward = Callable[[Tensor], Any]
Item = TypeVar("Item")


def timed(run: Forward, frame: Tensor) -> tuple[Any, float]:
    """One call and its milliseconds by the wall clock, from an idle device to an idle device."""
    wait(frame.device)
    began = time.perf_counter()
    output = run(frame)
    wait(frame.device)
    return output, (time.perf_counter() - began) * 1000


def pipelined(run: Forward, frames: Sequence[Tensor]) -> float:
    """Milliseconds per frame when all frames are enqueued before waiting for any."""
    device = frames[0].device
    wait(device)
    began = time.perf_counter()
    for frame in frames:
        run(frame)
    wait(device)
    return (time.perf_counter() - began) * 1000 / len(frames)


def wait(device: torch.device) -> None:
    """Wait until the device is idle; a CPU always is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turn(items: Sequence[Item], turn: int) -> Iterator[Item]:
    """All items, starting with another one each turn, so that the order does not favour any."""
    for place in range(len(items)):
        yield items[(turn + place) % len(items)]


def gap(got: Tensor, expected: Tensor) -> float:
    """Relative error, of all values together."""
    wanted = expected.float()
    return float((got.float() - wanted).norm() / wanted.norm())
