"""When a step runs dense: where so many tokens want to pass that dense is cheaper.

Believed times may be old, or taken while the machine was busy. So before a stream runs dense
for long, dense and eventful steps take turns for a few frames and are compared side by side;
after a while they are compared again.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eventful.cost.times import ENOUGH, Costs

VARIABLE = "EVENTFUL_FALLBACK"
RETURN = 0.9  # of the break-even: fewer tokens than that end a run of dense steps
HOLD, LONGEST_HOLD = 16, 1024  # dense steps before the next comparison; doubled each time
_TURNS = 4 * ENOUGH  # most steps of a comparison: some are not timed
_NEAR = 2  # classes of steps that count as the one compared

_log = logging.getLogger("eventful.fallback")


def enabled() -> bool:
    """Whether streams may fall back on dense steps: not if EVENTFUL_FALLBACK is 0."""
    return os.environ.get(VARIABLE, "1") not in ("0", "false", "no")


@dataclass(frozen=True)
class Demand:
    """The tokens that decide between an eventful and a dense step, the most of any stream.

    Attributes:
        wanted: that want to pass the first gate; under an explicit budget those it lets pass.
        updated: that an eventful step would update.
    """

    wanted: int
    updated: int

    @classmethod
    def of(cls, wanted: Sequence[int], updated: Sequence[int], budget: Sequence[bool]) -> Demand:
        """Of several streams: what each wants and would update, and whether that is a budget."""
        streams = zip(wanted, updated, budget, strict=True)
        return cls(max(some if fixed else all_ for all_, some, fixed in streams), max(updated))


@dataclass(frozen=True)
class Timing:
    """What the time of a step says about costs.

    Attributes:
        demand: what decided between dense and eventful; None where nothing was decided.
        dense: everything was recomputed.
    """

    demand: Demand | None
    dense: bool


class _State(enum.Enum):
    EVENTFUL = "eventful"
    COMPARING = "comparing"
    DENSE = "dense"


class Fallback:
    """Decides frame by frame between eventful and dense steps of one stream or batch."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._state = _State.EVENTFUL
        self._turn = 0
        self._compared = 0  # tokens of the eventful steps compared
        self._asked = 0  # tokens that wanted to pass when the comparison began
        self._left = 0  # dense steps until the next one
        self._hold = HOLD

    def decide(self, demand: Demand) -> bool:
        """Whether the next step should run dense."""
        if self._state is _State.COMPARING:
            return self._take_turn(demand)
        share = RETURN if self._state is _State.DENSE else 1.0
        if not self.costs.beyond(demand.wanted, demand.updated, share=share):
            self._enter(_State.EVENTFUL, demand)
            self._hold = HOLD
            return False
        if self._state is _State.DENSE and self._left > 0:
            self._left -= 1
            return True
        self.costs.forget(demand.updated)
        self._turn, self._compared, self._asked = 0, demand.updated, demand.wanted
        self._enter(_State.COMPARING, demand)
        return self._take_turn(demand)

    def note(self, timing: Timing, read: Callable[[], float], *, first: bool, later: bool) -> None:
        """Learn from the time of a step.

        Args:
            read: gives its milliseconds.
            first: of the stream, which takes longer than others.
            later: the step is still in flight on a device.
        """
        if first:
            if timing.dense and not later:
                self.costs.note_first(read())
        elif timing.dense or timing.demand is not None:
            updated = 0 if timing.demand is None else timing.demand.updated
            queued = 2 if later else 0
            self.costs.note_later(updated, read, dense=timing.dense, queued=queued)

    def _take_turn(self, demand: Demand) -> bool:
        """Dense first, then in turn, until both were timed often enough."""
        fewer = self.costs.share(demand.updated) <= self.costs.share(self._compared) - _NEAR
        if fewer or 2 * demand.wanted < self._asked:
            self._enter(_State.EVENTFUL, demand)  # the scene calmed down before it was settled
            return False
        if not self.costs.compared(self._compared) and self._turn < _TURNS:
            self._turn += 1
            return self._turn % 2 == 1
        if not self.costs.beyond(demand.wanted, demand.updated):
            self._enter(_State.EVENTFUL, demand)
            return False
        self._left, self._hold = self._hold, min(2 * self._hold, LONGEST_HOLD)
        self._enter(_State.DENSE, demand)
        return True

    def _enter(self, state: _State, demand: Demand) -> None:
        if state is not self._state:
            _log.debug(
                "%s -> %s: %d tokens want to pass, the break-even is %d",
                self._state.value, state.value, demand.wanted, self.costs.break_even,
            )  # fmt: skip
        self._state = state
