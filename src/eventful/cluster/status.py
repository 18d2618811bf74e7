"""What a run says of itself: for people, for JSON, and for Prometheus."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from eventful import __version__
from eventful.cluster.accounts import REASONS, Account
from eventful.cluster.driver import Driver
from eventful.cluster.watch import Watch
from eventful.live.exposition import head, labels, number

STATUS = "status.json"
_PREFIX = "eventful_cluster"

_COUNTERS = {
    "frames_counted_total": ("Frames with a result.", "counted"),
    "frames_arrived_total": ("Frames that the reader read.", "arrived"),
    "frames_damaged_total": ("Frames that did not decode.", "damaged"),
    "results_repeated_total": ("Results that were handed in twice and counted once.", "repeated"),
    "results_fenced_total": ("Results of an old lease, which were refused.", "fenced"),
    "source_lost_total": ("Times a camera was lost.", "source_lost"),
}
_GAUGES = {
    "up": ("1 if the source is read and not stalled.", "up"),
    "epoch": ("Of the lease.", "epoch"),
    "load": ("Share of a worker that the stream takes.", "load"),
    "staleness_seconds": ("Since the last frame of the source.", "staleness"),
    "latency_seconds": ("From a frame to its result, the last one.", "latency"),
}
_WORKER = {
    "worker_up": ("1 if it answers.", "up"),
    "worker_starts_total": ("Times it was started again.", "again"),
    "worker_load": ("1 means that it computes all the time.", "load"),
    "worker_streams": ("Streams that are leased to it.", "streams"),
    "worker_state_bytes": ("Held by its streams.", "state_bytes"),
    "worker_resident_bytes": ("Resident memory.", "resident_bytes"),
    "worker_unsent": ("Results that wait for the registry.", "unsent"),
}


def status_of(driver: Driver) -> dict[str, Any]:
    """A run as values for JSON; nothing in it holds credentials."""
    answer = driver.registry.answer
    return {
        "eventful": __version__,
        "time": time.time(),
        "pid": os.getpid(),
        "registry": {
            **_process(driver.registry),
            "waiting": answer.get("waiting", 0),
            "problem": answer.get("problem", ""),
            "uncertain": answer.get("uncertain", {}),
        },
        "workers": [_worker(driver, watch) for watch in driver.workers.values()],
        "readers": [_process(watch) for watch in driver.readers.values()],
        "streams": [_stream(driver, account) for account in driver.accounts.values()],
        "problems": dict(driver.problems),
        "restarting": driver.restarts.going,
        "events": list(driver.events.last)[-20:],
    }


def _process(watch: Watch) -> dict[str, Any]:
    return {
        "name": watch.name,
        "life": watch.life,
        "again": watch.again,
        "pid": watch.answer.get("pid"),
    }


def _worker(driver: Driver, watch: Watch) -> dict[str, Any]:
    own = driver.streams_of(watch.name)
    names = ("steps", "frames", "flushed", "resumed", "unsent", "state_bytes", "resident_bytes")
    return {
        **_process(watch),
        "streams": own,
        "load": round(driver.placement.load(own), 4),
        **{name: watch.answer.get(name) for name in names},
    }


def _stream(driver: Driver, account: Account) -> dict[str, Any]:
    name = account.name
    state = driver.reader_state(name)
    watch = driver.workers.get(account.worker)
    held = {} if watch is None else watch.answer.get("streams", {}).get(name, {})
    running = not account.over
    return {
        "name": name,
        "source": account.shown,
        "state": account.state,
        "message": account.message or state.get("message", ""),
        "worker": account.worker,
        "reader": account.reader,
        "epoch": account.epoch,
        "position": account.position,
        "counted": account.counted,
        "missed": dict(account.missed),
        "repeated": account.repeated,
        "fenced": account.fenced,
        "reading": state.get("status", "") if running else "",
        "up": int(running and state.get("status") in ("opening", "running")),
        "arrived": state.get("arrived", 0),
        "damaged": state.get("damaged", 0),
        "source_lost": state.get("lost", 0),
        "staleness": round(state.get("staleness", 0.0), 2),
        "arriving_fps": round(driver.rates.arriving.get(name, 0.0), 2),
        "fps": round(driver.rates.counted.get(name, 0.0), 2),
        "cost_ms": None if held.get("cost") is None else round(held["cost"], 2),
        "load": round(driver.placement.loads.get(name, 0.0), 4),
        "latency": round(held.get("latency", 0.0), 4),
        "updated": round(held["updated"] / held["tokens"], 4) if held.get("tokens") else None,
    }


def metrics(status: dict[str, Any]) -> str:
    """The same for Prometheus."""
    return "".join(f"{line}\n" for line in _lines(status))


def _lines(status: dict[str, Any]) -> Iterator[str]:
    registry, streams = status["registry"], status["streams"]
    yield from head(_PREFIX, "info", "gauge", "The version.")
    yield f'{_PREFIX}_info{{version="{status["eventful"]}"}} 1'
    whole = {
        "registry_up": ("gauge", "1 if it answers.", int(registry["life"] == "up")),
        "registry_starts_total": ("counter", "Times it was started again.", registry["again"]),
        "results_waiting": ("gauge", "Results not delivered yet.", registry["waiting"]),
        "results_blocked": ("gauge", "1 if they wait.", int(bool(registry["problem"]))),
        "heartbeat_seconds": ("gauge", "When the driver last looked.", status["time"]),
    }  # fmt: skip
    for name, (kind, about, value) in whole.items():
        yield from head(_PREFIX, name, kind, about)
        yield f"{_PREFIX}_{name} {number(value)}"
    for name, (about, key) in _WORKER.items():
        yield from head(_PREFIX, name, "counter" if name.endswith("total") else "gauge", about)
        for worker in status["workers"]:
            value = {"up": int(worker["life"] == "up"), "streams": len(worker["streams"])}.get(
                key, worker.get(key)
            )
            yield f'{_PREFIX}_{name}{{worker="{worker["name"]}"}} {number(value or 0)}'
    for kind, table in (("counter", _COUNTERS), ("gauge", _GAUGES)):
        for name, (about, key) in table.items():
            yield from head(_PREFIX, name, kind, about)
            for stream in streams:
                yield f"{_PREFIX}_{name}{{{labels(stream=stream['name'])}}} {number(stream[key])}"
    yield from head(_PREFIX, "frames_missed_total", "counter", "Frames without a result.")
    for stream in streams:
        for reason in REASONS:
            marks = labels(stream=stream["name"], reason=reason)
            value = stream["missed"].get(reason, 0)
            yield f"{_PREFIX}_frames_missed_total{{{marks}}} {value}"
