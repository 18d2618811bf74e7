"""`sources.toml` while a run goes on: read again when it has changed and is not being written."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from eventful.cluster.events import Events
from eventful.cluster.sources import Plan, read_plan
from eventful.errors import EventfulError

_REST = 0.3  # seconds without a change: an editor may empty a file before it writes it
Stamp = tuple[int, int, int]


class PlanFile:
    """Gives a new plan when the file has one; a file that cannot be used changes nothing."""

    def __init__(
        self, path: Path, events: Events, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._events, self._clock = path, events, clock
        self._taken = self._seen = _stamp(path)
        self._since = clock()

    def turn(self, known: Plan) -> Plan | None:
        """The plan that takes the place of the known one, if there is one."""
        now, stamp = self._clock(), _stamp(self._path)
        if stamp != self._seen:
            self._seen, self._since = stamp, now
        at_rest = now - self._since >= _REST
        if stamp is None or stamp == self._taken or not at_rest:
            return None
        self._taken = stamp
        try:
            plan = read_plan(self._path)
        except EventfulError as error:
            self._events.note("sources.toml cannot be used", message=str(error))
            return None
        if not plan.streams:
            self._events.note("sources.toml has no streams", message="All go on: ctrl-C ends them.")
            return None
        return self._merged(known, plan)

    def _merged(self, known: Plan, plan: Plan) -> Plan:
        """Streams that come and go; `[cluster]` is that of the start, since processes have it."""
        before = {s.name: s for s in known.streams}
        other = [s.name for s in plan.streams if s != before.get(s.name, s)]
        if other or plan.cluster != known.cluster:
            self._events.note(
                "changes that need a new start",
                streams=other,
                cluster=plan.cluster != known.cluster,
            )
        return Plan(known.cluster, tuple(before.get(s.name, s) for s in plan.streams))


def _stamp(path: Path) -> Stamp | None:
    """What changes when a file is written."""
    try:
        found = path.stat()
    except OSError:
        return None  # an editor is about to replace it
    return found.st_mtime_ns, found.st_size, found.st_ino
