"""Refresh in turn (`Config.max_age`): which tokens are recomputed in which frame."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eventful.policies import refresh_period
from eventful.rules.spec import BlockSpec
from eventful.rules.step import Step
from eventful.tokens.layout import TokenLayout


@dataclass(frozen=True, eq=False)
class RefreshTurns:
    """Every token is due once in `period` frames, together with those that lie around it.

    Attributes:
        phase: (N,) int32, the turn of each token, see `TokenLayout.phases`.
    """

    layout: TokenLayout
    period: int
    phase: Tensor

    @cached_property
    def _all(self) -> list[int]:
        return self._count(self.phase)

    @cached_property
    def _patches(self) -> list[int]:
        return self._count(self.phase[self.layout.prefix : self.layout.tokens - self.layout.suffix])

    def _count(self, phase: Tensor) -> list[int]:
        found: list[int] = torch.bincount(phase.cpu(), minlength=self.period).tolist()
        return found

    def counts(self, protected: bool) -> list[int]:
        """Tokens due at each turn; without special tokens where these pass anyhow."""
        return self._patches if protected else self._all


def refresh_turns(step: Step, spec: BlockSpec, device: torch.device) -> RefreshTurns:
    """The turns of the tokens of a trunk; with `max_age` only."""
    assert step.config.max_age is not None
    layout, period = step.layouts[spec.trunk], refresh_period(step.config.max_age, spec.depth)

    def make() -> RefreshTurns:
        return RefreshTurns(layout, period, layout.phases(period).to(device))

    turns: RefreshTurns = step.constant(("refresh", layout, period, device), make)
    return turns
