"""A budget that changes in the course of a video (the paper's first figure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eventful.errors import ConfigError
from eventful.policies import Policy, TopFraction, TopR


@dataclass(frozen=True)
class Budget:
    """Tokens to update from a frame on.

    Attributes:
        start: first frame it holds for.
        r: number of tokens; None for a share of them.
        fraction: share of the tokens.
    """

    start: int
    r: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        assert self.policy is not None  # raises for invalid values

    @property
    def policy(self) -> Policy:
        """The policy with this budget."""
        return TopR(self.r) if self.r is not None else TopFraction(self.fraction or 0.0)

    @property
    def text(self) -> str:
        """As text, e.g. `512` or `12%`."""
        return f"r = {self.r}" if self.r is not None else f"{self.fraction:.0%} of tokens"


def parse_budget(text: str, start: int = 0) -> Budget:
    """`512`, or `12%` of the tokens."""
    number = text.strip()
    try:
        if number.endswith("%"):
            made = Budget(start, fraction=float(number[:-1]) / 100)
        else:
            made = Budget(start, r=int(number))
        return made
    except ValueError:
        raise ConfigError(
            f"A budget is a number of tokens or a percentage of them, 512 or 12%: {text!r}."
        ) from None


def parse_schedule(text: str) -> tuple[Budget, ...]:
    """`0:512,40:128`: 512 tokens from frame 0 on, 128 from frame 40 on."""
    budgets = []
    for part in text.split(","):
        start, colon, amount = part.strip().partition(":")
        if not colon or not start.strip().isdigit():
            raise ConfigError(f"A schedule reads like 0:512,40:128, frame:tokens; got {part!r}.")
        budgets.append(parse_budget(amount, int(start)))
    starts = [budget.start for budget in budgets]
    if starts[0] != 0 or starts != sorted(set(starts)):
        raise ConfigError(f"A schedule starts at frame 0 and goes on in order, got {starts}.")
    return tuple(budgets)


def budget_at(schedule: Sequence[Budget], frame: int) -> Budget | None:
    """The budget in force at a frame; None without a schedule."""
    return next((budget for budget in reversed(schedule) if budget.start <= frame), None)
