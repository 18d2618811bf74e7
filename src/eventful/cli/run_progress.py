"""Progress of `eventful run`: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from eventful.pipeline.history import FrameRow
from eventful.pipeline.outputs import Observer

INTERVAL = 10.0  # seconds between two lines
_RECENT = 64  # steps that the speed is taken of


@contextmanager
def progress(*, quiet: bool) -> Iterator[Observer]:
    """An observer that shows progress on stderr; stdout belongs to the summary."""
    if quiet:
        yield Observer()
    elif sys.stderr.isatty():
        with _bars() as bars:
            yield BarProgress(bars)
    else:
        yield LineProgress()


class Meter:
    """Speed, share of tokens and time left of one source."""

    def __init__(self, total: int | None, done: int) -> None:
        self.total, self.done = total, done
        self._times: deque[tuple[float, int]] = deque([(time.monotonic(), done)], _RECENT)
        self._updated = self._tokens = 0.0

    def step(self, row: FrameRow, frames: int) -> None:
        """Note a step."""
        self.done += frames
        self._times.append((time.monotonic(), self.done))
        self._updated += row.updated
        self._tokens += row.tokens

    @property
    def speed(self) -> float:
        """Frames a second, of the last steps."""
        (began, first), (now, last) = self._times[0], self._times[-1]
        return (last - first) / (now - began) if now > began else 0.0

    @property
    def share(self) -> str:
        """Of the tokens, updated."""
        return f"{self._updated / self._tokens:.0%} of tokens" if self._tokens else ""

    @property
    def left(self) -> str:
        """Time left."""
        if self.total is None or not self.speed:
            return ""
        minutes, seconds = divmod(round(max(0, self.total - self.done) / self.speed), 60)
        hours, minutes = divmod(minutes, 60)
        return (
            f"{hours}:{minutes:02d}:{seconds:02d} left"
            if hours
            else f"{minutes}:{seconds:02d} left"
        )

    def __str__(self) -> str:
        count = f"{self.done} of {self.total}" if self.total is not None else str(self.done)
        parts = [f"{count} frames", f"{self.speed:.1f} frames/s", self.share, self.left]
        return ", ".join(part for part in parts if part)


class LineProgress(Observer):
    """A line now and then, for logs."""

    def __init__(self) -> None:
        self._meters: dict[str, Meter] = {}
        self._shown = time.monotonic()

    def began(self, source: str, total: int | None, done: int) -> None:
        """See `Observer`."""
        self._meters[source] = Meter(total, done)

    def stepped(self, row: FrameRow, frames: int) -> None:
        """See `Observer`."""
        self._meters[row.source].step(row, frames)
        if time.monotonic() - self._shown >= INTERVAL:
            self._shown = time.monotonic()
            _say(f"{row.source}: {self._meters[row.source]}")

    def ended(self, source: str, status: str, message: str) -> None:
        """See `Observer`."""
        if source in self._meters:
            _say(f"{source}: {self._meters[source]}, {status}")

    def noted(self, source: str, message: str) -> None:
        """See `Observer`."""
        _say(f"{source} {message}")


class BarProgress(Observer):
    """A bar for each source."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._meters: dict[str, Meter] = {}
        self._tasks: dict[str, Any] = {}

    def began(self, source: str, total: int | None, done: int) -> None:
        """See `Observer`."""
        self._meters[source] = Meter(total, done)
        name = source if len(source) <= 32 else f"...{source[-29:]}"
        self._tasks[source] = self._bars.add_task(name, total=total, completed=done, about="")

    def stepped(self, row: FrameRow, frames: int) -> None:
        """See `Observer`."""
        meter = self._meters[row.source]
        meter.step(row, frames)
        self._bars.update(self._tasks[row.source], completed=meter.done, about=str(meter))

    def ended(self, source: str, status: str, message: str) -> None:
        """See `Observer`."""
        if source in self._tasks:
            about = f"{self._meters[source]}, {status}"
            self._bars.update(self._tasks[source], about=about)
            self._bars.stop_task(self._tasks[source])

    def noted(self, source: str, message: str) -> None:
        """See `Observer`."""
        self._bars.console.print(f"{source} {message}", markup=False, highlight=False)


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[about]}", markup=False),
        console=Console(stderr=True),
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
