"""A limit on the operations of a frame: worked out from the shapes, nothing is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eventful.budget.base import (
    Budget,
    BudgetReport,
    Controller,
    Facts,
    Turn,
    checked_number,
)
from eventful.errors import ConfigError
from eventful.policies import Policy, Shared, TopR


@dataclass(frozen=True)
class OperationsBudget(Budget):
    """Spends so many operations on each frame after the first, in the blocks.

    Give one of the two. From the dense model's operations on everything is recomputed; 0 only
    refreshes tokens in turn. In a batch all streams share the tokens.

    Attributes:
        share: of the dense model's operations.
        gmacs: multiply-accumulates a frame, in billions.
    """

    share: float | None = None
    gmacs: float | None = None

    fallback = False  # the number of operations may not depend on measured times

    def __post_init__(self) -> None:
        if (self.share is None) == (self.gmacs is None):
            raise ConfigError("OperationsBudget takes one of share and gmacs, e.g. share=0.2.")
        name, value = ("share", self.share) if self.gmacs is None else ("gmacs", self.gmacs)
        checked_number(f"The {name} of an OperationsBudget", value, example="0.2")

    def controller(self, facts: Facts) -> Controller:
        """See `Budget`."""
        dense = facts.dense_operations
        limit = self.gmacs * 1e9 if self.gmacs is not None else (self.share or 0.0) * dense
        return OperationsController(limit, facts, self)


class OperationsController(Controller):
    """Holds a number of tokens that was worked out once."""

    def __init__(self, limit: float, facts: Facts, budget: OperationsBudget) -> None:
        self._facts, self._relative = facts, budget.gmacs is None
        self._unit = "of the dense operations" if self._relative else "GMAC"
        self._asked = limit
        count = most_tokens(limit, facts)
        self._tokens = max(count, facts.forced)
        self._limit = ""
        if count < facts.forced and limit > 0:
            least = self._shown(facts.operations(facts.forced))
            self._limit = f"special tokens and the refresh in turn alone need {least:.3g}"
            self._warn(
                f"{budget} cannot be held: {self._limit} {self._unit}, which is the nearest "
                "possible. A larger Config.max_age refreshes less."
            )

    def _shown(self, operations: float) -> float:
        return operations / (self._facts.dense_operations if self._relative else 1e9)

    def turn(self) -> Turn:
        """See `Controller`."""
        if self._tokens >= self._facts.tokens:
            return Turn(dense=True)
        return Turn(self._policy())

    def _policy(self) -> Policy:
        facts, free = self._facts, self._tokens - self._facts.forced
        if facts.shared and free > 0:
            return Shared(free / facts.tokens, floor=min(0.02, free / facts.tokens / 2))
        return TopR(free)

    def report(self) -> BudgetReport:
        """See `Controller`."""
        facts = self._facts
        dense = self._tokens >= facts.tokens
        held = facts.dense_operations if dense else facts.operations(self._tokens)
        share = self._tokens / facts.tokens
        asked = math.inf if math.isinf(self._asked) else self._shown(self._asked)
        return BudgetReport(asked, self._shown(held), self._unit, share, self._limit)


def most_tokens(limit: float, facts: Facts) -> int:
    """The most tokens whose update costs no more than `limit`; -1 if not even none does."""
    if limit >= facts.dense_operations:
        return facts.tokens
    low, high = -1, facts.tokens  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        if facts.operations(middle) <= limit:
            low = middle
        else:
            high = middle
    return low
