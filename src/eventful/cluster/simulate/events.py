"""What happens when: failures, returns and looks at the load, drawn ahead from one generator."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

import numpy as np

from eventful.cluster.simulate.fleet import Fleet

DAY = 86400.0
# In one interval, in this order: what dies, what is noticed, what comes back.
GONE, DIES, NODE_DIES, REGISTRY_DIES, NOTICED, BACK, LOOK, RETURNS = range(8)


@dataclass(order=True, frozen=True)
class Event:
    """Something that happens at the beginning of an interval.

    Attributes:
        subject: number of the camera, worker or machine.
        life: of the worker, at the time the event was planned; another one outdates it.
    """

    tick: int
    kind: int
    number: int
    subject: int = field(compare=False, default=0)
    life: int = field(compare=False, default=0)


class Calendar:
    """Events in order of time."""

    def __init__(self, fleet: Fleet, generator: np.random.Generator) -> None:
        self._fleet, self._generator = fleet, generator
        self._heap: list[Event] = []
        self._count = itertools.count()
        for camera in range(fleet.cameras):
            self.later(GONE, fleet.camera_days * DAY, camera)
        for worker in range(fleet.gpus):
            self.later(DIES, fleet.worker_days * DAY, worker)
        for node in range(-(-fleet.gpus // fleet.node)):
            self.later(NODE_DIES, fleet.node_days * DAY, node)
        self.later(REGISTRY_DIES, fleet.registry_days * DAY)
        self.add(fleet.in_ticks(fleet.look), LOOK)

    def add(self, tick: int, kind: int, subject: int = 0, life: int = 0) -> None:
        """Plan an event."""
        heapq.heappush(self._heap, Event(tick, kind, next(self._count), subject, life))

    def later(self, kind: int, mean: float, subject: int = 0, now: int = 0) -> None:
        """Plan an event after an exponential time in seconds; a mean of 0 is never."""
        if mean > 0:
            wait = self._generator.exponential(mean)
            self.add(now + self._fleet.in_ticks(wait), kind, subject)

    @property
    def next(self) -> int:
        """The interval of the next event."""
        return self._heap[0].tick

    def peek(self, tick: int) -> list[Event]:
        """The events of an interval; they stay."""
        return [event for event in self._heap if event.tick == tick]

    def take(self, tick: int) -> list[Event]:
        """The events up to an interval, in order."""
        taken = []
        while self._heap and self._heap[0].tick <= tick:
            taken.append(heapq.heappop(self._heap))
        return taken
