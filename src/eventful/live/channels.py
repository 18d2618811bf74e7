"""What the page knows of one source: its last result, numbers of its steps, and counters."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from eventful.live.feed import Arrived, Feed
from eventful.pipeline.predictions import Prediction

KEPT = 240  # steps that the plots show
_RATE_OVER = 10.0  # seconds over which frames a second are counted
_FADE = 0.98  # of the scale of errors, from one step to the next
BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds


@dataclass(frozen=True)
class StepNumbers:
    """What one step of one source cost.

    Attributes:
        ms: milliseconds, a share of the batch's.
        tokens: of a frame; `updated` those that were computed.
        operations: multiply-adds; `dense_operations` of the whole model.
    """

    ms: float
    tokens: int
    updated: float
    operations: float
    dense_operations: float
    flushed: bool = False


@dataclass(frozen=True)
class Shown:
    """The last result of a source, to draw.

    Attributes:
        number: of the step, from 1 on.
        picture: (3, H, W) uint8 RGB.
        updated: (h, w) which tokens were computed; None where that is not known.
        error: (h, w) how much tokens had changed, from 0 to 1; None after a flush.
    """

    number: int
    picture: Tensor
    prediction: Prediction
    updated: Tensor | None
    error: Tensor | None


class Histogram:
    """Seconds, counted in classes."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds


@dataclass
class Channel:
    """One source of the page.

    Attributes:
        name: as it may be shown: without credentials.
        points: [number, ms, share of tokens, share of operations, latency in ms] of the last steps.
        steps: done so far; never set back.
        dense_ms: of the whole model on the same frames, as last measured.
        pending: frames of a step that is not whole yet.
    """

    id: str
    name: str
    feed: Feed
    shown: Shown | None = None
    points: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=KEPT))
    steps: int = 0
    updated: float = 0.0
    tokens: float = 0.0
    operations: float = 0.0
    dense_operations: float = 0.0
    dense_ms: float | None = None
    size: tuple[int, int] | None = None
    last: StepNumbers | None = None
    latency: float = 0.0
    pending: list[Arrived] = field(default_factory=list)
    step_times: Histogram = field(default_factory=Histogram)
    latencies: Histogram = field(default_factory=Histogram)
    moments: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    _brightest: float = 0.0

    def add(self, numbers: StepNumbers, arrived: float) -> None:
        """Note one step."""
        now = time.monotonic()
        self.steps += 1
        self.last, self.latency = numbers, now - arrived
        self.updated += numbers.updated
        self.tokens += numbers.tokens
        self.operations += numbers.operations
        self.dense_operations += numbers.dense_operations
        self.step_times.add(numbers.ms / 1e3)
        self.latencies.add(self.latency)
        self.moments.append(now)
        share = numbers.updated / max(numbers.tokens, 1)
        cost = numbers.operations / max(numbers.dense_operations, 1)
        self.points.append(
            (
                self.steps,
                round(numbers.ms, 2),
                round(share, 4),
                round(cost, 4),
                round(self.latency * 1e3, 1),
            )
        )

    def scaled(self, error: Tensor | None) -> Tensor | None:
        """Errors from 0 to 1, by a scale that follows the largest ones slowly: no flicker."""
        if error is None:
            return None
        self._brightest = max(_FADE * self._brightest, float(error.max()), 1e-12)
        return error / self._brightest

    def forget(self) -> None:
        """Clear the plots; counters that monitoring reads go on."""
        self.points.clear()
        self.moments.clear()
        self.last = None

    def state(self, after: int = 0) -> dict[str, Any]:
        """As values for JSON, with the points behind step number `after`."""
        feed, last = self.feed, self.last
        return {
            "id": self.id,
            "name": self.name,
            "status": feed.status,
            "message": feed.message,
            "loop": feed.loop,
            "size": self.size,
            "fps": round(self._fps(), 2),
            "rate": round(feed.rate, 2),
            "frames": feed.arrived,
            "steps": self.steps,
            "dropped": feed.dropped,
            "damaged": feed.damaged,
            "lost": feed.lost,
            "staleness": round(feed.staleness, 2),
            "latency": round(self.latency * 1e3, 1) if self.steps else None,
            "ms": None if last is None else round(last.ms, 2),
            "dense_ms": None if self.dense_ms is None else round(self.dense_ms, 2),
            "tokens": None if last is None else last.tokens,
            "updated": None if last is None else round(last.updated, 1),
            "operations": None if last is None else last.operations,
            "dense_operations": None if last is None else last.dense_operations,
            "found": None if self.shown is None else self.shown.prediction.found,
            "first": self.points[0][0] if self.points else self.steps + 1,
            "points": [point for point in list(self.points) if point[0] > after],
        }

    def _fps(self) -> float:
        now = time.monotonic()
        recent = [moment for moment in list(self.moments) if now - moment < _RATE_OVER]
        if len(recent) < 2:
            return 0.0
        return (len(recent) - 1) / max(now - recent[0], 1e-9)
