"""Does `eventful cluster`: runs it, and shows it."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from eventful.cli.cluster import Started
from eventful.cli.run_work import writing_to
from eventful.cluster.folder import read_status, signal_run
from eventful.cluster.run import RunOptions
from eventful.cluster.run import run as run_cluster
from eventful.cluster.sources import StreamSpec, add_stream, remove_stream
from eventful.pipeline.stopping import Stop

_EVERY = 10.0  # seconds between two lines where no terminal shows a table


def run(sources: Path, started: Started, as_json: bool) -> None:
    """Run, show what happens, and end with the exit code of it."""
    options = RunOptions(**vars(started))
    stop = Stop()
    with writing_to(options.out), stop.on_signals(), _restarts() as restart:
        result = run_cluster(
            sources, options, stop=stop, observe=_Progress(as_json), restart=restart
        )
    if as_json:
        print(json.dumps(result.summary, indent=2))
    else:
        frames = ", ".join(f"{count} {name}" for name, count in result.summary["frames"].items())
        print(f"{result.status}: {frames}")
        print(options.out)
    for name, message in result.failed.items():
        typer.secho(f"{name} failed: {message}", fg=typer.colors.RED, err=True)
    if result.waiting:
        typer.secho(result.waiting, fg=typer.colors.RED, err=True)
    wrong = bool(result.failed or result.waiting)
    raise typer.Exit({"interrupted": 130}.get(result.status, int(wrong)))


def status(out: Path, as_json: bool) -> None:
    """Show the status of a run."""
    found = read_status(out)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        console = Console()
        for table in (_workers(found), _streams(found)):
            console.print(table)
        for line in _notes(found):
            console.print(line, markup=False, highlight=False)
    raise typer.Exit(0 if found["alive"] else 1)


def add(sources: Path, name: str, source: str, mode: Any, rate: float | None, loop: bool) -> None:
    """Add a stream."""
    spec = StreamSpec(name, source, mode, rate, loop)
    found = spec.found() if not source.startswith("env:") else None
    add_stream(sources, spec)
    print(f"{name}: {found.name if found else source} is in {sources}.")


def remove(sources: Path, name: str) -> None:
    """Remove a stream."""
    remove_stream(sources, name)
    print(f"{name} is not in {sources} any more.")


def restart(out: Path) -> None:
    """Ask for a rolling restart."""
    signal_run(out, signal.SIGHUP)
    print("The workers are started again, one after the other: eventful cluster status")


@contextmanager
def _restarts() -> Iterator[Callable[[], bool]]:
    """A function that says whether SIGHUP came since it was called last."""
    asked = threading.Event()

    def found() -> bool:
        was = asked.is_set()
        asked.clear()
        return was

    before = signal.signal(signal.SIGHUP, lambda number, frame: asked.set())
    try:
        yield found
    finally:
        signal.signal(signal.SIGHUP, before)


class _Progress:
    """A line now and then, on the terminal or in a log; problems as they come."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._last = quiet, float("-inf")
        self._said: set[str] = set()

    def __call__(self, found: dict[str, Any]) -> None:
        for line in _problems(found):
            if line not in self._said:
                typer.secho(line, fg=typer.colors.YELLOW, err=True)
        self._said = set(_problems(found))
        now = time.monotonic()
        if self._quiet or now - self._last < _EVERY:
            return
        self._last = now
        print(_line(found), file=sys.stderr)


def _line(found: dict[str, Any]) -> str:
    streams, workers = found["streams"], found["workers"]
    running = [s for s in streams if s["state"] == "running"]
    missed = sum(sum(s["missed"].values()) for s in streams)
    return (
        f"{len(running)} of {len(streams)} streams on "
        f"{sum(w['life'] == 'up' for w in workers)} of {len(workers)} workers, "
        f"{sum(s['fps'] for s in running):.1f} frames a second, "
        f"{sum(s['counted'] for s in streams)} counted, {missed} missed"
    )


def _problems(found: dict[str, Any]) -> list[str]:
    lines = [f"{name}: {message}" for name, message in found["problems"].items()]
    if found["registry"]["problem"]:
        lines.append(
            f"Results wait: {found['registry']['problem']} When the queue is full, frames are "
            "dropped and counted as 'disk full'. Make room; the run goes on by itself."
        )
    for name, ranges in found["registry"]["uncertain"].items():
        frames = ", ".join(f"{first}-{last}" for first, last in ranges)
        lines.append(f"{name}: nobody knows whether the function took the frames {frames}.")
    lines += [f"{s['name']}: {s['message']}" for s in found["streams"] if s["message"]]
    return lines


def _notes(found: dict[str, Any]) -> list[str]:
    lines = _problems(found)
    if not found["alive"]:
        how = found.get("status", "without a word")
        lines.append(f"It does not run any more; it ended {how}, {found['age']:.0f} s ago.")
    for event in found["events"][-8:]:
        about = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("time", "event"))
        moment = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        lines.append(f"{moment} {event['event']}: {about}")
    return lines


def _streams(found: dict[str, Any]) -> Table:
    table = Table("stream", "state", "worker", "fps", "counted", "dropped", "lost", "disk full",
                  "load", "latency")  # fmt: skip
    for s in found["streams"]:
        missed = s["missed"]
        state = s["state"] if s["state"] != "running" else s["reading"] or "waiting"
        table.add_row(
            s["name"],
            state,
            s["worker"] or "-",
            f"{s['fps']:.1f} of {s['arriving_fps']:.1f}",
            str(s["counted"]),
            str(missed["dropped"]),
            str(missed["lost"]),
            str(missed["disk full"]),
            f"{s['load']:.2f}",
            f"{1e3 * s['latency']:.0f} ms",
        )
    return table


def _workers(found: dict[str, Any]) -> Table:
    table = Table("worker", "life", "streams", "load", "restarts", "memory")
    for w in found["workers"]:
        memory = w["resident_bytes"]
        table.add_row(
            w["name"],
            w["life"],
            str(len(w["streams"])),
            f"{w['load']:.2f}",
            str(w["again"]),
            "-" if memory is None else f"{memory / 1e6:.0f} MB",
        )
    return table
