"""Gates of a step that never asks the host: counts, cuts and checks stay on the device.

The choice is that of `gating`, expressed as numbers (`policies.Dials`): the tokens above a
level, at most a cap, forced ones first. What the host has to know arrives one frame later.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eventful import ops
from eventful.memory.slots import SlotState
from eventful.memory.state import MEMORY
from eventful.ops import sample
from eventful.policies import NoiseThreshold, memory_scope, refresh_period
from eventful.rules.spec import BlockSpec, is_layer_norm
from eventful.rules.step import Resident, Step
from eventful.tokens.selection import Selection

UNCOUNTED = -1  # in a report: a flush has no memory to count the wanted tokens against


def choose(step: Step, spec: BlockSpec, kind: str, current: Tensor) -> Selection:
    """Pass tokens (B, N, D) through a gate; see `gating.choose`."""
    assert step.resident is not None
    assert isinstance(step.state, SlotState)
    gate = spec.gate_name(kind)
    leading = spec.first and kind in ("qkv", "block", "frame")
    error = None
    if step.flush_all:
        wanted = None
        if leading and step.resident.dense:
            # Counted against the memory that is about to be overwritten: the next step may be
            # eventful again.
            error = ops.error_norm(
                current, step.state.raw(f"{gate}/reference"), 2.0, step.state.slots
            )
            wanted = _select(step, spec, gate, sample(current), error, leading=True).wanted
        selection = _everything(step, current, wanted, leading=leading)
    else:
        error = ops.error_norm(current, step.state.raw(f"{gate}/reference"), 2.0, step.state.slots)
        selection = _select(step, spec, gate, sample(current), error, leading=leading)
    step.state.write(f"{gate}/reference", selection, selection.gather(current))
    _remember(step, gate, sample(current))
    step.record_gate(gate, selection, error)
    if leading:
        step.resident.gated()
    return selection


def gate(
    step: Step,
    spec: BlockSpec,
    kind: str,
    x: Tensor,
    *,
    norm: Any = None,
    update: str | None = None,
) -> tuple[Tensor, Selection, Tensor]:
    """See `gating.gate`. At a projection, `x` is a memory (S, N, D) read at the streams' slots."""
    resident, state = _parts(step)
    slots, name = _slots(state), spec.gate_name(kind)
    leading, stored = spec.first and kind in ("qkv", "frame"), kind == "projection"
    after = step.config.gate == "after-norm" and norm is not None
    before = None if update is None else state.raw(update)
    numbers = ops.LayerNorm(norm.weight, norm.bias, norm.eps) if is_layer_norm(norm) else None
    if step.flush_all or (after and numbers is None):
        tokens = ops.take_slots(x, slots).to(resident.kind) if stored else x
        tokens = tokens if update is None else state.added(tokens, update)
        seen = norm(tokens) if after else tokens
        selection = choose(step, spec, kind, seen)
        rows = selection.gather(seen)
        return tokens, selection, rows if after or norm is None else norm(rows)
    reference, seen_norm = state.raw(f"{name}/reference"), numbers if after else None
    tokens, error = ops.gate_error(x, reference, slots, seen_norm, before, stored)
    sampled = None
    if resident.noise is not None or f"{name}/previous" in state:
        sampled = sample(tokens)
        sampled = ops.take_slots(sampled.contiguous(), slots) if stored else sampled
        sampled = sampled.to(reference.dtype)
        sampled = sampled if seen_norm is None else seen_norm.apply(sampled)
    selection = _select(step, spec, name, sampled, error, leading=leading)
    assert selection.count is not None
    rows = ops.gate_rows(
        tokens, reference, selection.index, selection.count, slots, seen_norm, stored
    )
    _remember(step, name, sampled)
    step.record_gate(name, selection, error)
    if leading:
        resident.gated()
    return tokens, selection, rows if after or norm is None else norm(rows)


def _slots(state: SlotState) -> Tensor:
    assert state.slots is not None
    return state.slots


def _everything(step: Step, current: Tensor, wanted: Tensor | None, *, leading: bool) -> Selection:
    """All tokens, of the streams whose frame is finite; none of the others.

    Args:
        wanted: (B,) tokens that wanted to pass; None where there was nothing to compare with.
    """
    resident, state = _parts(step)
    batch, tokens = current.shape[:2]
    if leading:
        resident.kind = current.dtype
    if leading and wanted is None:
        finite = torch.isfinite(current).flatten(1).all(dim=1)
        state.good = finite
        resident.report.fill_(UNCOUNTED)
        resident.report[:, 1] = finite
        resident.report[:, 2] = 0
    assert state.good is not None
    index = torch.arange(tokens, device=current.device).expand(batch, tokens)
    return Selection(index, tokens, state.good * tokens, whole=True, wanted=wanted)


def _select(
    step: Step, spec: BlockSpec, gate: str, now: Tensor | None, error: Tensor, *, leading: bool
) -> Selection:
    """Choose by the errors (B, N); `now` is the sample of this frame, for the noise."""
    resident, state = _parts(step)
    layout, config = step.layouts[spec.trunk], step.config
    scene = None
    if leading and config.scene_cut is not None:
        state.ensure(f"{gate}/scene", error[:, 0])
        scene = state.raw(f"{gate}/scene")
    cut = config.scene_cut
    rule = ops.PickRule(
        level=_level(step, gate, now, error),
        cap=resident.cap,
        prefix=layout.prefix if config.protect else 0,
        suffix=layout.suffix if config.protect else 0,
        period=None if config.max_age is None else refresh_period(config.max_age, spec.depth),
        turn=resident.turn,
        leading=leading,
        scene=scene,
        cut=None if cut is None else (cut.factor, cut.fraction, cut.momentum),
        slots=state.slots,
    )
    picked = ops.pick(error, rule, 1 if resident.dense else resident.width, resident.report)
    wanted = None
    if leading:
        state.good = resident.report[:, 1] > 0
        wanted = resident.report[:, 0].clone()  # the next step writes the report again
    return Selection(picked.index, error.shape[1], picked.count, picked.places, wanted=wanted)


def _level(step: Step, gate: str, now_sample: Tensor | None, error: Tensor) -> Tensor:
    """(B,) the level in force: the policy's own, or that of the noise where it follows it."""
    resident, state = _parts(step)
    if resident.noise is None or now_sample is None:
        return resident.level
    k, momentum, inertia, follows = resident.noise
    previous, slot = f"{gate}/previous", gate + MEMORY + memory_scope(NoiseThreshold()) + "level"
    state.ensure(slot, error[:, 0])
    state.ensure(previous, now_sample)
    kept, before = state[previous], state[slot]
    held = ops.take_slots(sample(state.raw(f"{gate}/reference")).contiguous(), _slots(state))
    kept = torch.where(kept.isnan(), held, kept)
    now = ops.error_norm(now_sample, kept, 2.0).median(dim=-1).values
    kept_share = torch.where(now > before, inertia, momentum)
    after = torch.where(before.isnan(), now, now + kept_share * (before - now))
    sound = torch.isfinite(after) & (follows > 0)
    state.fill(slot, torch.where(sound, after, before))
    return torch.where(follows > 0, k * after, resident.level)


def _remember(step: Step, gate: str, now: Tensor | None) -> None:
    """Keep the sample of this frame that the next one's noise is measured against."""
    resident, state = _parts(step)
    name = f"{gate}/previous"
    if now is None or (resident.noise is None and name not in state):
        return
    follows = None if resident.noise is None else resident.noise[3] > 0
    if follows is None:
        now = torch.full_like(now, torch.nan)
    else:
        now = torch.where(follows[:, None, None], now, torch.nan)
    state.fill(name, now)


def _parts(step: Step) -> tuple[Resident, SlotState]:
    assert step.resident is not None
    assert isinstance(step.state, SlotState)
    return step.resident, step.state
