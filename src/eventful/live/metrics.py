"""Numbers of the page for Prometheus, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from eventful import __version__
from eventful.live.channels import BUCKETS, Channel, Histogram
from eventful.live.exposition import TYPE, head, labels, number
from eventful.live.memory import allocated_bytes, resident_bytes
from eventful.live.viewers import Hub
from eventful.live.worker import Worker

__all__ = ["TYPE", "text"]

_PREFIX = "eventful_live"

_COUNTERS: dict[str, tuple[str, Callable[[Channel], float]]] = {
    "frames_total": ("Frames that arrived.", lambda c: c.feed.arrived),
    "steps_total": ("Steps of the model.", lambda c: c.steps),
    "dropped_total": ("Frames replaced by newer ones.", lambda c: c.feed.dropped),
    "damaged_total": ("Frames that did not decode.", lambda c: c.feed.damaged),
    "lost_total": ("Times a source was lost.", lambda c: c.feed.lost),
    "tokens_total": ("Tokens of all frames.", lambda c: c.tokens),
    "tokens_updated_total": ("Tokens computed.", lambda c: c.updated),
    "operations_total": ("Multiply-adds.", lambda c: c.operations),
    "dense_operations_total": ("Multiply-adds of the dense model.", lambda c: c.dense_operations),
}
_GAUGES: dict[str, tuple[str, Callable[[Channel], float]]] = {
    "up": ("1 if the source is opening or running.", lambda c: _up(c)),
    "staleness_seconds": ("Since the last frame.", lambda c: c.feed.staleness),
}
_TIMES: dict[str, tuple[str, Callable[[Channel], Histogram]]] = {
    "step_seconds": ("Time of the model for a frame.", lambda c: c.step_times),
    "latency_seconds": ("From the arrival of a frame to its result.", lambda c: c.latencies),
}


def text(worker: Worker, hub: Hub) -> str:
    """All numbers."""
    return "".join(f"{line}\n" for line in _lines(worker, hub))


def _lines(worker: Worker, hub: Hub) -> Iterator[str]:
    channels = worker.channels
    whole = {
        "sources": ("gauge", "Sources of the page.", len(channels)),
        "viewers": ("gauge", "Open pages.", len(hub.viewers)),
        "pictures_encoded_total": ("counter", "Pictures drawn.", hub.encoded),
        "pictures_sent_total": ("counter", "Pictures sent to viewers.", hub.delivered),
        "state_bytes": ("gauge", "Held by the streams.", worker.nbytes),
        "worker_up": ("gauge", "1 if the model's thread works.", int(worker.alive)),
    }
    yield from head(_PREFIX, "info", "gauge", "The version.")
    yield f'eventful_live_info{{version="{__version__}"}} 1'
    for name, (kind, about, value) in whole.items():
        yield from head(_PREFIX, name, kind, about)
        yield f"eventful_live_{name} {value}"
    if (memory := resident_bytes()) is not None:
        yield "# HELP process_resident_memory_bytes Resident memory.\n" \
              "# TYPE process_resident_memory_bytes gauge"  # fmt: skip
        yield f"process_resident_memory_bytes {memory}"
    if (allocated := allocated_bytes()) is not None:
        about = "Of the memory, what the program uses."
        yield from head(_PREFIX, "allocated_bytes", "gauge", about)
        yield f"eventful_live_allocated_bytes {allocated}"
    for kind, table in (("counter", _COUNTERS), ("gauge", _GAUGES)):
        for name, (about, read) in table.items():
            yield from head(_PREFIX, name, kind, about)
            for channel in channels:
                yield f"eventful_live_{name}{{{_labels(channel)}}} {number(read(channel))}"
    for name, (about, found) in _TIMES.items():
        yield from head(_PREFIX, name, "histogram", about)
        for channel in channels:
            yield from _histogram(f"eventful_live_{name}", _labels(channel), found(channel))


def _histogram(name: str, labels: str, histogram: Histogram) -> Iterator[str]:
    below = 0
    counts = list(histogram.counts)
    for edge, count in zip(BUCKETS, counts, strict=False):
        below += count
        yield f'{name}_bucket{{{labels},le="{edge:g}"}} {below}'
    yield f'{name}_bucket{{{labels},le="+Inf"}} {sum(counts)}'
    yield f"{name}_sum{{{labels}}} {histogram.total:.6f}"
    yield f"{name}_count{{{labels}}} {sum(counts)}"


def _labels(channel: Channel) -> str:
    return labels(source=channel.id, name=channel.name)


def _up(channel: Channel) -> int:
    return int(channel.feed.status in ("opening", "running"))
