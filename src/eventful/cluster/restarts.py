"""A rolling restart: one worker after the other, while the rest goes on."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from eventful.cluster.links import LinkError
from eventful.cluster.snapshots import Snapshots
from eventful.errors import StreamNameError

if TYPE_CHECKING:
    from eventful.cluster.driver import Driver

_RELEASE = 3.0  # seconds for a worker to hand in what it has of a stream
_AGAIN = 15.0  # seconds after which a worker that did not end is killed once more


class Restarts:
    """Workers that wait to be started again."""

    def __init__(self, driver: Driver, snapshots: Snapshots) -> None:
        self._driver, self._snapshots = driver, snapshots
        self._waiting: deque[str] = deque()
        self._now: tuple[str, float] | None = None  # the one under way, and when it was started
        self._killed = float("-inf")

    @property
    def going(self) -> bool:
        """Whether a restart is under way."""
        return bool(self._waiting) or self._now is not None

    def begin(self) -> None:
        """Start every worker again."""
        if not self.going:
            self._waiting.extend(self._driver.workers)
            self._driver.events.note("rolling restart", workers=len(self._waiting))

    def drains(self, worker: str) -> bool:
        """Whether a worker is about to end, so that it gets no streams and loses none in panic."""
        return self._now is not None and self._now[0] == worker

    def turn(self, now: float) -> None:
        """Go on where the last worker is up again."""
        driver = self._driver
        if self._now is not None:
            name, started = self._now
            watch = driver.workers[name]
            if watch.life == "up" and watch.started == started and now - self._killed > _AGAIN:
                self._kill(name, now)  # the first one was not heard
            if watch.life != "up" or watch.started == started:
                return
            self._now = None
            if not self._waiting:
                driver.events.note("rolling restart ended")
        ready = all(watch.life == "up" for watch in driver.workers.values())
        if self._waiting and ready:
            self._restart(self._waiting.popleft(), now)

    def _restart(self, name: str, now: float) -> None:
        """Empty a worker as far as others have room and all goes well, then end it."""
        driver = self._driver
        watch = driver.workers[name]
        self._now = name, watch.started
        try:
            for move in driver.placement.rooms(driver.streams_of(name), driver.running()):
                # One that does not answer, or a stream that has ended: the others move.
                with suppress(LinkError, StreamNameError):
                    driver.move(move.stream, move.worker, f"{name} is started again")
            for stream in driver.streams_of(name):  # those without room: they wait for it
                with suppress(LinkError, StreamNameError):
                    self._keep(name, stream)
        finally:
            self._kill(name, now)

    def _keep(self, name: str, stream: str) -> None:
        """Write what a worker remembers of a stream, for the worker that comes in its place."""
        driver = self._driver
        snapshot = driver.engine.find(name).send("release", stream, _RELEASE).get(2 * _RELEASE)
        if snapshot is not None:
            lease = driver.call("registry", "lease", stream, None, None)
            self._snapshots.write(stream, lease.after, snapshot)

    def _kill(self, name: str, now: float) -> None:
        self._killed = now
        with suppress(LinkError):  # it is tried again
            self._driver.kill(self._driver.workers[name], now)
