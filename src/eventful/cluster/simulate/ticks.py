"""Workers at work: some frame intervals of all workers at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eventful.cluster.simulate.costs import Costs

Array = np.ndarray


@dataclass(frozen=True)
class Seats:
    """Where the frames of an interval run: sorted by worker, and in steps of at most `most`.

    Attributes:
        stream: the streams, in the order of the steps.
        worker: of each of them.
        step: number of its step at the worker, from 0.
        starts: where each step begins in `stream`.
        width: steps of the worker with the most.
    """

    stream: Array
    worker: Array
    step: Array
    starts: Array
    width: int

    @classmethod
    def of(cls, worker: Array, streams: Array, most: int, turn: int) -> Seats:
        """Seat streams at their workers.

        Args:
            worker: of every stream of the cluster.
            streams: those that have frames and a worker.
            turn: who comes first changes with it, so that none always comes last.
        """
        count = max(len(worker), 1)
        order = np.lexsort(((streams - turn) % count, worker[streams]))
        stream = streams[order]
        own = worker[stream]
        first = np.searchsorted(own, own)
        place = np.arange(len(stream)) - first
        step = place // most
        starts = np.flatnonzero(place % most == 0)
        return cls(stream, own, step, starts, int(step.max()) + 1 if len(step) else 0)


@dataclass(frozen=True)
class Worked:
    """What some intervals gave; the first axis is the interval.

    Attributes:
        done: whether each frame was computed, in the order of `Seats.stream`.
        broken: whether its step was running when its worker died.
        finish: milliseconds from the gathering to the end of its step.
        busy: milliseconds that each worker computed.
        left: milliseconds of the running step that reach into the next interval, by worker.
    """

    done: Array
    broken: Array
    finish: Array
    busy: Array
    left: Array


def work(
    seats: Seats, tokens: Array, costs: Costs, left: Array, tick_ms: float, dying: Array
) -> Worked:
    """Run all workers through some intervals.

    Args:
        tokens: to compute, (intervals, frames), in the order of `seats.stream`.
        left: milliseconds that each worker still needs for its running step.
        dying: workers that die at the end of the last interval.
    """
    intervals, workers = len(tokens), len(left)
    spent = np.zeros((intervals, workers, max(seats.width, 1)))
    there = np.zeros(spent.shape[1:], dtype=bool)
    if len(seats.starts):
        sizes = np.diff(np.append(seats.starts, len(seats.stream)))
        at = seats.worker[seats.starts], seats.step[seats.starts]
        summed = np.add.reduceat(tokens, seats.starts, axis=1)
        spent[:, at[0], at[1]] = costs.fixed + costs.per_stream * sizes + costs.per_token * summed
        there[at] = True
    ends = spent.cumsum(axis=2)
    begins = ends - spent
    began = np.empty(spent.shape, dtype=bool)
    offset = np.empty((intervals, workers))
    for k in range(intervals):
        offset[k] = left
        began[k] = there & (begins[k] + left[:, None] < tick_ms)
        last = np.where(began[k], ends[k], 0).max(axis=1) + left
        left = np.maximum(last - tick_ms, 0)
    ends += offset[:, :, None]
    broken = np.zeros_like(began)
    broken[-1] = began[-1] & (ends[-1] > tick_ms) & dying[:, None]
    frames = (slice(None), seats.worker, seats.step)
    return Worked(
        done=(began & ~broken)[frames],
        broken=broken[frames],
        finish=ends[frames],
        busy=(spent * began).sum(axis=2),
        left=np.where(dying, 0.0, left),
    )
