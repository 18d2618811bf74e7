"""What every budget has: its value, its controller, and what a controller is told."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from eventful.errors import ConfigError
from eventful.policies import Policy


class BudgetWarning(UserWarning):
    """A budget that cannot be held; the message names the nearest one that can."""


@dataclass(frozen=True)
class Facts:
    """What a stream knows of itself after its first frame.

    Attributes:
        tokens: N of a frame.
        forced: special tokens, and those refreshed in turn at each frame.
        operations: of one frame of one stream that updates so many tokens, forced ones included.
        dense_operations: of a frame that updates all of them.
        state_bytes: held for one stream.
        shared: the streams of a batch share what there is.
        fit: the most tokens, at most so many, that leave no slots of a step empty.
    """

    tokens: int
    forced: int
    operations: Callable[[int], int]
    dense_operations: int
    state_bytes: int
    shared: bool = False
    fit: Callable[[int], int] = int


@dataclass(frozen=True)
class Told:
    """What a step told, the mean or the worst over its streams.

    Attributes:
        share: of the tokens, updated.
        estimate: of the error, the largest; None where nothing estimates.
        flushed: everything was recomputed.
        paid: share of the tokens that there were slots for, which is what takes time; None for
            `share`.
    """

    share: float
    estimate: float | None
    flushed: bool
    paid: float | None = None


@dataclass(frozen=True)
class Turn:
    """What a controller wants of the next step.

    Attributes:
        policy: None for the stream's own.
        audit: recompute everything once the step is done, and compare; the stream returns the
            recomputed output.
        dense: recompute everything.
    """

    policy: Policy | None = None
    audit: bool = False
    dense: bool = False


@dataclass(frozen=True)
class BudgetReport:
    """How a budget is doing.

    Attributes:
        asked, held: what was asked for, and what is held now, in the unit of the budget; NaN where
            it is not known yet.
        unit: of both.
        share: of the tokens that may be updated now; 1 where there is no limit.
        limit: why it cannot be held, in words; "" where it can.
    """

    asked: float
    held: float
    unit: str
    share: float
    limit: str = ""

    @property
    def holding(self) -> bool:
        """Whether the budget is held, as far as is known."""
        return not self.limit

    def __str__(self) -> str:
        now = "not known yet" if math.isnan(self.held) else f"{self.held:.3g} {self.unit}".strip()
        asked = f"{self.asked:.3g} {self.unit}".strip()
        text = f"asked {asked}, now {now}, up to {self.share:.1%} of the tokens"
        return text if not self.limit else f"{text}; {self.limit}"


class Controller(ABC):
    """Holds one budget of one stream, or of a batch."""

    _warned = False

    @abstractmethod
    def turn(self) -> Turn:
        """What the next step should do."""

    def learn(self, told: Told) -> None:
        """Take in what a step told."""
        del told

    def audited(self, told: Told, error: float) -> None:
        """Take in the true error of a step that was compared with the dense model."""
        del told, error

    def timed(self, told: Told, ms: float, interval: float | None) -> None:
        """Take in the time of a step, and from the start of the one before to its own start."""
        del told, ms, interval

    @abstractmethod
    def report(self) -> BudgetReport:
        """How it is doing."""

    def _warn(self, text: str) -> None:
        """Say once that the budget cannot be held."""
        if not self._warned:
            self._warned = True
            warnings.warn(text, BudgetWarning, stacklevel=2)


class Budget(ABC):
    """Something to hold; a frozen dataclass."""

    audits = False  # its controller compares with the dense model now and then
    fallback = True  # steps may run dense where that is cheaper on this machine
    gatings: tuple[str, ...] = ("operator", "block", "frame")  # that it works with

    @abstractmethod
    def controller(self, facts: Facts) -> Controller:
        """What holds it, for one stream or one batch."""


def checked_number(name: str, value: Any, *, least: float = 0.0, example: str) -> float:
    """A number of the user's; nan, negative ones and those below `least` are refused."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or math.isnan(value) or value < least:
        raise ConfigError(f"{name} is a number >= {least:g}, e.g. {example}; got {value!r}.")
    return float(value)


def checked_share(name: str, value: Any) -> None:
    """A share of the tokens."""
    if checked_number(name, value, example="0.02") > 1:
        raise ConfigError(f"{name} is a share of the tokens, at most 1; got {value!r}.")
