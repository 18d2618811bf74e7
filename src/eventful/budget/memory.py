"""A limit on the memory that streams hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eventful.budget.base import Budget, BudgetReport, Controller, Facts, Turn, checked_number
from eventful.errors import ConfigError


@dataclass(frozen=True)
class MemoryBudget(Budget):
    """Refuses streams that would hold more memory than this, together.

    The memory of a stream follows from the model, the frame size and the config, not from the
    number of tokens updated: so the limit is on the number of streams.

    Attributes:
        megabytes: of all streams of a `Stream` or `StreamBatch`.
    """

    megabytes: float

    def __post_init__(self) -> None:
        checked_number("The megabytes of a MemoryBudget", self.megabytes, example="200")

    def controller(self, facts: Facts) -> Controller:
        """See `Budget`."""
        return _Kept(self.megabytes, facts.state_bytes / 1e6)

    def check(self, state_bytes: int, streams: int) -> None:
        """Refuse streams beyond the limit."""
        each = state_bytes / 1e6
        if each * streams <= self.megabytes:
            return
        fit = math.floor(self.megabytes / each)
        raise ConfigError(
            f"{streams} stream{'s' if streams > 1 else ''} would hold {each * streams:.1f} MB, "
            f"{each:.1f} MB each; the budget is {self.megabytes:g} MB, "
            + (f"enough for {fit}." if fit else f"the nearest possible {each:.1f} MB.")
            + " Smaller frames, a half-precision model or Config.fast(context=None) need less."
        )


@dataclass
class _Kept(Controller):
    asked: float
    each: float

    def turn(self) -> Turn:
        """See `Controller`: the stream's own policy."""
        return Turn()

    def report(self) -> BudgetReport:
        """See `Controller`; `held` is that of one stream."""
        return BudgetReport(self.asked, self.each, "MB", 1.0)
