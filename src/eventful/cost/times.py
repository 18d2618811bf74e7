"""What steps cost: times of dense and of eventful steps as they were seen, kept on disk.

An eventful step costs less than a dense one up to some number of updated tokens. Where that
lies depends on the model, the machine and the batch, so it is measured on the steps a stream
runs anyway, and kept for the next process. `eventful.cost.fallback` decides by it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from eventful import files

CACHE = "EVENTFUL_CACHE"
KEPT = 5  # times of each kind; the lowest counts, because other load only ever adds
ENOUGH = 3  # eventful steps of a class before it is believed
TOLERANCE = 1.05  # an eventful step is worth it up to so many times the time of a dense one
_BINS = 16  # classes of the share of tokens
_WARM_UP = 1.5  # a first frame takes at most so many times as long as later dense steps
_SAVE_EVERY = 256
_LOCK_TRIES, _LOCK_STALE = 50, 10.0  # waits of 10 ms for another writer; seconds until it is dead


def cache_path() -> Path:
    """The file that keeps the measurements; EVENTFUL_CACHE names another folder."""
    folder = os.environ.get(CACHE) or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "eventful"
    )
    return Path(folder) / "costs.json"


class Costs:
    """Times of dense and of eventful steps of one kind.

    Args:
        key: names what they were measured on, see `engine.dense`.
        tokens: N.
    """

    def __init__(self, key: str, tokens: int, path: Path | None = None) -> None:
        self._key, self._tokens = key, tokens
        self._path = path or cache_path()
        self._dense: deque[float] = deque(maxlen=KEPT)
        self._first: float | None = None
        self._steps: dict[int, deque[float]] = {}
        self._pending: list[tuple[int, Callable[[], float], bool]] = []
        self._noted = 0
        self._limits: tuple[int, int] | None = None  # both break-evens, until a time changes
        if not _untimed:
            self._read()

    @property
    def dense_known(self) -> bool:
        """Whether dense steps were timed; a first frame, with its warm-up, does not count."""
        return bool(self._dense)

    @property
    def dense_ms(self) -> float | None:
        """The lowest time of a dense step; None if none was timed."""
        return min(self._dense) if self._dense else self._first

    @property
    def break_even(self) -> int:
        """Tokens up to which no eventful step was seen that is not worth it."""
        return self._break_evens()[0]

    @property
    def expected_break_even(self) -> int:
        """The same for more tokens than were ever updated: times grow on as they did so far."""
        return self._break_evens()[1]

    def _break_evens(self) -> tuple[int, int]:
        if self._limits is None:
            seen = self._seen_break_even()
            self._limits = (seen, min(seen, self._extrapolated_break_even()))
        return self._limits

    def _seen_break_even(self) -> int:
        known, dense = self._known(), TOLERANCE * self._lowest_dense()
        worth = max((share for share, ms in known.items() if ms <= dense), default=0)
        beyond = [share for share, ms in known.items() if ms > dense and share > worth]
        return int((min(beyond) - 0.5) * self._tokens / _BINS) if beyond else self._tokens

    def _extrapolated_break_even(self) -> int:
        known, dense = self._known(), TOLERANCE * self._lowest_dense()
        if not known or dense == math.inf:
            return self._tokens
        least, most = min(known), max(known)
        start = (least, known[least]) if least < most else (0, 0.0)
        growth = known[most] - start[1]
        if growth <= 0:
            return self._tokens
        share = most + (dense - known[most]) * (most - start[0]) / growth
        return int(share * self._tokens / _BINS)

    def _known(self) -> dict[int, float]:
        """Lowest time by class of steps, of those seen often enough."""
        return {share: min(times) for share, times in self._steps.items() if len(times) >= ENOUGH}

    def _lowest_dense(self) -> float:
        return min(self._dense, default=math.inf)

    def beyond(self, wanted: int, updated: int, *, share: float = 1.0) -> bool:
        """Whether dense seems cheaper than updating the `wanted` tokens.

        Args:
            updated: those that an eventful step would update: fewer where a ceiling holds.
            share: of the break-even to compare with.
        """
        if self._dense:
            limit = self.break_even if wanted == updated else self.expected_break_even
            return wanted > limit * share
        times = self._steps.get(self.share(updated), ())
        if len(times) < ENOUGH:
            return False
        if self._first is None:
            return wanted > self._tokens // 2 * share
        # Where a ceiling holds, as if all that want to pass were updated: it is compared next.
        return min(times) * _WARM_UP * wanted / max(updated, 1) > self._first

    def share(self, count: int) -> int:
        """The class of steps that update `count` tokens."""
        return max(1, round(count * _BINS / self._tokens))

    def compared(self, count: int) -> bool:
        """Whether dense steps and steps of `count` tokens were timed often enough to judge."""
        return min(len(self._dense), len(self._steps.get(self.share(count), ()))) >= ENOUGH

    def forget(self, count: int) -> None:
        """Drop what is known of dense steps and of those of `count` tokens, to time them anew."""
        self._dense.clear()
        self._steps.pop(self.share(count), None)
        self._limits = None

    def note(self, count: int, ms: float, *, dense: bool) -> None:
        """Take in the time of one step for `count` tokens, or of a dense one."""
        if not ms > 0:  # the clock stood still
            return
        times = self._dense
        if not dense:
            times = self._steps.setdefault(self.share(count), deque(maxlen=KEPT))
        before = (len(times), min(times, default=math.inf))
        times.append(ms)
        if (len(times), min(times)) != before:
            self._limits = None
        self._noted += 1
        if self._noted in (8, 32) or self._noted % _SAVE_EVERY == 0:
            self.save()

    def note_first(self, ms: float) -> None:
        """Take in the time of a stream's first frame: a dense step and its warm-up."""
        if ms > 0:
            self._first = ms if self._first is None else min(self._first, ms)

    def note_later(
        self, count: int, clock: Callable[[], float], *, dense: bool, queued: int = 2
    ) -> None:
        """As `note`, for a step still in flight; read when `queued` more were started."""
        self._pending.append((count, clock, dense))
        while len(self._pending) > queued:
            tokens, read, was_dense = self._pending.pop(0)
            self.note(tokens, read(), dense=was_dense)

    def save(self) -> None:
        """Write what is known; a cache that cannot be written is done without."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self._path):
                known = _load(self._path)
                steps = {str(share): list(times) for share, times in sorted(self._steps.items())}
                known[self._key] = {"dense": list(self._dense), "steps": steps}
                files.write_json(self._path, known)

    def _read(self) -> None:
        entry = _load(self._path).get(self._key, {})
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            dense = [float(ms) for ms in entry.get("dense", [])]
            steps = {
                int(share): deque(map(float, times), maxlen=KEPT)
                for share, times in entry.get("steps", {}).items()
            }
            self._dense.extend(dense)
            self._steps.update(steps)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file beside `path`; raises OSError where another holds it for long."""
    lock = path.with_name(f"{path.name}.lock")
    for attempt in range(_LOCK_TRIES + 1):
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            with contextlib.suppress(OSError):
                if time.time() - lock.stat().st_mtime > _LOCK_STALE:  # its writer was killed
                    lock.unlink()
            if attempt == _LOCK_TRIES:
                raise
            time.sleep(0.01)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def _load(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


_now: list[Callable[[], float]] = []  # clocks in force instead of the machine's, the last one first


@contextlib.contextmanager
def use_clock(now: Callable[[], float]) -> Iterator[None]:
    """Time steps by another clock, in seconds: for tests, and for replaying a recorded run."""
    _now.append(now)
    try:
        yield
    finally:
        _now.remove(now)


_untimed: list[bool] = []


@contextlib.contextmanager
def without_times() -> Iterator[None]:
    """Neither time steps nor use times of earlier runs: results are the same on every machine."""
    _untimed.append(True)
    try:
        with use_clock(lambda: 0.0):
            yield
    finally:
        _untimed.pop()


def now() -> float:
    """Seconds of the clock in force."""
    return _now[-1]() if _now else time.perf_counter()


_events: dict[torch.device, list[tuple[Any, Any]]] = {}  # of clocks that nobody reads any more


class _EventClock:
    """Times work on a CUDA stream with two events, which the next clock uses again."""

    __slots__ = ("_end", "_free", "_ms", "_start", "_stream")

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._free = _events.setdefault(device, [])
        make: Any = torch.cuda.Event  # torch gives it no types
        try:
            self._start, self._end = self._free.pop()
        except IndexError:
            self._start, self._end = make(enable_timing=True), make(enable_timing=True)
        self._stream = stream or torch.cuda.current_stream(device)
        self._ms: float | None = None
        self._start.record(self._stream)

    def stop(self) -> Callable[[], float]:
        """Stop; the result waits for the work and gives its milliseconds."""
        self._end.record(self._stream)
        return self.read

    def read(self) -> float:
        """Milliseconds between start and stop."""
        if self._ms is None:
            self._end.synchronize()
            self._ms = float(self._start.elapsed_time(self._end))
        return self._ms

    def __del__(self) -> None:
        self._free.append((self._start, self._end))


def start_clock(device: torch.device, stream: Any = None) -> Callable[[], Callable[[], float]]:
    """Start timing; calling the result stops, and gives a function that reads milliseconds.

    Args:
        stream: the device's current CUDA stream, where it is known already.
    """
    if device.type == "cuda" and not _now:
        return _EventClock(device, stream).stop
    read = _now[-1] if _now else time.perf_counter
    began = read()

    def stop() -> Callable[[], float]:
        elapsed = (read() - began) * 1000
        return lambda: elapsed

    return stop
