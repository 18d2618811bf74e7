"""The setting to take: the cheapest within the limits, or the one that comes nearest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eventful.calibrate.rows import Row
from eventful.errors import ConfigError

USUAL_ERROR = 0.1


@dataclass(frozen=True)
class Limits:
    """What a setting may lose and cost. All that are given must hold; none given means error 0.1.

    Attributes:
        error: relative error that nine frames of ten stay within.
        operations: share of the dense operations.
        speed: how many times faster than dense at least.
    """

    error: float | None = None
    operations: float | None = None
    speed: float | None = None

    def __post_init__(self) -> None:
        for name, example in (("error", "0.1"), ("operations", "0.2"), ("speed", "2")):
            value = getattr(self, name)
            least = 0.0 if name == "error" else math.ulp(0.0)
            if value is not None and not least <= value < math.inf:
                raise ConfigError(
                    f"--{name} is a number {'>= 0' if name == 'error' else '> 0'}, e.g. {example}; "
                    f"got {value!r}."
                )
        if self.operations is not None and self.operations > 1:
            raise ConfigError(
                f"--operations is a share of the dense operations, at most 1, e.g. 0.2; got "
                f"{self.operations!r}."
            )
        if self.error is self.operations is self.speed is None:
            object.__setattr__(self, "error", USUAL_ERROR)

    def excess(self, row: Row) -> float:
        """The largest ratio of a number of the row to its limit; at most 1 within the limits."""
        ratios = [0.0]
        if self.error is not None:
            ratios.append(_ratio(row.error_p90, self.error))
        if self.operations is not None:
            ratios.append(row.operations / self.operations)
        if self.speed is not None:
            if row.time is None:
                raise ConfigError("--speed needs times; leave out --no-time.")
            ratios.append(row.time * self.speed)
        return max(ratios)

    def holds(self, row: Row) -> bool:
        """Whether a row is within all limits."""
        return self.excess(row) <= 1

    @property
    def text(self) -> str:
        """In words."""
        parts = [] if self.error is None else [f"an error of at most {self.error:g}"]
        if self.operations is not None:
            parts.append(f"at most {100 * self.operations:g} % of the operations")
        if self.speed is not None:
            parts.append(f"at least {self.speed:g} times the speed of dense")
        return " and ".join(parts)


@dataclass(frozen=True)
class Choice:
    """The setting to take.

    Attributes:
        row: within the limits if `met`, else the nearest to them.
        better_skip: frame skipping that is within the limits and better; a config cannot hold it.
    """

    row: Row
    met: bool
    better_skip: Row | None = None


def choose(rows: Sequence[Row], limits: Limits) -> Choice | None:
    """The best setting within the limits; None if there is no setting but frame skipping.

    With a limit on the error it is the cheapest one, by time where times were measured. With
    limits on the cost alone it is the one with the smallest error.
    """
    candidates = [row for row in rows if row.adaptive]
    if not candidates:
        return None
    within = [row for row in candidates if limits.holds(row)]
    if not within:
        return Choice(min(candidates, key=limits.excess), met=False)

    def badness(row: Row) -> tuple[float, float]:
        if limits.error is None:
            return row.error_p90, row.cost
        return row.cost, row.error_p90

    best = min(within, key=badness)
    skips = [row for row in rows if row.setting is not None and row.setting.every]
    better = [row for row in skips if limits.holds(row) and badness(row) < badness(best)]
    return Choice(best, True, min(better, key=badness, default=None))


def _ratio(value: float, limit: float) -> float:
    if limit == 0:
        return 0.0 if value == 0 else math.inf
    return value / limit
