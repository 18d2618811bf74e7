"""The accounts of all streams, kept in memory and on disk, and the results that wait."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from eventful.cluster.accounts import Account, Entry, Lease, Missed, State, Verdict
from eventful.cluster.delivery import Delivery
from eventful.cluster.messages import in_words
from eventful.cluster.store import Row, Store
from eventful.errors import StreamNameError

FAULTS = 2  # workers that may die of one stream in turn
_GENERATION = 1_000_000  # epochs that one start of the registry may give out


class Ledger:
    """Decides what counts. Not thread-safe: `Registry` has the lock.

    Changes are made in memory and written by `save`. What was not written is lost in a crash, with
    its verdicts: a caller that has no verdict hands in its entry again. Epochs are never given out
    twice, since each start has numbers of its own.

    Args:
        limit: results that may wait for their destination.

    Attributes:
        uncertain: frames of each source that crashes left in doubt, as first and last: nobody knows
            whether they reached their destination.
    """

    def __init__(
        self,
        store: Store,
        delivery: Delivery,
        *,
        limit: int = 20_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.delivery, self.limit, self._clock = store, delivery, limit, clock
        self._since: float | None = None  # moment of the oldest result that waits
        self._known_done = -1  # what the disk has of `_done`
        self._faults = {"write": "", "deliver": ""}
        self.accounts = {account.name: account for account in store.accounts()}
        starts = (store.fact("starts") or 0) + 1
        store.write(facts={"starts": starts})
        self._epochs = starts * _GENERATION
        self._waiting: deque[tuple[int, Row]] = deque(store.waiting())
        self._saved = self._waiting[-1][0] if self._waiting else store.fact("done") or 0
        self._number = self._saved  # of the last result
        self._done = self._waiting[0][0] - 1 if self._waiting else self._number
        self._dirty: set[str] = set()
        delivery.open(store.fact("place"))
        self._place = delivery.place
        self.uncertain: dict[str, list[tuple[int, int]]] = {
            name: [(first, last) for first, last in each]
            for name, each in (store.fact("uncertain") or {}).items()
        }
        for name, ends in delivery.uncertain.items():  # those of the last crash
            self.uncertain.setdefault(name, []).append(ends)
        self._skip_delivered()
        if self._waiting:
            self._since = self._clock()

    @property
    def problem(self) -> str:
        """Why results wait; empty if they do not."""
        return self._faults["write"] or self._faults["deliver"]

    @property
    def stuck(self) -> bool:
        """Whether the disk takes no changes."""
        return bool(self._faults["write"])

    @property
    def unsaved(self) -> bool:
        """Whether the disk does not know yet what was delivered."""
        return self._done > self._known_done

    @property
    def waiting(self) -> int:
        """Results that have not reached their destination."""
        return len(self._waiting)

    def position(self, name: str) -> int:
        """The last frame of a stream that is accounted for."""
        return self.accounts[name].position if name in self.accounts else -1

    def add(self, name: str, shown: str, *, every: bool) -> Account:
        """A stream, if it is not known or was removed; the one that is there otherwise."""
        account = self.accounts.get(name)
        if account is None:
            account = self.accounts[name] = Account(name)
        if account.state in ("removed", "failed"):
            account.state, account.message, account.faults = "running", "", 0
        account.shown, account.every = shown, every
        self._dirty.add(name)
        return account

    def lease(self, name: str, *, worker: str | None = None, reader: str | None = None) -> Lease:
        """A new lease; the one before is void. What is not given stays.

        Raises:
            StreamNameError: There is no such stream, or it is over.
        """
        account = self.accounts.get(name)
        if account is None or account.over:
            raise StreamNameError(f"There is no stream {name!r} to lease.")
        account.worker = account.worker if worker is None else worker
        account.reader = account.reader if reader is None else reader
        account.epoch = self._epoch()
        self._dirty.add(name)
        return account.lease()

    def renew(self, worker: str) -> list[Lease]:
        """New leases of a worker that was started again."""
        mine = [a.name for a in self.accounts.values() if a.worker == worker and not a.over]
        return [self.lease(name) for name in mine]

    def accept(self, entries: Sequence[Entry]) -> list[Verdict]:
        """Count entries, each of them once."""
        return [self._accept(entry) for entry in entries]

    def end(
        self,
        name: str,
        last: int,
        state: State = "ended",
        message: str = "",
        epoch: int | None = None,
    ) -> None:
        """Close the account of a stream; what was missed at its end becomes a row of its own.

        Args:
            epoch: of the lease of the worker that says so; nothing happens if it is an old one.
        """
        account = self.accounts[name]
        if account.over or (epoch is not None and epoch != account.epoch):
            return
        missed = account.end(last, state, message)
        account.epoch = self._epoch()
        if missed:
            self._append(account, {"seconds": None}, missed)
        self._dirty.add(name)

    def forget(self, name: str) -> None:
        """A stream that is over has left the plan: under its name another one may come."""
        account = self.accounts.get(name)
        if account is not None and account.over:
            account.state = "removed"
            self._dirty.add(name)

    def fault(self, names: Sequence[str], message: str) -> None:
        """A worker dies of its streams; one of which `FAULTS` workers died in turn is ended.

        Args:
            names: streams that may be the cause. Their leases do not matter: it died of them.
        """
        for name in names:
            account = self.accounts.get(name)
            if account is None or account.over:
                continue
            account.faults, account.message = account.faults + 1, message
            self._dirty.add(name)
            if account.faults >= FAULTS:
                what = f"{FAULTS} workers died of it in turn. The last one: {message}"
                self.end(name, account.position, "failed", what)

    def save(self, *, all_of_them: bool = False) -> None:
        """Write what has changed, and deliver results; `problem` says if that was not possible.

        Args:
            all_of_them: even results too few for a file of their own.
        """
        self.write()
        while chunk := self.due(all_of_them=all_of_them):
            self.done(chunk, self.deliver(chunk))
            if self._faults["deliver"]:
                return
            self.write()

    def write(self) -> None:
        """Write what has changed to the disk."""
        try:
            self._write()
            self._faults["write"] = ""
        except Exception as error:  # of any kind: what is not written is tried again
            self._faults["write"] = in_words(error)

    def due(self, *, all_of_them: bool = False) -> list[tuple[int, Row]]:
        """Results to be delivered now; none before the disk knows of those before them.

        A crash may leave one delivery in doubt, so a second one is not begun.
        """
        batch, patience = self.delivery.batch, self.delivery.patience
        late = self._since is not None and self._clock() - self._since >= patience
        if self.unsaved or not (len(self._waiting) >= batch or late or all_of_them):
            return []
        # All of these are on the disk.
        return [each for each in islice(self._waiting, batch) if each[0] <= self._saved]

    def deliver(self, chunk: Sequence[tuple[int, Row]]) -> str:
        """Hand results over; what is wrong, if they were not taken.

        It changes nothing here, and may take long: `Registry` calls it without its lock.
        """
        try:
            self.delivery.write([row for _, row in chunk])
        except Exception as error:  # a full disk, or a row that the destination cannot take
            return in_words(error)
        return ""

    def done(self, chunk: Sequence[tuple[int, Row]], problem: str) -> None:
        """Note what became of a delivery."""
        self._faults["deliver"] = problem
        if problem:
            return
        self._place = self.delivery.place
        for _ in chunk:
            self._done = self._waiting.popleft()[0]
        self._since = self._clock() if self._waiting else None

    def name_held(self) -> None:
        """Name frames for which there was no room, where nothing more may come of their stream."""
        for account in self.accounts.values():
            if account.held is not None and len(self._waiting) < self.limit:
                self._append(account, {"seconds": None}, account.name_held())
                self._dirty.add(account.name)

    def close(self) -> None:
        """Write and deliver what is left."""
        self.name_held()
        self.save(all_of_them=True)
        self.delivery.close()
        self.store.close()

    def _accept(self, entry: Entry) -> Verdict:
        account = self.accounts.get(entry.stream)
        if account is None:
            return "fenced"
        verdict = account.judge(entry, room=len(self._waiting) < self.limit)
        if verdict == "counted":
            self._append(account, entry.row, account.count(entry))
        elif verdict == "dropped":
            account.hold(entry)
        self._dirty.add(account.name)
        return verdict

    def _append(self, account: Account, row: Row, missed: list[Missed]) -> None:
        self._number += 1
        head = {"source": account.name, "frame": account.position, "seconds": row["seconds"]}
        tail = {"epoch": account.epoch, "missed": [each.to_dict() for each in missed]}
        self._waiting.append((self._number, {**head, **row, **tail}))
        self._since = self._since or self._clock()

    def _epoch(self) -> int:
        self._epochs += 1
        return self._epochs

    def _write(self) -> None:
        new = list(islice(reversed(self._waiting), self._number - self._saved))[::-1]
        if not (new or self._dirty or self._done > self._known_done):
            return
        changed = [self.accounts[name] for name in self._dirty]
        facts: dict[str, Any] = {"done": self._done, "place": self._place}
        facts["uncertain"] = self.uncertain
        self.store.write(changed, new, done=self._done, facts=facts)
        self._saved, self._known_done = self._number, self._done
        self._dirty.clear()

    def _skip_delivered(self) -> None:
        """Leave out results that reached their destination just before a crash."""
        last = self.delivery.delivered
        while self._waiting:
            number, row = self._waiting[0]
            if row["frame"] > last.get(row["source"], -1):
                break
            self._waiting.popleft()
            self._done = number
