"""The level that decides which errors pass a gate: fixed, relative to contrast, or to the noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eventful import ops
from eventful.memory.state import MEMORY
from eventful.policies import memory_scope, params_of
from eventful.rules.step import Gate


@dataclass(frozen=True, eq=False)
class Levels:
    """What errors at a gate are compared with, see `ops.PickRule`.

    Attributes:
        level: (B,).
        low, floor: (B,); None where no policy has them.
        contrast: (B,) of the tokens; None where nothing needs it.
        learn: stores what was measured once the report shows whose frame was good and no cut.
    """

    level: Tensor
    low: Tensor | None
    floor: Tensor | None
    contrast: Tensor | None
    learn: Callable[[], None]


@dataclass(frozen=True, eq=False)
class Seen:
    """What a gate measures of its tokens.

    Attributes:
        sampled: (B, S, D) the tokens whose change is measured; None where no policy needs it.
        contrast: (B,) of the patches; None where nothing needs it.
    """

    sampled: Tensor | None
    contrast: Tensor | None


def levels_of(this: Gate, seen: Seen, error: Tensor) -> Levels:
    """The levels in force at a gate for errors (B, N)."""
    inputs, contrast = this.inputs, seen.contrast
    level, learn = _level(this, seen.sampled, error)
    if inputs.relative is None or contrast is None:
        return Levels(level, None, None, contrast, learn)
    unit = torch.where(inputs.relative > 0, contrast, 1.0)
    return Levels(level * unit, inputs.low * unit, inputs.floor, contrast, learn)


def caps_of(this: Gate, seen: Seen, error: Tensor, forced: Tensor | None) -> Tensor:
    """(B,) most tokens to pass by their errors (B, N); of a pool, what each stream gets."""
    inputs = this.inputs
    if inputs.shared is None or seen.contrast is None:
        return inputs.cap
    pool = ops.Pool(inputs.shared, inputs.cap, inputs.floor)
    # A frame that was bad at the first gate is bad at later ones.
    sound = None if this.leading else inputs.report[:, 1] > 0
    return ops.share_out(error, seen.contrast, pool, forced, sound)


def _level(this: Gate, sampled: Tensor | None, error: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """(B,) the level in force: the policy's own, or that of the noise where it follows it.

    Returns:
        The level, and what stores it once the report shows whose frame was good and no cut.
    """
    state, inputs = this.step.state, this.inputs
    if inputs.noise is None or sampled is None:
        return inputs.level, lambda: None
    k, momentum, inertia, follows = inputs.noise
    state.ensure(this.previous, sampled)
    reference = ops.sample(state.raw(this.reference)).contiguous()
    kept = state[this.previous]
    kept = torch.where(kept.isnan(), ops.held(reference, state.slots), kept)
    level, learned = inputs.level, []
    for scope, order, rows in _noise_scopes(this, error.shape[1]):
        name = f"{this.name}{MEMORY}{scope}level"
        state.ensure(name, error[:, 0])
        before = state[name]
        now = ops.error_norm(sampled, kept, order).median(dim=-1).values
        after = ops.follow_level(before, now, inertia, momentum)
        counts = follows > 0 if rows is None else rows
        learned.append((name, before, after, counts))
        level = torch.where(counts, k * after, level)

    def learn() -> None:
        for name, before, after, counts in learned:
            sound = torch.isfinite(after) & counts & (inputs.report[:, 2] <= 0)
            if this.step.flush_any and state.reversible:
                sound = sound & ~this.step.flush_rows(sound.device)
            state.fill(name, torch.where(sound, after, before), owned=True)

    return level, learn


def _noise_scopes(this: Gate, tokens: int) -> list[tuple[str, float, Tensor | None]]:
    """The sorts of policies that follow the noise: scope of memory, norm, and streams (B,).

    With one sort the streams are None: all that follow the noise.
    """
    policies = this.step.policies
    scopes = []
    for policy in policies:
        params = params_of(policy, tokens)
        follows = params is not None and params.noise is not None
        scopes.append(memory_scope(policy) if follows else "")
    orders = {scope: p.order for scope, p in zip(scopes, policies, strict=True) if scope}
    if len(orders) == 1:
        return [(scope, order, None) for scope, order in orders.items()]
    device = this.inputs.cap.device
    return [
        (scope, order, torch.tensor([one == scope for one in scopes], device=device))
        for scope, order in sorted(orders.items())
    ]
