"""A reader: a process that reads sources, and hands out frames to the workers that ask.

It goes on while workers die and come back. In mode `latest` a frame that nobody took is replaced by
the next one; in mode `every` the source waits, and frames can be taken once more.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from eventful.cluster.accounts import Lease
from eventful.cluster.messages import about
from eventful.live.feed import Arrived, Feed, open_live
from eventful.pipeline.sources import SourceName, open_source

_EARLIER = 4  # frames that were handed out of which the next one tells
_AGAIN = 16  # frames of mode `every` that are kept after they were handed out


@dataclass(frozen=True)
class Order:
    """What is read, and how."""

    source: SourceName = field(repr=False)
    rate: float | None = None
    loop: bool = False

    @property
    def counts_on(self) -> bool:
        """Whether frames are numbered as they are read: no number is a place in the source."""
        return self.loop or self.source.live


@dataclass(frozen=True)
class Want:
    """What a worker asks for: a frame of a stream behind `after`, under a lease."""

    epoch: int
    after: int


@dataclass(frozen=True)
class Picked:
    """A frame on its way to a worker.

    Attributes:
        picture: (3, H, W) uint8.
        behind, earlier: see `accounts.Part`.
        age: seconds since it came.
        resumed: it does not follow on the frame that was handed out before.
    """

    number: int
    behind: int
    seconds: float | None
    picture: np.ndarray
    age: float
    resumed: bool
    earlier: tuple[tuple[int, int], ...] = ()


class Outlet:
    """One stream of a reader. Calls are made by one thread at a time."""

    def __init__(self, lease: Lease, order: Order, notify: Any) -> None:
        self.epoch, self.every = lease.epoch, lease.every
        self._order, self._notify = order, notify
        self.handed = lease.after
        self._kept: deque[Arrived] = deque(maxlen=_AGAIN)
        self._earlier: deque[tuple[int, int]] = deque(maxlen=_EARLIER)
        self.feed = self._open(lease.after)

    def take(self, want: Want) -> Picked | None:
        """A frame, if there is one and the lease is in force."""
        if want.epoch < self.epoch:
            return None  # of a worker that lost its lease
        self.epoch = want.epoch
        found = self._next(want.after) if self.every else self.feed.take()
        if found is None:
            return None
        behind, earlier = want.after + 1, ()
        if not self.every:
            behind, earlier = self.handed + 1, tuple(self._earlier)  # type: ignore[assignment]
            self._earlier.append((behind, found.index))
        self.handed = max(self.handed, found.index)
        return Picked(
            found.index,
            behind,
            found.seconds,
            found.picture.numpy(),
            time.monotonic() - found.moment,
            found.resumed,
            earlier,
        )

    def state(self) -> dict[str, Any]:
        """As values for JSON."""
        feed, source = self.feed, self._order.source
        return {
            "status": feed.status,
            "message": about(feed.message, source.address, source.name),
            "last": feed.index,
            "handed": self.handed,
            "arrived": feed.arrived,
            "replaced": feed.dropped,
            "damaged": feed.damaged,
            "lost": feed.lost,
            "rate": feed.rate,
            "staleness": feed.staleness,
        }

    def _next(self, after: int) -> Arrived | None:
        """The frame behind `after`, of those kept or from the source."""
        for kept in self._kept:
            if kept.index == after + 1:
                return kept
        if after < self.handed:  # it is not kept any more: read the source once more
            self.feed.close()
            self._kept.clear()
            self.handed = after
            self.feed = self._open(after)
            return None
        found = self.feed.take()
        if found is not None:
            self._kept.append(found)
        return found

    def _open(self, after: int) -> Feed:
        feed = Feed(
            self._order.source,
            loop=self._order.loop,
            every=self.every,
            after=after,
            rate=self._order.rate,
            notify=self._notify,
            # Rendered frames of the generated world are kept for repetitions.
            open_footage=open_live if self._order.loop else open_source,
        )
        feed.start()
        return feed


class Reader:
    """Reads some streams. Methods may be called by any thread.

    Sources are given by `open` and not kept anywhere: a reader that was started again reads nothing
    until it is told to.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._outlets: dict[str, Outlet] = {}
        self._changed = threading.Condition()
        self._started = time.time()

    def hello(self) -> dict[str, Any]:
        """Which process this is."""
        return {"pid": os.getpid(), "started": self._started}

    def open(self, lease: Lease, order: Order) -> None:
        """Read a stream behind `lease.after`; if it is read already, begin there anew.

        A call that comes late, with a lease older than the one in force, changes nothing.
        """
        with self._changed:
            known = self._outlets.get(lease.stream)
            if known is not None and known.epoch > lease.epoch:
                return
        last = self.close(lease.stream)
        if order.counts_on:
            lease = replace(lease, after=max(lease.after, last))
        outlet = Outlet(lease, order, self._notify)
        with self._changed:
            self._outlets[lease.stream] = outlet

    def close(self, stream: str) -> int:
        """Stop reading a stream; the number of the last frame that was read, -1 if none was."""
        with self._changed:
            outlet = self._outlets.pop(stream, None)
        if outlet is None:
            return -1
        outlet.feed.close()
        return outlet.feed.index

    def take(self, wants: Mapping[str, Want], seconds: float) -> dict[str, Picked]:
        """A frame of each stream that has one; waits so long if none has."""
        end = time.monotonic() + seconds
        with self._changed:
            while True:
                found = {}
                for name, want in wants.items():
                    outlet = self._outlets.get(name)
                    picked = None if outlet is None else outlet.take(want)
                    if picked is not None:
                        found[name] = picked
                left = end - time.monotonic()
                if found or left <= 0:
                    return found
                self._changed.wait(left)

    def describe(self) -> dict[str, Any]:
        """What all streams do."""
        with self._changed:
            outlets = dict(self._outlets)
        return {**self.hello(), "streams": {name: each.state() for name, each in outlets.items()}}

    def stop(self) -> None:
        """Stop reading everything."""
        for name in list(self._outlets):
            self.close(name)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
