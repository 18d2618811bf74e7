"""A limit on the error of the outputs: predicted at each frame, corrected by comparisons."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eventful.budget.base import (
    Budget,
    BudgetReport,
    Controller,
    Facts,
    Told,
    Turn,
    checked_number,
)
from eventful.policies import FollowScene, Policy, TopR

GROWTH = 0.35  # the error grows with this power of the frames since the last dense step
CEILING = 0.25  # of the tokens in an eventful step; more is not worth it beside a dense step
BANK, DEBT = 8.0, 4.0  # times the error asked for: most that may be saved up, or owed
FIRST, LONGEST = 16, 128  # frames from one comparison to the next where none was due
NEWEST = 0.4  # least weight of a new comparison
LEVELS = (0.05, 1.5)  # multiples of the contrast; the last is about that of new content
UNSEEN = 2.0  # levels beyond so many times that of the last comparison need another one
BASE, MOST = 0.005, 0.2  # added to estimates, which may be none where there is an error


@dataclass(frozen=True)
class ErrorBudget(Budget):
    """Holds the relative error of the output in the mean over frames.

    The error of each frame is predicted from what its step knows (`StepRecord.estimate`), from the
    frames since the last dense step, and from comparisons: now and then a step is followed by a
    dense one on the same frame, which shows the true error. Dense steps come as often as the mean
    needs. Where they come more often than the tokens cost, more tokens are updated, and fewer
    where they come more rarely. The outputs of frames with a dense step have no error.

    With gating `frame` (`Config.fast`). An infinite error refreshes tokens in turn and no more; an
    error of 0 runs dense.

    Attributes:
        error: |output - dense output| / |dense output|, e.g. 0.1.
    """

    error: float

    audits = True
    gatings = ("frame",)

    def __post_init__(self) -> None:
        checked_number("The error of an ErrorBudget", self.error, example="0.1")

    def controller(self, facts: Facts) -> Controller:
        """See `Budget`."""
        if self.error == 0:
            return _Fixed(Turn(dense=True), BudgetReport(0.0, 0.0, "error", 1.0))
        if math.isinf(self.error):
            share = facts.forced / facts.tokens
            return _Fixed(Turn(TopR(0)), BudgetReport(self.error, math.nan, "error", share))
        return ErrorController(self.error)


@dataclass
class _Fixed(Controller):
    """The same for ever."""

    wanted: Turn
    shown: BudgetReport

    def turn(self) -> Turn:
        """See `Controller`."""
        return self.wanted

    def report(self) -> BudgetReport:
        """See `Controller`."""
        return self.shown


class ErrorController(Controller):
    """Keeps an account of predicted errors; a dense step is due where it would be overdrawn."""

    def __init__(self, error: float) -> None:
        self._error = error
        self._level = self._seen = 0.6
        self._gain = 1.0  # true errors over predicted ones
        self._base = BASE
        self._account = 0.0  # sum of errors above the one asked for
        self._since = 0  # frames since the last dense step
        self._estimate: float | None = None
        self._share = 0.05
        self._compared = 0
        self._next = FIRST
        self._due = False
        self._mean = math.nan
        self._booked = math.nan

    @property
    def predicted(self) -> float:
        """The error booked for the last step that was heard of; 0 for a dense one, NaN before."""
        return self._booked

    def turn(self) -> Turn:
        """See `Controller`."""
        self._due, audit = False, False
        if self._estimate is not None:
            ahead = self._predict(self._estimate, self._since + 1)
            self._due = self._account + ahead - self._error > 0
            unseen = self._level >= 0.99 * UNSEEN * self._seen
            audit = self._due or self._since + 1 >= (FIRST if unseen else self._next)
        return Turn(self._policy(), audit)

    def _policy(self) -> Policy:
        # In steps of an eighth of an octave: a policy that stays the same costs nothing.
        level = 2 ** (round(math.log2(self._level) * 8) / 8)
        return FollowScene(
            level, low=min(level, 0.05), floor=0.0, max_fraction=CEILING, renewal=None
        )

    def _predict(self, estimate: float, since: int) -> float:
        return self._gain * (estimate + self._base) * since**GROWTH

    def learn(self, told: Told) -> None:
        """See `Controller`."""
        if told.flushed:
            self._since = 0
            self._book(0.0)
            return
        self._see(told)
        expected = self._predict(self._estimate or 0.0, self._since)
        self._book(expected)
        if expected < self._error:
            faster = 1 + 0.15 * (1 - expected / self._error)
            # The estimate hardly knows what is left out: another level must be compared first.
            self._level = min(self._level * faster, LEVELS[1], UNSEEN * self._seen)

    def audited(self, told: Told, error: float) -> None:
        """See `Controller`; the dense step itself is told of next."""
        self._see(told)
        self._seen = self._level
        estimate = self._estimate or 0.0
        grown = self._since**GROWTH
        self._compared += 1
        weight = max(NEWEST, 1 / self._compared)
        if math.isfinite(error) and estimate > BASE:
            self._gain += weight * (error / (estimate + self._base) / grown - self._gain)
        elif math.isfinite(error):
            base = error / max(self._gain, 0.1) / grown - estimate
            self._base = min(max(self._base + weight * (base - self._base), BASE), MOST)
        if not self._due and not error > self._error:
            self._next = min(LONGEST, 2 * self._next)
            return
        self._next = FIRST
        # Where dense steps cost more than tokens, more tokens; where they cost less, fewer.
        factor = min(max(math.sqrt(self._since * self._share), 0.5), 1.5)
        self._level = min(max(self._level * factor, LEVELS[0]), LEVELS[1])

    def _see(self, told: Told) -> None:
        self._since += 1
        self._estimate = told.estimate or 0.0
        self._share += 0.1 * (told.share - self._share)

    def _book(self, error: float) -> None:
        self._booked = error
        account = self._account + error - self._error
        self._account = min(max(account, -BANK * self._error), DEBT * self._error)
        self._mean = error if math.isnan(self._mean) else self._mean + 0.05 * (error - self._mean)

    def report(self) -> BudgetReport:
        """See `Controller`; `held` is the predicted error, a running mean over some 20 frames."""
        limit = ""
        if self._level >= LEVELS[1] and self._mean < 0.7 * self._error:
            limit = "the error is smaller, and it costs no more than the least there is"
        return BudgetReport(self._error, self._mean, "error", CEILING, limit)
