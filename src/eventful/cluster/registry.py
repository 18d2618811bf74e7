"""The registry: who holds which lease, and what counts. One process, which may die at any time."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from eventful.cluster.accounts import Entry, Lease, State, Verdict
from eventful.cluster.delivery import open_delivery
from eventful.cluster.ledger import Ledger
from eventful.cluster.links import LinkFault
from eventful.cluster.store import Store

_log = logging.getLogger("eventful.cluster")
LEDGER = "ledger.sqlite"
_RETRY = 1.0  # seconds between two attempts at a full disk
_IDLE = 0.2
_SLOW = 30.0  # seconds of a delivery after which it is reported
_PATIENCE = 15.0  # seconds that a call waits for the disk, and the end for the destination


class Registry:
    """A ledger for many callers. Calls that change it return when the change is on the disk.

    Changes of many calls are written together by one thread, and delivered by another one. Where
    the disk takes none, calls return anyway, and results wait in memory: see `Ledger.limit`.

    Args:
        out: folder of the results; `state` that of the ledger.
        to: see `open_delivery`.
    """

    def __init__(self, out: str, state: str, to: str, limit: int) -> None:
        delivery = open_delivery(to, Path(out), Path(state))
        self._ledger = Ledger(Store(Path(state) / LEDGER), delivery, limit=limit)
        self._changed = threading.Condition()
        self._asked = self._written = 0  # changes asked for, and tried to write
        self._flushing = self._closed = self._given_back = False
        self._since: float | None = None  # moment at which the delivery under way was begun
        self._started = time.time()
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name="eventful.registry", daemon=True)
            for loop in (self._save, self._deliver)
        ]
        for thread in self._threads:
            thread.start()

    def hello(self) -> dict[str, Any]:
        """Which process this is."""
        return {"pid": os.getpid(), "started": self._started}

    def add(self, name: str, shown: str, every: bool) -> dict[str, Any]:
        """See `Ledger.add`; the account."""
        with self._changed:
            account = self._ledger.add(name, shown, every=every)
            return self._wait(account.described())

    def lease(self, name: str, worker: str | None, reader: str | None) -> Lease:
        """See `Ledger.lease`."""
        with self._changed:
            lease: Lease = self._wait(self._ledger.lease(name, worker=worker, reader=reader))
            return lease

    def renew(self, worker: str) -> list[Lease]:
        """See `Ledger.renew`."""
        with self._changed:
            leases: list[Lease] = self._wait(self._ledger.renew(worker))
            return leases

    def commit(self, entries: Sequence[Entry]) -> list[tuple[Verdict, int]]:
        """See `Ledger.accept`: verdicts, with the positions of the streams."""
        with self._changed:
            verdicts = self._ledger.accept(entries)
            positions = [self._ledger.position(entry.stream) for entry in entries]
            self._wait(None)
            return list(zip(verdicts, positions, strict=True))

    def end(
        self, name: str, last: int, state: State, message: str, epoch: int | None = None
    ) -> None:
        """See `Ledger.end`."""
        with self._changed:
            self._ledger.end(name, last, state, message, epoch)
            self._wait(None)

    def forget(self, name: str) -> None:
        """See `Ledger.forget`."""
        with self._changed:
            self._ledger.forget(name)
            self._wait(None)

    def fault(self, names: Sequence[str], message: str) -> None:
        """See `Ledger.fault`."""
        with self._changed:
            self._ledger.fault(names, message)
            self._wait(None)

    def flush(self) -> None:
        """Deliver what waits now, even if it is little."""
        with self._changed:
            self._flushing = bool(self._ledger.waiting)
            self._changed.notify_all()

    def describe(self) -> dict[str, Any]:
        """All accounts, and how the results are doing.

        Raises:
            LinkFault: Nothing is written any more, so that this process is to be replaced.
        """
        if not self._closed and not all(thread.is_alive() for thread in self._threads):
            raise LinkFault("a thread of the registry is dead")
        with self._changed:
            return self._described()

    def close(self, seconds: float = _PATIENCE) -> dict[str, Any]:
        """Write and deliver everything, as far as that is possible; then as `describe`.

        It may be called again by who got no answer.
        """
        begun = time.monotonic()
        with self._changed:
            if not self._closed:
                self._ledger.name_held()
            self._flushing = True
            self._asked += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._finished(begun), seconds)
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:  # a function of the user may take longer, or for ever
            thread.join(max(0.1, begun + seconds + 1 - time.monotonic()))
        with self._changed:
            ended = not any(thread.is_alive() for thread in self._threads)
            if ended and not self._given_back:
                self._given_back = True
                self._ledger.write()
                with suppress(OSError):
                    self._ledger.delivery.close()
                self._ledger.store.close()
            return self._described()

    def _described(self) -> dict[str, Any]:
        return {
            **self.hello(),
            "accounts": [each.described() for each in self._ledger.accounts.values()],
            "waiting": self._ledger.waiting,
            "problem": self._ledger.problem or self._slow(),
            "uncertain": {name: list(each) for name, each in self._ledger.uncertain.items()},
        }

    def _slow(self) -> str:
        """A destination that takes long is a problem, too."""
        took = 0.0 if self._since is None else time.monotonic() - self._since
        return f"The destination has not answered for {took:.0f} s." if took > _SLOW else ""

    def _finished(self, begun: float) -> bool:
        """Whether all is delivered and noted, or was tried in vain since a moment."""
        ledger = self._ledger
        tried = time.monotonic() - begun > 2 * _RETRY
        return bool(ledger.problem and tried) or not (ledger.waiting or ledger.unsaved)

    def _wait(self, answer: Any) -> Any:
        """The answer, once all that was changed so far is written, or could not be."""
        self._asked += 1
        mine = self._asked
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._written >= mine or self._closed, _PATIENCE)
        return answer

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException:  # a fault of ours: a new process reads the ledger, and goes on
            _log.exception("the registry cannot go on")
            _die()

    def _save(self) -> None:
        """Write what has changed, again and again."""
        tried = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(self._has_changed, _IDLE)
                if self._closed:
                    return
                asked = self._asked
                if not self._ledger.stuck or time.monotonic() - tried >= _RETRY:
                    tried = time.monotonic()
                    self._ledger.write()
                self._written = asked
                self._changed.notify_all()
                pause = 0.05 if self._ledger.stuck else 0.002
            time.sleep(pause)  # callers get the lock, and hand in what is written together

    def _has_changed(self) -> bool:
        return self._closed or self._asked > self._written or self._ledger.unsaved

    def _deliver(self) -> None:
        """Hand over what is due, again and again: without the lock, since it may take long."""
        not_before = 0.0
        while True:
            with self._changed:
                if self._closed:
                    return
                chunk = []
                if time.monotonic() >= not_before:
                    chunk = self._ledger.due(all_of_them=self._flushing)
                if not chunk:
                    self._flushing = self._flushing and self._ledger.waiting > 0
                    self._changed.wait(_IDLE)
                    continue
                self._since = time.monotonic()
            problem = self._ledger.deliver(chunk)
            with self._changed:
                self._since = None
                self._ledger.done(chunk, problem)
                not_before = time.monotonic() + _RETRY if problem else 0.0
                self._changed.notify_all()


def _die() -> None:
    """End this process: Ray starts it again."""
    os._exit(1)
