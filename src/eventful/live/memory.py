"""Memory of the process: how much it holds, and giving back what is free.

Pictures come in one thread and go in another, and batches have another size at each step. So the
allocator of glibc comes to hold much memory that is free, and it gives that back when it is asked
only. Without it a page that runs for days would seem to leak.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def resident_bytes() -> int | None:
    """What the process holds; None where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return None
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    import resource

    return pages * resource.getpagesize()


def give_back() -> None:
    """Give free memory back to the system, where the allocator can."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    """`malloc_trim`, which takes some ten milliseconds; None without glibc."""
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found
