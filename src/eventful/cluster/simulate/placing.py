"""Which worker a stream goes to."""

from __future__ import annotations

from typing import Protocol

import numpy as np

Array = np.ndarray
NOWHERE = -1


class Placing(Protocol):
    """Places streams; the real cluster's rule and the simulated one have this form."""

    def place(self, load: Array, room: Array, costs: Array) -> Array:
        """Choose a worker for each of some streams.

        Args:
            load: share of the time that each worker is at work; infinite for those that are down.
            room: streams for which each worker has memory left.
            costs: share of a worker's time that each stream to place takes.

        Returns:
            The worker of each stream, or `NOWHERE`.
        """
        ...


class LeastLoaded:
    """The most expensive stream first, each to the worker with the least load that has room."""

    def place(self, load: Array, room: Array, costs: Array) -> Array:
        """See `Placing`."""
        load, room = load.astype(float), room.copy()
        chosen = np.full(len(costs), NOWHERE)
        for stream in np.argsort(-costs, kind="stable"):
            open_load = np.where(room > 0, load, np.inf)
            worker = int(open_load.argmin())
            if not np.isfinite(open_load[worker]):
                break
            chosen[stream] = worker
            load[worker] += costs[stream]
            room[worker] -= 1
        return chosen
