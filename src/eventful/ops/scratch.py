"""Working memory that is kept: on a CPU, fresh large tensors cost more to page in than to fill."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_kept = threading.local()
_MOST_FREE = 6  # buffers that a thread keeps for reuse


def scratch(name: str, shape: Sequence[int], like: Tensor) -> Tensor | None:
    """Room for an intermediate result of this thread, until the next call of the same name.

    Returns:
        A tensor to be filled, or None where torch should allocate: on devices with an
        allocator of their own, and where gradients are recorded.
    """
    if like.device.type != "cpu" or torch.is_grad_enabled():
        return None
    size = math.prod(shape)
    rooms: dict[tuple[str, torch.dtype], Tensor] = vars(_kept).setdefault("rooms", {})
    key = (name, like.dtype)
    if key not in rooms or rooms[key].numel() < size:
        with torch.inference_mode(False):
            rooms[key] = torch.empty(size, dtype=like.dtype)
    return rooms[key][:size].view(*shape)


@lru_cache(maxsize=1)
def keep_freed() -> None:
    """Have the C library keep memory that is freed, once for the process.

    glibc gives blocks of more than some size back to the system when they are freed, and the next
    one is paged in anew. Freeing a block of just under 32 MB raises that size to as much, and what
    it keeps to 64 MB. Other libraries are not changed by it.
    """
    block = torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")
    del block


class TemporaryBuffers:
    """Buffers for intermediate results that are needed until `release`.

    Their memory is reused by the next objects of this class in the same thread.
    """

    def __init__(self) -> None:
        self._taken: list[Tensor] = []

    def take(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """An uninitialised tensor, valid until `release`."""
        size = math.prod(shape)
        if like.device.type != "cpu":
            return like.new_empty(shape)
        free = _free_buffers()
        fitting = [i for i, buffer in enumerate(free) if _fits(buffer, size, like.dtype)]
        if fitting:
            found = free.pop(min(fitting, key=lambda i: free[i].numel()))
        else:
            with torch.inference_mode(False):
                found = torch.empty(size, dtype=like.dtype)
        self._taken.append(found)
        return found[:size].view(*shape)

    def release(self) -> None:
        """End the use of all buffers taken. The largest are kept for reuse."""
        free = _free_buffers()
        free += self._taken
        free.sort(key=lambda buffer: buffer.nbytes, reverse=True)
        del free[_MOST_FREE:]
        self._taken = []


def _free_buffers() -> list[Tensor]:
    found: list[Tensor] = vars(_kept).setdefault("free", [])
    return found


def _fits(buffer: Tensor, size: int, dtype: torch.dtype) -> bool:
    return buffer.dtype == dtype and buffer.numel() >= size
