"""Limits on time: closed loops on measured times, through the number of tokens."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from eventful.budget.base import (
    Budget,
    BudgetReport,
    Controller,
    Facts,
    Told,
    Turn,
    checked_number,
    checked_share,
)
from eventful.errors import ConfigError
from eventful.policies import FollowScene, Policy, Shared

START = 0.125  # share of the tokens before any step was timed
LEVEL = 0.3  # errors above this multiple of the contrast want to pass
FOLLOW = 0.25  # weight of a new time
SPIKE = 2.0  # times the expected time: more is not believed of a single step
LESS, MORE = 0.01, 0.05  # relative changes of the share below them are not made
PATIENCE = 8  # steps at the floor and too slow before the budget is called impossible
MARGIN = 1.5  # mean deviations of a step's time that a latency leaves room for


@dataclass(frozen=True)
class LatencyBudget(Budget):
    """Keeps the time of each step below a limit, but for frames that must run dense.

    These are the first, and those of a scene cut. It never updates fewer tokens than the floor.

    Attributes:
        ms: of a step.
        floor: least share of the tokens, the quality below which it does not go.
    """

    ms: float
    floor: float = 0.02

    def __post_init__(self) -> None:
        checked_number("The ms of a LatencyBudget", self.ms, example="20")
        checked_share("The floor of a LatencyBudget", self.floor)

    def controller(self, facts: Facts) -> Controller:
        """See `Budget`."""
        return LatencyController(self.ms, self.floor, facts)


@dataclass(frozen=True)
class RateBudget(Budget):
    """Keeps up with so many frames a second, the rest of the program included.

    Attributes:
        fps: frames a second, of the whole loop around the stream.
        floor: least share of the tokens.
        spare: share of each frame's time that is never used for the step.
    """

    fps: float
    floor: float = 0.02
    spare: float = 0.1

    def __post_init__(self) -> None:
        checked_number("The fps of a RateBudget", self.fps, example="25")
        if self.fps == 0 or math.isinf(self.fps):
            raise ConfigError(f"The fps of a RateBudget is finite and above 0; got {self.fps!r}.")
        checked_share("The floor of a RateBudget", self.floor)
        checked_share("The spare of a RateBudget", self.spare)

    def controller(self, facts: Facts) -> Controller:
        """See `Budget`."""
        return RateController(self, facts)


class Pace:
    """How long a step takes for a share of the tokens: base + slope * share."""

    def __init__(self) -> None:
        self.dense: float | None = None
        self._base: float | None = None
        self._slope = 0.0
        self._pairs: deque[tuple[float, float]] = deque(maxlen=32)
        self.deviation = 0.0
        self._odd = False  # the last time was a spike

    @property
    def known(self) -> bool:
        """Whether a step was timed."""
        return self._base is not None

    def ms(self, share: float) -> float:
        """Time of a step that updates this share of the tokens."""
        return (self._base or 0.0) + self._slope * share

    def share(self, ms: float) -> float:
        """The share of the tokens that takes so long."""
        return (ms - (self._base or 0.0)) / self._slope

    def note_dense(self, ms: float) -> None:
        """Take in the time of a dense step."""
        self.dense = ms if self.dense is None else min(self.dense, ms)

    def note(self, share: float, ms: float) -> None:
        """Take in the time of a step."""
        if self._base is None:
            # A dense step bounds the slope from above; a first one was slower than later ones are.
            dense = self.dense if self.dense is not None else 2 * ms
            self._slope = max(dense - ms, 0.25 * dense) / max(1 - share, 0.1)
            self._base = ms - self._slope * share
        expected = self.ms(share)
        self._odd = ms > SPIKE * expected > 0 and not self._odd
        if self._odd:
            return
        off = ms - expected
        self._base += FOLLOW * off
        self.deviation += 0.1 * (abs(off) - self.deviation)
        self._pairs.append((share, ms))
        self._learn_slope()

    def _learn_slope(self) -> None:
        """Correct the slope where different shares were timed lately."""
        count = len(self._pairs)
        if count < 4:
            return
        middle = sum(s for s, _ in self._pairs) / count
        mean = sum(t for _, t in self._pairs) / count
        spread = sum((s - middle) ** 2 for s, _ in self._pairs) / count
        if spread < (0.15 * middle) ** 2 or spread == 0:
            return
        slope = sum((s - middle) * (t - mean) for s, t in self._pairs) / count / spread
        slope = min(max(slope, self._slope / 3), self._slope * 3)
        share = self._pairs[-1][0]
        now = self.ms(share)
        self._slope += 0.1 * (slope - self._slope)
        self._base = now - self._slope * share


class LatencyController(Controller):
    """Holds the time of steps."""

    def __init__(self, ms: float, floor: float, facts: Facts) -> None:
        self._asked, self._floor, self._facts = ms, floor, facts
        self._pace = Pace()
        self._share = max(START, floor)
        self._mean = math.nan
        self._late = 0

    def turn(self) -> Turn:
        """See `Controller`."""
        return Turn(dense=True) if self._share >= 1 else Turn(self._policy())

    def _policy(self) -> Policy:
        tokens = self._facts.tokens
        least = math.ceil(self._floor * tokens)
        count = self._facts.fit(round(self._share * tokens)) - self._facts.forced
        share = min(max(count, least, 1) / tokens, 1.0)
        if self._facts.shared:
            return Shared(share, floor=min(self._floor, share))
        return FollowScene(
            LEVEL, low=0.05, floor=min(0.02, share), max_fraction=share, renewal=None
        )

    def timed(self, told: Told, ms: float, interval: float | None) -> None:
        """See `Controller`."""
        if not (math.isfinite(ms) and ms > 0):  # the clock stood still
            return
        self._mean = ms if math.isnan(self._mean) else self._mean + 0.2 * (ms - self._mean)
        if told.flushed and self._share < 1:  # a first frame, a scene cut, or dense was cheaper
            self._pace.note_dense(ms)
            self._late = 0 if ms <= self._asked else self._late
            return
        self._pace.note(told.share if told.paid is None else told.paid, ms)
        self._aim(self._target(ms, interval))

    def _target(self, ms: float, interval: float | None) -> float:
        """The time that a step should take."""
        return max(self._asked - MARGIN * self._pace.deviation, 0.7 * self._asked)

    def _aim(self, target: float) -> None:
        if math.isinf(target):
            self._share = 1.0
            return
        share = min(max(self._pace.share(target), self._floor), 1.0)
        change = share / self._share - 1
        if share in (self._floor, 1.0) or change < -LESS or change > MORE:
            self._share = share
        slow = self._share <= self._floor and self._mean > 1.1 * target
        self._late = self._late + 1 if slow else 0
        if self._late >= PATIENCE:
            self._warn(f"{self._name()} cannot be held: {self._problem()}")

    def _name(self) -> str:
        return f"A latency of {self._asked:g} ms"

    def _problem(self) -> str:
        least = min(self._pace.ms(self._floor), self._pace.dense or math.inf)
        return (
            f"{self._floor:.1%} of the tokens, the floor, takes {least:.3g} ms here, which is the "
            "nearest possible. Smaller frames or a lower floor take less."
        )

    def report(self) -> BudgetReport:
        """See `Controller`; `held` is a running mean."""
        limit = self._problem() if self._late >= PATIENCE else ""
        return BudgetReport(self._asked, self._mean, "ms", self._share, limit)


class RateController(LatencyController):
    """Holds the time from one step to the next."""

    def __init__(self, budget: RateBudget, facts: Facts) -> None:
        period = 1000 / budget.fps
        super().__init__(period, budget.floor, facts)
        self._fps = budget.fps
        self._most = (1 - budget.spare) * period
        self._allowed = self._most
        self._interval = math.nan

    def _target(self, ms: float, interval: float | None) -> float:
        period = self._asked
        if interval is None or not (math.isfinite(interval) and interval > 0):
            return self._allowed
        interval = min(interval, SPIKE * period)
        if math.isnan(self._interval):
            self._interval = interval
        self._interval += 0.2 * (interval - self._interval)
        spare = period - self._interval
        if abs(spare) < 0.01 * period:  # perhaps it waits for the camera: try a little more
            spare = 0.01 * period
        # Where the loop is late, it is late by what the rest of the program takes.
        self._allowed = min(max(self._allowed + 0.2 * spare, 0.05 * period), self._most)
        return self._allowed

    def _name(self) -> str:
        return f"A rate of {self._fps:g} frames a second"

    def report(self) -> BudgetReport:
        """See `Controller`."""
        made = super().report()
        held = math.nan if math.isnan(self._interval) else 1000 / self._interval
        return BudgetReport(self._fps, held, "frames a second", made.share, made.limit)
