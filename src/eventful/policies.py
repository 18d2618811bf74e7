"""Selection policies (Section 4.3): from the error at a gate to the tokens that pass it."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from eventful import ops
from eventful.errors import ConfigError
from eventful.tokens.selection import Selection


@dataclass
class GateContext:
    """What a policy may know besides the error.

    Attributes:
        gate: full name of the gate, e.g. `blocks.3.qkv`.
        kind: `qkv`, `projection`, `mlp`, `block` or `frame`.
        block: index of the block in its model.
        frame: (B,) frames since each stream's last flush.
        protected: (N,) tokens always to be selected; None if there are none.
        due: (B, N) tokens whose refresh is due now (`Config.max_age`); None without one.
        age: (B, N) frames since each token's last update; kept where `max_age` is set.
        change: (B, S) norm of the frame-to-frame change of a sample of the tokens, for
            policies that set `needs_change`; None for others.
        memory: floating-point values (B, ...) that the policy keeps from frame to frame at
            this gate; NaN for a stream that has none yet. Assign new tensors, never write
            one in place.
    """

    gate: str
    kind: str
    block: int
    frame: Tensor
    protected: Tensor | None = None
    due: Tensor | None = None
    age: Tensor | None = None
    change: Tensor | None = None
    memory: dict[str, Tensor] = field(default_factory=dict)

    @property
    def forced(self) -> Tensor | None:
        """(B, N) tokens that must be selected whatever their error; None if there are none."""
        if self.due is None:
            return None if self.protected is None else self.protected.expand(len(self.frame), -1)
        return self.due if self.protected is None else self.due | self.protected

    def row(self, stream: int) -> GateContext:
        """The context of one stream of the batch."""
        part = slice(stream, stream + 1)

        def cut(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[part]

        return dataclasses.replace(
            self,
            frame=self.frame[part],
            due=cut(self.due),
            age=cut(self.age),
            change=cut(self.change),
            memory={name: value[part] for name, value in self.memory.items()},
        )


@runtime_checkable
class Policy(Protocol):
    """Anything with an `order` and a `select`: a frozen dataclass, if it is to be snapshotted.

    It must not change once a stream has it: a step may go on with what it said before. Assign
    another policy instead.
    """

    @property
    def order(self) -> float:
        """Order of the norm that turns a token's error vector into a number."""

    def select(self, error: Tensor, context: GateContext) -> Selection:
        """Choose tokens from the error norms (B, N)."""


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
class SelectionParams:
    """A policy as numbers: the tokens whose error is above a level, at most a cap, pass.

    Forced tokens pass on top of the cap. Policies that can be put into such numbers run on every
    device without asking the host.

    Attributes:
        level: of the error; NaN where it follows the noise.
        cap: most tokens to pass by their error.
        noise: k, momentum and inertia of a level that follows the noise; None for a fixed one.
        budget: the user chose the cap as a cost, so a stream runs dense only where the cap itself
            costs more than that. Otherwise it does where more tokens want to pass than dense is
            worth, whatever the cap.
    """

    level: float
    cap: int
    noise: tuple[float, float, float] | None = None
    budget: bool = False


def params_of(policy: Policy, tokens: int) -> SelectionParams | None:
    """A policy's parameters for N tokens; None if its `select` must be called.

    A subclass with a `select` of its own and inherited `params` is not described by them.
    """
    for cls in type(policy).__mro__:
        if "params" in vars(cls):
            found: SelectionParams | None = policy.params(tokens)  # type: ignore[attr-defined]
            return found
        if "dials" in vars(cls):
            warnings.warn(
                f"{cls.__name__}.dials is now called params.", DeprecationWarning, stacklevel=2
            )
            found = policy.dials(tokens)  # type: ignore[attr-defined]
            return found
        if "select" in vars(cls):
            return None
    return None


def __getattr__(name: str) -> Any:
    """Old names."""
    if name == "Dials":
        warnings.warn("Dials is now SelectionParams.", DeprecationWarning, stacklevel=2)
        return SelectionParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def refresh_period(max_age: int, depth: int) -> int:
    """Frames between two refreshes of a token: in that many consecutive frames each is due once.

    A still video is dense again after depth + 1 rounds: one for each block's keys and values,
    one for the output. The period is short enough that they fit in depth * max_age frames.
    """
    return max(1, depth * max_age // (depth + 1))


def select_above(error: Tensor, level: float | Tensor, cap: int, context: GateContext) -> Selection:
    """The tokens that `SelectionParams` describe; `level` may differ by stream, (B,)."""
    forced = context.forced
    if forced is None and isinstance(level, float) and level == -math.inf:
        return Selection.top(error, cap)
    levels = torch.as_tensor(level, dtype=error.dtype, device=error.device).expand(len(error))
    caps = torch.full((len(error),), min(cap, error.shape[1]), device=error.device)
    wanted, count = ops.wanted_tokens(error, levels, caps, forced)
    ranked = error if forced is None else error.masked_fill(forced, math.inf)
    return dataclasses.replace(Selection.top(ranked, count), wanted=wanted)


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
        # The nudge keeps 0.29 * 100 from being 28.999...: a float's floor is not the decimal's.
        return SelectionParams(-math.inf, int(self.fraction * tokens + 1e-9), budget=True)


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


_REGISTRY: dict[str, type[Any]] = {
    cls.__name__: cls for cls in (TopR, TopFraction, Threshold, NoiseThreshold, Always)
}


def register_policy(cls: type[Any]) -> type[Any]:
    """Make a user's policy known by its class name, so that configs and snapshots can name it."""
    if not dataclasses.is_dataclass(cls):
        raise ConfigError(f"{cls.__name__} must be a (frozen) dataclass to be written down.")
    _REGISTRY[cls.__name__] = cls
    return cls


def policy_to_dict(policy: Policy) -> dict[str, Any]:
    """A policy as plain data: its class name and its fields, but for those that are None."""
    name = type(policy).__name__
    if _REGISTRY.get(name) is not type(policy):
        raise ConfigError(f"Policy {name} is unknown; decorate it with @eventful.register_policy.")
    values = {f.name: getattr(policy, f.name) for f in dataclasses.fields(_REGISTRY[name])}
    plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    return {"policy": name, **{k: v for k, v in plain.items() if v is not None}}


def policy_from_dict(data: Mapping[str, Any]) -> Policy:
    """The inverse of `policy_to_dict`."""
    fields = dict(data)
    name = fields.pop("policy", None)
    if name not in _REGISTRY:
        raise ConfigError(f"Unknown policy {name!r}; known: {', '.join(sorted(_REGISTRY))}.")
    try:
        policy: Policy = _REGISTRY[name](**fields)
    except TypeError as error:
        raise ConfigError(f"Policy {name}: {error}.") from None
    return policy


def memory_scope(policy: Policy) -> str:
    """Prefix of a policy's memory: policies of another kind, or another norm, never share it."""
    return f"{type(policy).__name__}@{policy.order:g}/"


def select_by_stream(
    policies: list[Policy], error_of: Mapping[float, Tensor], context: GateContext
) -> Selection:
    """Let each stream of a batch choose by its own policy.

    Args:
        policies: one per stream.
        error_of: error norms (B, N) by order of the norm.
        context: of the whole batch; its memory, by scope, is updated.
    """
    first = policies[0]
    if all(policy is first or policy == first for policy in policies):
        part = _scoped(context, memory_scope(first))
        selection = first.select(error_of[first.order], part)
        context.memory.update(_named(memory_scope(first), part.memory))
        return selection
    masks: list[Tensor] = []
    wanted: list[Tensor] = []
    learned: list[dict[str, Tensor]] = []
    for stream, policy in enumerate(policies):
        part = _scoped(context.row(stream), memory_scope(policy))
        selection = policy.select(error_of[policy.order][stream : stream + 1], part)
        masks.append(selection.mask())
        wanted.append(selection.counts if selection.wanted is None else selection.wanted)
        learned.append(_named(memory_scope(policy), part.memory))
    for name in {key for memory in learned for key in memory}:
        example = next(memory[name] for memory in learned if name in memory)
        blank = torch.full_like(example, math.nan)
        context.memory[name] = torch.cat([memory.get(name, blank) for memory in learned])
    return dataclasses.replace(Selection.from_mask(torch.cat(masks)), wanted=torch.cat(wanted))


def _scoped(context: GateContext, scope: str) -> GateContext:
    own = {k.removeprefix(scope): v for k, v in context.memory.items() if k.startswith(scope)}
    return dataclasses.replace(context, memory=own)


def _named(scope: str, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {scope + name: value for name, value in memory.items()}
