"""Results of a worker on their way to the registry, which may be away."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from eventful.cluster.accounts import Entry, Verdict
from eventful.cluster.links import Link, LinkError, Reply

MOST = 1000  # results that wait; a worker with more takes no frames
_BATCH = 256
_PATIENCE = 15.0  # seconds for the registry to answer
_PAUSE = 0.3  # seconds before a call that failed is made again


class Outbox:
    """Hands in entries in turn, and again until each has a verdict.

    Args:
        judged: called with each entry, its verdict and the stream's position.

    Attributes:
        failures: calls that got no answer.
    """

    def __init__(
        self,
        registry: Callable[[], Link],
        judged: Callable[[Entry, Verdict, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry, self._judged, self._clock = registry, judged, clock
        self._entries: deque[Entry] = deque()
        self._sent: list[Entry] = []
        self._reply: Reply | None = None
        self._asked = self._not_before = 0.0
        self.failures = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        """One more result."""
        self._entries.append(entry)

    def holds(self, stream: str) -> int:
        """How many results of a stream wait."""
        return sum(entry.stream == stream for entry in tuple(self._entries))

    def drop(self, stream: str) -> None:
        """Forget the results of a stream whose lease is gone, those that were sent included."""
        self._entries = deque(entry for entry in self._entries if entry.stream != stream)
        self._sent = [entry for entry in self._sent if entry.stream != stream]

    def turn(self) -> None:
        """Send what waits, and read what was answered; does not wait."""
        now = self._clock()
        if self._reply is not None:
            if not self._reply.there and now - self._asked < _PATIENCE:
                return
            self._read(self._reply, now)
        if self._entries and self._reply is None and now >= self._not_before:
            self._send(now)

    def _send(self, now: float) -> None:
        batch = [entry for entry, _ in zip(self._entries, range(_BATCH), strict=False)]
        try:
            self._reply = self._registry().send("commit", batch)
        except LinkError:
            self._fail(now)
            return
        self._sent, self._batch, self._asked = list(batch), batch, now

    def _read(self, reply: Reply, now: float) -> None:
        self._reply = None
        try:
            verdicts = reply.get(0.01)
        except LinkError:
            self._fail(now)
            return
        known = set(map(id, self._sent))
        for entry, (verdict, position) in zip(self._batch, verdicts, strict=True):
            if id(entry) not in known:
                continue  # dropped since
            if verdict == "wait":
                self._not_before = now + _PAUSE
                return  # the rest was judged, and is repeated
            if self._entries and self._entries[0] is entry:
                self._entries.popleft()
            self._judged(entry, verdict, position)

    def _fail(self, now: float) -> None:
        self.failures += 1
        self._not_before = now + _PAUSE
