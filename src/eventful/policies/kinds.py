"""The policies of this package."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from eventful import ops
from eventful.errors import ConfigError
from eventful.policies.base import GateContext, SelectionParams, select_above
from eventful.tokens.selection import Selection


def _check_order(order: float) -> None:
    if isinstance(order, bool) or not isinstance(order, int | float) or not order > 0:
        raise ConfigError(f"The order of the error norm is a number > 0 (2 is L2), got {order!r}.")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} must be a number, e.g. 0.5; got {value!r}.")


def _check_fraction(name: str, value: float) -> None:
    _check_number(name, value)
    if not 0.0 <= value <= 1.0:
        raise ConfigError(
            f"{name} must lie in [0, 1], got {value!r}; for a number of tokens use TopR."
        )


@dataclass(frozen=True)
class TopR:
    """The r tokens with the largest error: fixed cost. More than N means all.

    Special tokens and tokens due for a refresh (`Config.protect`, `Config.max_age`) come on top.
    """

    r: int
    order: float = 2.0

    def __post_init__(self) -> None:
        _check_order(self.order)
        if isinstance(self.r, bool) or not isinstance(self.r, int) or self.r < 0:
            raise ConfigError(
                f"TopR needs a whole number of tokens >= 0, got {self.r!r}; e.g. TopR(256). For a "
                "share of the tokens use TopFraction."
            )

    def select(self, error: Tensor, context: GateContext) -> Selection:
        """See `Policy`."""
        return select_above(error, -math.inf, self.r, context)

    def params(self, tokens: int) -> SelectionParams:
        """See `SelectionParams`."""
        return SelectionParams(-math.inf, min(self.r, tokens), budget=True)


@dataclass(frozen=True)
class TopFraction:
    """The floor(fraction * N) tokens with the largest error, and those on top (see `TopR`)."""

    fraction: float
    order: float = 2.0

    def __post_init__(self) -> None:
        _check_order(self.order)
        _check_fraction("TopFraction", self.fraction)

    def select(self, error: Tensor, context: GateContext) -> Selection:
        """See `Policy`."""
        return select_above(error, -math.inf, self.params(error.shape[-1]).cap, context)

    def params(self, tokens: int) -> SelectionParams:
        """See `SelectionParams`."""
        return SelectionParams(-math.inf, _share(self.fraction, tokens), budget=True)


def _share(fraction: float, tokens: int) -> int:
    """floor(fraction * N); the nudge keeps 0.29 * 100 from being 28.999... and then 28."""
    return int(fraction * tokens + 1e-9)


@dataclass(frozen=True)
class Shared:
    """One number of tokens for all streams of a step, spent where the scenes change most.

    Each stream of a batch with this policy puts floor(fraction * N) tokens into one pool. Of the
    tokens of all these streams those pass whose errors are the largest, each relative to the
    contrast of its own stream. A stream gets its best ceil(floor * N) tokens in any case, but no
    more than it put in for that reason. Tokens on top (see `TopR`) are not taken from the pool.
    Alone, a stream selects as `TopFraction(fraction)` does.

    A stream without contrast (a picture of one colour), or with less than a thousandth of that of
    another, keeps to its own tokens. So does each stream where a policy that has no `params` is in
    the same step.

    Attributes:
        fraction: share of the tokens of a stream that it puts into the pool.
        floor: share of its tokens that a stream gets in any case.
    """

    fraction: float
    floor: float = 0.02
    order: float = 2.0

    def __post_init__(self) -> None:
        _check_order(self.order)
        _check_fraction("Shared's fraction", self.fraction)
        _check_fraction("Shared's floor", self.floor)

    def select(self, error: Tensor, context: GateContext) -> Selection:
        """See `Policy`."""
        params = self.params(error.shape[-1])
        cap = torch.full((len(error),), params.cap, device=error.device)
        if context.contrast is not None:
            pool = ops.Pool(torch.ones_like(cap), cap, torch.full_like(cap, params.floor))
            cap = ops.share_out(error, context.contrast, pool, context.forced)
        return select_above(error, -math.inf, cap, context)

    def params(self, tokens: int) -> SelectionParams:
        """See `SelectionParams`."""
        share = _share(self.fraction, tokens)
        floor = min(share, math.ceil(self.floor * tokens))
        return SelectionParams(-math.inf, share, budget=True, floor=floor, shared=True)


@dataclass(frozen=True)
class Threshold:
    """Every token whose error exceeds h: cost follows the scene.

    `h` may be a mapping from gate to threshold. A gate is looked up by its full name
    (`blocks.3.qkv`), then by its kind (`qkv`), then under `default`.
    """

    h: float | Mapping[str, float]
    order: float = 2.0

    def __post_init__(self) -> None:
        _check_order(self.order)
        values = list(self.h.values()) if isinstance(self.h, Mapping) else [self.h]
        if not values or not all(isinstance(value, int | float) and value >= 0 for value in values):
            raise ConfigError(
                f"Threshold needs a number h >= 0, or one for every gate, got {self.h!r}."
            )

    def level(self, context: GateContext) -> float:
        """The threshold in force at this gate."""
        if not isinstance(self.h, Mapping):
            return self.h
        for key in (context.gate, context.kind, "default"):
            if key in self.h:
                return self.h[key]
        raise ConfigError(
            f"Threshold has no value for gate {context.gate!r}: add it, its kind "
            f"{context.kind!r}, or 'default' to the mapping."
        )

    def select(self, error: Tensor, context: GateContext) -> Selection:
        """See `Policy`."""
        return select_above(error, float(self.level(context)), error.shape[-1], context)

    def params(self, tokens: int) -> SelectionParams | None:
        """See `SelectionParams`; thresholds by gate have none."""
        return None if isinstance(self.h, Mapping) else SelectionParams(float(self.h), tokens)


_CEILING = 0.5  # share of the tokens in an eventful step, where the user names none
_SCENE_CEILING = 0.125  # the same where motion and context say which tokens matter


@dataclass(frozen=True)
class NoiseThreshold:
    """Every token whose error exceeds k times the noise, which is measured as it runs.

    The noise of a stream is the running median over tokens of the frame-to-frame change,
    so one k serves every camera. The level falls fast and rises slowly, so that motion of most
    tokens does not soon pass for noise; a camera that never rests needs a `Threshold` or
    `TopFraction`.

    Attributes:
        k: threshold in units of the running median.
        max_fraction: ceiling on the share of tokens selected by their error. None is half of the
            tokens in an eventful step, and a dense step where so many want to pass that dense
            is cheaper. A number is a budget: a stream keeps to it.
        momentum: share of the old level kept at each frame while it falls.
        inertia: the same while it rises.
    """

    k: float = 2.5
    max_fraction: float | None = None
    momentum: float = 0.9
    inertia: float = 0.995
    order: float = 2.0
    needs_change = True

    def __post_init__(self) -> None:
        _check_order(self.order)
        if self.max_fraction is not None:
            _check_fraction("max_fraction", self.max_fraction)
        for name in ("k", "momentum", "inertia"):
            _check_number(f"NoiseThreshold's {name}", getattr(self, name))
        kept = (self.momentum, self.inertia)
        if not self.k >= 0 or not all(0.0 <= share < 1.0 for share in kept):
            raise ConfigError(
                "NoiseThreshold needs k >= 0, and momentum and inertia in [0, 1); got "
                f"{self.k}, {self.momentum}, {self.inertia}."
            )

    def select(self, error: Tensor, context: GateContext) -> Selection:
        """See `Policy`."""
        level = self._track(context)
        return select_above(error, self.k * level, self.params(error.shape[-1]).cap, context)

    def params(self, tokens: int) -> SelectionParams:
        """See `SelectionParams`."""
        share = _CEILING if self.max_fraction is None else self.max_fraction
        noise = (self.k, self.momentum, self.inertia)
        return SelectionParams(
            math.nan, math.ceil(share * tokens), noise, self.max_fraction is not None
        )

    def _track(self, context: GateContext) -> Tensor:
        if context.change is None:
            raise ConfigError("NoiseThreshold needs the gate to measure the frame-to-frame change.")
        now = context.change.median(dim=-1).values
        before = context.memory.get("level", torch.full_like(now, math.nan))
        level = ops.follow_level(before, now, *now.new_tensor([self.inertia, self.momentum]))
        context.memory["level"] = level
        return level


@dataclass(frozen=True)
class FollowScene:
    """Tokens that changed and tokens that look at them: the cost follows the scene.

    Errors are compared with the contrast of the picture, so one setting serves every camera, and
    neither noise, nor repeated frames, nor motion at the start must be learned first. Where little
    changes, the largest small changes are updated too, up to a floor.

    Attributes:
        level: errors above this multiple of the contrast pass. The contrast is how far the
            embedded patches are from their mean, in the mean square.
        low: smaller errors than this multiple of the contrast never pass.
        floor: share of the tokens up to which errors between `low` and `level` pass.
        max_fraction: ceiling on the share of tokens selected by their error. None is an eighth of
            the tokens in an eventful step, and a dense step where so many want to pass that dense
            is cheaper. A number is a budget: a stream keeps to it.
        renewal: start over, with a dense step, once the estimated error (`StepRecord.estimate`), at
            most 1/32, times the frames since everything was recomputed is above this. Tokens that
            are updated one by one see the old state of the others, so a dense step now and then
            removes errors that no selection does. Infinity, or None, never starts over, nor does a
            stream with a budget.
    """

    level: float = 0.6
    low: float = 0.05
    floor: float = 0.02
    max_fraction: float | None = None
    renewal: float | None = 0.375
    order: float = 2.0

    def __post_init__(self) -> None:
        _check_order(self.order)
        if self.renewal is None:  # files can hold infinity
            object.__setattr__(self, "renewal", math.inf)
        for name in ("level", "low", "renewal"):
            _check_number(f"FollowScene's {name}", getattr(self, name))
        _check_fraction("floor", self.floor)
        if self.max_fraction is not None:
            _check_fraction("max_fraction", self.max_fraction)
        if not 0 <= self.low <= self.level:
            raise ConfigError(
                f"FollowScene needs 0 <= low <= level; got {self.low!r} and {self.level!r}."
            )
        if self.renewal is not None and not self.renewal > 0:
            raise ConfigError(f"FollowScene's renewal is > 0 or None; got {self.renewal!r}.")

    def select(self, error: Tensor, context: GateContext) -> Selection:
        """See `Policy`."""
        if context.contrast is None:
            raise ConfigError("FollowScene needs the gate to measure the contrast of its tokens.")
        params = self.params(error.shape[-1])
        return select_above(
            error, self.level * context.contrast, params.cap, context,
            low=self.low * context.contrast, floor=params.floor,
        )  # fmt: skip

    def params(self, tokens: int) -> SelectionParams:
        """See `SelectionParams`."""
        budget = self.max_fraction is not None
        share = max(_SCENE_CEILING, self.floor) if self.max_fraction is None else self.max_fraction
        return SelectionParams(
            self.level,
            math.ceil(share * tokens - 1e-9),
            budget=budget,
            renewal=math.inf if self.renewal is None or budget else self.renewal,
            low=self.low,
            floor=math.ceil(self.floor * tokens),
            relative=True,
        )


@dataclass(frozen=True)
class Always:
    """Every token, every frame: the dense model, through the eventful path."""

    order: float = 2.0

    def __post_init__(self) -> None:
        _check_order(self.order)

    def select(self, error: Tensor, context: GateContext) -> Selection:
        """See `Policy`."""
        return Selection.everything(error.shape[0], error.shape[1], error.device)

    def params(self, tokens: int) -> SelectionParams:
        """See `SelectionParams`."""
        return SelectionParams(-math.inf, tokens, budget=True)
