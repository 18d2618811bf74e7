"""The registry: who holds which lease, and what counts. One process, which may die at any time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eventful.cluster.accounts import Entry, Lease, State, Verdict
from eventful.cluster.delivery import open_delivery
from eventful.cluster.ledger import Ledger
from eventful.cluster.store import Store

LEDGER = "ledger.sqlite"
_RETRY = 1.0  # seconds between two attempts at a full disk
_IDLE = 0.2
_PATIENCE = 20.0  # seconds that a call waits for the disk


class Registry:
    """A ledger for many callers. Calls that change it return when the change is on the disk.

    Changes of many calls are written together. Where the disk takes none, calls return anyway, and
    results wait in memory: see `Ledger.limit`.

    Args:
        out: folder of the results; `state` that of the ledger.
        to: see `open_delivery`.
    """

    def __init__(self, out: str, state: str, to: str, limit: int) -> None:
        delivery = open_delivery(to, Path(out), Path(state))
        self._ledger = Ledger(Store(Path(state) / LEDGER), delivery, limit=limit)
        self._changed = threading.Condition()
        self._asked = self._written = 0  # changes asked for, and tried to write
        self._closed = False
        self._started = time.time()
        self._thread = threading.Thread(target=self._run, name="eventful.registry", daemon=True)
        self._thread.start()

    def hello(self) -> dict[str, Any]:
        """Which process this is."""
        return {"pid": os.getpid(), "started": self._started}

    def add(self, name: str, shown: str, every: bool) -> dict[str, Any]:
        """See `Ledger.add`; the account."""
        with self._changed:
            account = asdict(self._ledger.add(name, shown, every=every))
            return self._wait(account)

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

    def end(self, name: str, last: int, state: State, message: str) -> None:
        """See `Ledger.end`."""
        with self._changed:
            self._ledger.end(name, last, state, message)
            self._wait(None)

    def describe(self) -> dict[str, Any]:
        """All accounts, and how the results are doing."""
        with self._changed:
            return {
                **self.hello(),
                "accounts": [asdict(each) for each in self._ledger.accounts.values()],
                "waiting": self._ledger.waiting,
                "problem": self._ledger.problem,
                "uncertain": dict(self._ledger.delivery.uncertain),
            }

    def close(self) -> None:
        """Write and deliver everything."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_PATIENCE)
        with self._changed:
            self._ledger.close()

    def _wait(self, answer: Any) -> Any:
        """The answer, once all that was changed so far is written, or could not be."""
        self._asked += 1
        mine = self._asked
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._written >= mine or self._closed, _PATIENCE)
        return answer

    def _run(self) -> None:
        """Write what has changed, again and again."""
        tried = 0.0
        while True:
            with self._changed:
                if self._closed:
                    return
                self._changed.wait_for(lambda: self._closed or self._asked > self._written, _IDLE)
                asked = self._asked
                if not self._ledger.problem or time.monotonic() - tried >= _RETRY:
                    tried = time.monotonic()
                    self._ledger.save()
                self._written = asked
                self._changed.notify_all()
            time.sleep(0.002)  # callers get the lock, and hand in what is written together
