"""Peak memory of one call, above what was held before it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS = Path("/proc/self/statm")
_PAGE = 4096


def peak_of(call: Callable[[], object], device: torch.device) -> int:
    """Bytes in use at the peak of `call`, above those before it.

    On CUDA the allocator tells. On the CPU the resident set is sampled from a second
    thread, which misses spikes shorter than a millisecond.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    before, peak, done = _resident(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return max(peak[0], _resident()) - before


def _resident() -> int:
    """Bytes resident; 0 where the system does not tell."""
    if not _STATUS.exists():
        return 0
    return int(_STATUS.read_text().split()[1]) * _PAGE
