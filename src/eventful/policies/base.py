"""What every selection policy has: its protocol, what it may know, and its form in numbers."""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from eventful import ops
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
        contrast: (B,) how far the patches are from their mean, in the mean square.
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
    contrast: Tensor | None = None
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
            contrast=cut(self.contrast),
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


@dataclass(frozen=True)
class SelectionParams:
    """A policy as numbers: the tokens whose error is above a level, at most a cap, pass.

    Forced tokens pass on top of the cap. Policies that can be put into such numbers run on every
    device without asking the host.

    Attributes:
        level: of the error; NaN where it follows the noise.
        cap: most tokens to pass by their error.
        low, floor: where fewer than `floor` errors are above the level, those above `low` pass
            too, the largest first, until `floor` tokens pass.
        relative: `level` and `low` are multiples of the contrast of the tokens: how far the
            patches are from their mean, in the mean square.
        noise: k, momentum and inertia of a level that follows the noise; None for a fixed one.
        renewal: a stream starts over, with a dense step, once its estimated error, at most 1/32,
            times the frames since everything was recomputed is above this.
        shared: the cap is the stream's share of a pool. The streams of a step that share one pass
            as many tokens together as their caps add up to, at least `floor` in each, and the
            rest where the errors are largest relative to the contrast of their own stream.
        budget: the user chose the cap as a cost, so a stream runs dense only where the cap itself
            costs more than that. Otherwise it does where more tokens want to pass than dense is
            worth, whatever the cap.
    """

    level: float
    cap: int
    noise: tuple[float, float, float] | None = None
    budget: bool = False
    low: float = math.inf
    floor: int = 0
    relative: bool = False
    renewal: float = math.inf
    shared: bool = False

    @property
    def fixed(self) -> bool:
        """Whether the cap alone says how many tokens of the stream pass."""
        return self.level == -math.inf and not self.shared


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


def refresh_period(max_age: int, depth: int) -> int:
    """Frames between two refreshes of a token: in that many consecutive frames each is due once.

    A still video is dense again after depth + 1 rounds: one for each block's keys and values,
    one for the output. The period is short enough that they fit in depth * max_age frames.
    """
    return max(1, depth * max_age // (depth + 1))


def select_above(
    error: Tensor,
    level: float | Tensor,
    cap: int | Tensor,
    context: GateContext,
    *,
    low: Tensor | None = None,
    floor: int = 0,
) -> Selection:
    """The tokens that `SelectionParams` describe.

    `level`, `cap` and `low` may differ by stream, (B,).
    """
    forced = context.forced
    if forced is None and isinstance(level, float) and level == -math.inf:
        return Selection.top(error, cap)
    levels = torch.as_tensor(level, dtype=error.dtype, device=error.device).expand(len(error))
    caps = torch.as_tensor(cap, device=error.device).clamp_max(error.shape[1]).expand(len(error))
    least = None if low is None else torch.full_like(caps, floor)
    wanted, count = ops.wanted_tokens(error, levels, caps, forced, low, least)
    ranked = error if forced is None else error.masked_fill(forced, math.inf)
    return dataclasses.replace(Selection.top(ranked, count), wanted=wanted)
