"""Frames a second of every stream, and from them and the measured costs the load it is."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventful.cluster.driver import Driver

_OVER = 5.0  # seconds over which frames are counted


class Rates:
    """Counts frames that arrive at readers and steps of workers.

    Attributes:
        arriving: frames a second by stream; `counted` results a second.
    """

    def __init__(self) -> None:
        self.arriving: dict[str, float] = {}
        self.counted: dict[str, float] = {}
        self._seen: dict[str, deque[tuple[float, int, int]]] = {}
        self._read_at = float("-inf")

    def read(self, driver: Driver, now: float) -> None:
        """Look at the counts of all streams, every half a second."""
        if now - self._read_at < 0.5:
            return
        self._read_at = now
        for name, account in driver.accounts.items():
            if account.over:
                for table in (self.arriving, self.counted, self._seen):
                    table.pop(name, None)
                continue
            state = driver.reader_state(name)
            self._count(name, now, state.get("arrived", 0), account.counted)
            watch = driver.workers.get(account.worker)
            held = {} if watch is None else watch.answer.get("streams", {}).get(name, {})
            self._load(driver, name, account.every, held)

    def _count(self, name: str, now: float, arrived: int, counted: int) -> None:
        seen = self._seen.setdefault(name, deque())
        if seen and arrived < seen[-1][1]:
            seen.clear()  # the reader was started again
        seen.append((now, arrived, counted))
        while now - seen[0][0] > _OVER:
            seen.popleft()
        span = now - seen[0][0]
        if span > 0:
            self.arriving[name] = (arrived - seen[0][1]) / span
            self.counted[name] = (counted - seen[0][2]) / span

    def _load(self, driver: Driver, name: str, every: bool, held: dict[str, Any]) -> None:
        """What a stream would take if none of its frames was dropped."""
        cost, rates = held.get("cost"), self.counted if every else self.arriving
        if cost is not None and name in rates:
            driver.placement.loads[name] = cost / 1e3 * rates[name]
