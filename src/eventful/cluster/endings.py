"""When streams end, and with them a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eventful.cluster.accounts import Account
from eventful.cluster.worker import REGISTRY

if TYPE_CHECKING:
    from eventful.cluster.driver import Driver

_QUIET = 1.0  # seconds for which nothing happens about a source that has ended


class Endings:
    """Closes accounts, and has the last results delivered."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._idle: dict[str, float] = {}  # by ended stream: moment since which nothing happens
        self._over_since: float | None = None  # moment at which all streams of the plan were over

    @property
    def complete(self) -> bool:
        """Whether every stream of the plan is over, and every result has arrived."""
        registry = self._driver.registry
        arrived = not (registry.answer.get("waiting") or registry.answer.get("problem"))
        # An answer of an earlier moment does not know of the last results.
        return arrived and self._over_since is not None and registry.asked > self._over_since

    def turn(self, now: float) -> None:
        """Close the accounts of sources that have ended, when their last results are in."""
        driver = self._driver
        for account in list(driver.accounts.values()):
            name = account.name
            state = {} if account.over else driver.reader_state(name)
            over = state.get("status") in ("ended", "dead")
            if not over or (state["status"] == "dead" and driver.sources[name].live):
                self._idle.pop(name, None)
                continue
            asked = min(driver.registry.asked, driver.readers[account.reader].asked)
            if asked <= driver.touched[name]:
                continue
            if account.position >= state["last"] or self._is_idle(account, state, now):
                message = state["message"]
                driver.end(name, state["last"], "failed" if message else "ended", message)
                self._idle.pop(name, None)
        self._settle(now)

    def _settle(self, now: float) -> None:
        """When all streams are over, the last results are delivered at once."""
        streams = self._driver.plan.streams
        if not streams or not all(self._is_over(spec.name) for spec in streams):
            self._over_since = None
            return
        self._over_since = now if self._over_since is None else self._over_since
        if self._driver.registry.answer.get("waiting"):
            self._driver.engine.find(REGISTRY).send("flush")

    def _is_over(self, name: str) -> bool:
        """Whether nothing more comes of a stream; one that cannot be used has failed."""
        account = self._driver.accounts.get(name)
        over = account is not None and account.over and account.state != "removed"
        return over or name in self._driver.problems

    def _is_idle(self, account: Account, state: dict[str, Any], now: float) -> bool:
        """Whether nothing more will come of a source that has ended."""
        watch = self._driver.workers.get(account.worker)
        if account.every or watch is None or watch.life != "up" or state["handed"] < state["last"]:
            self._idle.pop(account.name, None)
            return False
        if watch.answer["streams"].get(account.name, {}).get("busy", True):
            self._idle.pop(account.name, None)
            return False
        return now - self._idle.setdefault(account.name, now) > _QUIET
