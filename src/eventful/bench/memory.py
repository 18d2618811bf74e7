"""Peak memory of one call, above what was held before it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_of(call: Callable[[], object], device: torch.device) -> int:
    """Bytes in use at the peak of `call`, above those before it, as the allocator counts them."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # keep the profiler from printing to stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    results: Any = seen.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return int(peak)


def graph_pool_bytes(device: torch.device) -> int:
    """Bytes of the private pools of CUDA graphs, which the peak of a call does not include."""
    if device.type != "cuda":
        return 0
    return sum(
        int(segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    )
