"""Memory of the process: how much it holds, and giving back what is free.

Pictures come in one thread and go in another, and batches have another size at each step. So the
allocator of glibc comes to hold much memory that is free, a part for each thread, and it gives that
back when it is asked only. Without it a page that runs for days would seem to leak.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

_ARENA_MAX, _ARENAS = -8, 2  # M_ARENA_MAX of malloc.h


def resident_bytes() -> int | None:
    """What the process holds; None where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return None
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    import resource

    return pages * resource.getpagesize()


def allocated_bytes() -> int | None:
    """What the program holds of that: the rest is free, or code; None without a new glibc."""
    ask = _allocator("mallinfo2")
    if ask is None:
        return None
    ask.restype = _Allocated
    found = ask()
    return int(found.in_use + found.mapped)


def use_few_arenas() -> None:
    """Let threads share the free memory of the allocator; called before there are many."""
    choose = _allocator("mallopt")
    if choose is not None:
        choose(_ARENA_MAX, _ARENAS)


def give_back() -> None:
    """Give free memory back to the system, where the allocator can. Takes some ten milliseconds."""
    trim = _allocator("malloc_trim")
    if trim is not None:
        trim(0)


class _Allocated(ctypes.Structure):
    """`struct mallinfo2` of glibc, with names for what is read."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("a", "b", "c", "d", "mapped", "e", "f", "in_use", "free", "g")
    ]


@cache
def _allocator(function: str) -> Any:
    """A function of glibc; None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), function, None)
