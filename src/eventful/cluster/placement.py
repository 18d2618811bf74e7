"""Which worker runs which stream, by what each was measured to cost. No clocks, no Ray.

The load of a worker is the sum, over its streams, of milliseconds a frame times frames a second: 1
means that it computes all the time. A worker that stays above `full` gives a stream away, to one
that stays below `target` with it. Between the two nothing moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from eventful.errors import ConfigError

FIRST_COST = 0.1  # load of a stream that was not measured yet


@dataclass(frozen=True)
class Limits:
    """When streams move.

    Attributes:
        full: load above which a worker gives a stream away.
        target: load up to which a worker takes one.
        crowded: load up to which a worker takes streams of one that died: its cameras then give
            fewer frames, until it is back.
        patience: seconds that a worker stays full before a stream moves.
        cooldown: seconds that a stream stays where it was moved.
        most: streams of one worker.
    """

    full: float = 0.9
    target: float = 0.75
    crowded: float = 2.0
    patience: float = 5.0
    cooldown: float = 30.0
    most: int = 256

    def __post_init__(self) -> None:
        if not 0 < self.target < self.full:
            raise ConfigError(f"target is between 0 and full={self.full}, not {self.target}.")
        if self.crowded < self.full:
            raise ConfigError(f"crowded is at least full={self.full}, not {self.crowded}.")
        if self.most < 1:
            raise ConfigError(f"most is at least 1, not {self.most}.")


@dataclass(frozen=True)
class Move:
    """A stream that goes to another worker."""

    stream: str
    worker: str


@dataclass
class Placement:
    """Decides; what it is told of are measurements, what it says are moves.

    Attributes:
        loads: by stream, as measured.
    """

    limits: Limits = field(default_factory=Limits)
    loads: dict[str, float] = field(default_factory=dict)
    _full_since: dict[str, float] = field(default_factory=dict)
    _moved: dict[str, float] = field(default_factory=dict)

    def load(self, streams: list[str]) -> float:
        """Of a worker with these streams."""
        return sum(self.loads.get(name, FIRST_COST) for name in streams)

    def place(self, stream: str, workers: Mapping[str, list[str]]) -> str | None:
        """The worker for a stream that has none; None if all have as many as they may.

        Args:
            workers: streams by worker, of those that are alive.
        """
        open_ones = {w: own for w, own in workers.items() if len(own) < self.limits.most}
        if not open_ones:
            return None
        return min(open_ones, key=lambda w: (self.load(open_ones[w]), len(open_ones[w]), w))

    def rooms(self, streams: list[str], workers: Mapping[str, list[str]]) -> list[Move]:
        """Where the streams of a dead worker go at once; those without room are left out."""
        after = {name: list(own) for name, own in workers.items()}
        moves = []
        for stream in sorted(streams, key=lambda name: -self.loads.get(name, FIRST_COST)):
            worker = self.place(stream, after)
            if worker is None or self.load([*after[worker], stream]) > self.limits.crowded:
                continue
            after[worker].append(stream)
            moves.append(Move(stream, worker))
        return moves

    def next_move(self, workers: Mapping[str, list[str]], now: float) -> Move | None:
        """The move that is due, if any; it is taken as done."""
        limits = self.limits
        for worker, own in workers.items():
            if self.load(own) <= limits.full:
                self._full_since.pop(worker, None)
            else:
                self._full_since.setdefault(worker, now)
        for gone in self._full_since.keys() - workers.keys():
            del self._full_since[gone]
        due = [w for w, since in self._full_since.items() if now - since >= limits.patience]
        for worker in sorted(due, key=lambda w: -self.load(workers[w])):
            move = self._relieve(worker, workers, now) or self._even_out(worker, workers, now)
            if move is not None:
                self._moved[move.stream] = now
                self._full_since.pop(worker)
                return move
        return None

    def forget(self, stream: str) -> None:
        """A stream that is gone."""
        self.loads.pop(stream, None)
        self._moved.pop(stream, None)

    def _relieve(self, worker: str, workers: Mapping[str, list[str]], now: float) -> Move | None:
        """The smallest stream whose going suffices, else the largest that another one takes."""
        over = self.load(workers[worker]) - self.limits.full
        movable = self._movable(workers[worker], now)
        movable.sort(key=lambda name: (self.load([name]) < over, abs(self.load([name]) - over)))
        for stream in movable:
            for other in self._emptiest(worker, workers):
                if self.load([*workers[other], stream]) <= self.limits.target:
                    return Move(stream, other)
        return None

    def _even_out(self, worker: str, workers: Mapping[str, list[str]], now: float) -> Move | None:
        """Where nobody has room: a stream goes if that makes the fullest worker much emptier."""
        gain = self.limits.full - self.limits.target
        own = workers[worker]
        for stream in sorted(self._movable(own, now), key=lambda name: -self.load([name])):
            for other in self._emptiest(worker, workers):
                after = max(
                    self.load([*workers[other], stream]), self.load(own) - self.load([stream])
                )
                if after < self.load(own) - gain:
                    return Move(stream, other)
        return None

    def _movable(self, streams: list[str], now: float) -> list[str]:
        cooldown, never = self.limits.cooldown, float("-inf")
        return [name for name in streams if now - self._moved.get(name, never) >= cooldown]

    def _emptiest(self, worker: str, workers: Mapping[str, list[str]]) -> list[str]:
        others = [w for w in workers if w != worker and len(workers[w]) < self.limits.most]
        return sorted(others, key=lambda w: (self.load(workers[w]), w))
