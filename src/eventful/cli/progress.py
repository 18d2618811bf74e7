"""Progress of long commands on stderr: a bar on a terminal, otherwise a line now and then.

Results go to stdout, progress never does. Where stderr is a file or a pipe, a stage prints one line
when it begins, and another one every `EVERY` seconds, also while nothing is reported: one call of a
compiler may take minutes.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from rich.console import Console

T = TypeVar("T")

EVERY = 20.0  # seconds between two lines
_BEGINNING = "preparing"


class Report(Protocol):
    """Takes the progress of a command."""

    def __call__(self, stage: str, done: int = 0, count: int | None = None, more: str = "") -> None:
        """Say what is being done.

        Args:
            stage: in words; another stage begins when they change.
            done: how much of it is done.
            count: how much there is; None if that is not known.
            more: words that may change all the time, such as a loss.
        """


@contextmanager
def shown(name: str = "", unit: str = "") -> Iterator[Report]:
    """Show progress while the block runs.

    Args:
        name: what every line begins with.
        unit: of `done` and `count`, such as frames.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with _bar(console, name, unit) as report:
            yield report
        return
    lines = _Lines(name, unit)
    try:
        yield lines
    finally:
        lines.close()


def shown_over(things: Iterable[T], count: int, stage: str, unit: str = "frames") -> Iterator[T]:
    """Give the things one by one, and show how many were given."""
    with shown(unit=unit) as report:
        report(stage, 0, count)
        for done, thing in enumerate(things, start=1):
            yield thing
            report(stage, done, count)


def counted(what: str) -> tuple[str, int, int | None]:
    """The stage, and how far it is: `frame 3 of 60` becomes `frame`, 3 and 60."""
    found = re.fullmatch(r"(.+) (\d+) of (\d+)", what)
    return (found[1], int(found[2]), int(found[3])) if found else (what, 0, None)


@contextmanager
def _bar(console: Console, name: str, unit: str) -> Iterator[Report]:
    """One bar, for the stage that runs."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task, current = bars.add_task(_joined(name, _BEGINNING), total=None, figures=""), ""

        def report(stage: str, done: int = 0, count: int | None = None, more: str = "") -> None:
            nonlocal task, current
            if stage != current:  # a new task, so that the remaining time is that of this stage
                bars.remove_task(task)
                task, current = bars.add_task("", total=count, figures=""), stage
            text = ", ".join(filter(None, (_joined(name, stage), more)))
            figures = "" if count is None else f"{done}/{count} {unit}".rstrip()
            bars.update(task, description=text, completed=done, total=count, figures=figures)

        yield report


class _Lines:
    """Prints lines; a thread of its own does so where nothing is reported for a while."""

    def __init__(self, name: str, unit: str) -> None:
        self._name, self._unit = name, unit
        self._began = time.monotonic()
        self._stage, self._figures = _BEGINNING, ""
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)
        self._thread.start()

    def __call__(self, stage: str, done: int = 0, count: int | None = None, more: str = "") -> None:
        """See `Report`."""
        figures = "" if count is None else f"{done} of {count} {self._unit}".rstrip()
        with self._lock:
            new = stage != self._stage
            self._stage, self._figures = stage, ", ".join(filter(None, (figures, more)))
            if new:
                _print(_joined(self._name, stage))

    def close(self) -> None:
        """Print nothing more."""
        self._ended.set()
        self._thread.join()

    def _repeat(self) -> None:
        while not self._ended.wait(EVERY):
            with self._lock:
                spent = duration(time.monotonic() - self._began)
                parts = (_joined(self._name, self._stage), self._figures, spent)
                _print(", ".join(filter(None, parts)))


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s` or `2 h 05 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _joined(name: str, stage: str) -> str:
    return ": ".join(filter(None, (name, stage)))


def _print(line: Any) -> None:
    print(line, file=sys.stderr, flush=True)
