"""How many slots a step on a device needs, and what decides between dense and eventful."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eventful.cost.fallback import Demand
from eventful.engine.plan import ResidentPlan
from eventful.policies import SelectionParams
from eventful.tokens.packing import WORTH

_MARGIN = 1.125  # room for more tokens than passed at the last frame
_FIRST_SHARE = 0.25  # of the tokens, before a threshold's first count is known


def bucket(count: int, tokens: int, *, steady: bool = False) -> int:
    """The number of slots that serves `count` tokens: few different ones, little padding.

    Args:
        steady: the count does not change from frame to frame, so one number serves all of them.
    """
    step = 8 if tokens < 512 else 64
    while tokens >= 512 and count > 8 * step:  # beyond 512, less than a fifth is padding
        step *= 2
    step = min(step, 16) if steady else step
    return min(tokens, max(step, -(-count // step) * step))


def fitting(count: int, tokens: int) -> int:
    """The most tokens, at most `count`, that fill their slots; at least the first bucket."""
    least = bucket(1, tokens)
    while count > least and bucket(count, tokens) != count:
        count -= 1
    return max(count, least)


@dataclass(frozen=True)
class Counts:
    """What a stream's last step counted: tokens that wanted to pass, and that were let pass."""

    wanted: int
    passed: int


def _budget(params: SelectionParams, resident: ResidentPlan) -> int:
    """Most tokens that pass a gate; of a stream in a pool, those it puts in."""
    return min(params.cap + resident.forced, resident.tokens)


def _most(params: SelectionParams, resident: ResidentPlan) -> int:
    """Most tokens that pass a gate; a stream may get the whole pool but for the others' floors."""
    if not params.shared:
        return _budget(params, resident)
    pool = [one for one in resident.params if one.shared]
    most = sum(one.cap - one.floor for one in pool) + params.floor
    return min(most + resident.forced, resident.tokens)


def demand_of(resident: ResidentPlan, known: Sequence[Counts | None]) -> Demand | None:
    """What decides between dense and eventful; None where a stream's counts are not known."""
    wanted, updated = [], []
    for params, counts in zip(resident.params, known, strict=True):
        most = _budget(params, resident)
        if params.level == -math.inf:  # a fixed number, known before any step has reported
            counts = Counts(most, most)
        if counts is None:
            return None
        updated.append(min(counts.wanted, most))
        wanted.append(counts.wanted)
    return Demand.of(wanted, updated, [params.budget for params in resident.params])


def width_of(resident: ResidentPlan, known: Sequence[Counts | None], *, steady: bool) -> int:
    """Slots for the selections of a step.

    Args:
        known: what each stream's last step counted; None if that is not known.
        steady: always as many as may pass.
    """
    fixed, need = True, 1
    for params, counts in zip(resident.params, known, strict=True):
        most = _most(params, resident)
        if not params.fixed and not steady:
            share = resident.tokens * _FIRST_SHARE
            if params.shared:
                share = max(share, _budget(params, resident))
            guess = share if counts is None else counts.passed * _MARGIN
            most, fixed = min(most, math.ceil(guess)), False
        need = max(need, most)
    return bucket(min(need, resident.tokens), resident.tokens, steady=fixed)


def rows_of(
    resident: ResidentPlan, known: Sequence[Counts | None], width: int, *, steady: bool
) -> int | None:
    """Rows for the selected tokens of all streams together; None where they are better padded.

    Args:
        known, steady: see `width_of`.
        width: slots of each selection.
    """
    fixed, need = True, 0
    for params, counts in zip(resident.params, known, strict=True):
        most = _budget(params, resident)  # of a pool no more pass in all than were put in
        if not params.shared:
            most = min(most, width)
        if params.level != -math.inf and not steady and counts is not None:
            most, fixed = min(most, math.ceil(counts.passed * _MARGIN)), False
        need += most
    padded = len(resident.params) * width
    rows = bucket(min(need, padded), padded, steady=fixed)
    return rows if len(resident.params) > 1 and rows <= WORTH * padded else None
