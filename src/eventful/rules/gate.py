"""Token gates (Section 4.1): compare with the reference, select, remember."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eventful import ops
from eventful.cost.fallback import Demand
from eventful.errors import ConfigError, NonFiniteError
from eventful.ops import sample
from eventful.policies import (
    GateContext,
    dials_of,
    refresh_period,
    running,
    select_by_stream,
)
from eventful.rules import resident
from eventful.rules.spec import BlockSpec
from eventful.rules.step import Step
from eventful.tokens.selection import Selection


def gate(
    step: Step,
    spec: BlockSpec,
    kind: str,
    x: Tensor,
    *,
    norm: Any = None,
    update: str | None = None,
) -> tuple[Tensor, Selection, Tensor]:
    """Pass tokens through a gate around an operator, and take those it lets through.

    Args:
        x: (B, N, D).
        norm: stands before the operator; the gate looks before or after it (`Config.gate`).
        update: slot of a buffer to add to the tokens first.

    Returns:
        The tokens with the update (B, N, D), the selection, and its normed tokens (B, M, D).
    """
    if step.resident is not None:
        return resident.gate(step, spec, kind, x, norm=norm, update=update)
    tokens = x if update is None else step.state.added(x, update)
    if norm is not None and step.config.gate == "after-norm":
        normed = norm(tokens)
        chosen = choose(step, spec, kind, normed)
        return tokens, chosen, chosen.gather(normed)
    chosen = choose(step, spec, kind, tokens)
    rows = chosen.gather(tokens)
    return tokens, chosen, rows if norm is None else norm(rows)


def choose(step: Step, spec: BlockSpec, kind: str, current: Tensor) -> Selection:
    """Pass tokens through a gate.

    Args:
        current: (B, N, D), the gate's input c.

    Returns:
        The tokens to recompute. The reference u is updated for them, or for all tokens
        with `reference="previous"`.
    """
    if step.resident is not None:
        return resident.choose(step, spec, kind, current)
    gate = spec.gate_name(kind)
    leading = spec.first and kind in ("qkv", "block", "frame")
    errors: dict[float, Tensor] = {}
    if not step.flush_all:
        errors = _errors(step, gate, current, leading=leading)
    if leading:
        _check_finite(current, errors)
        _flush_on_cut(step, gate, errors)
    if step.flush_all:
        selection = Selection.everything(current.shape[0], current.shape[1], current.device)
    else:
        selection = _select(step, spec, kind, current, errors)
        if leading and _runs_dense(step, selection):
            step.flush([True] * selection.batch)
            step.record.fallback = True
            selection = replace(
                Selection.everything(current.shape[0], current.shape[1], current.device),
                wanted=selection.counts if selection.wanted is None else selection.wanted,
            )
    _remember(step, gate, current, selection)
    step.record_gate(gate, selection, errors.get(step.policies[0].order))
    return selection


def _runs_dense(step: Step, selection: Selection) -> bool:
    """Whether dense is cheaper than what the leading gate chose."""
    if step.dense_if is None or step.flush_any:  # a cut in one stream says nothing of the others
        return False
    dials = (dials_of(policy, selection.tokens) for policy in step.policies)
    budget = [dial is None or dial.budget for dial in dials]
    counts = selection.counts.tolist()
    wanted = counts if selection.wanted is None else selection.wanted.tolist()
    pairs = zip(counts, wanted, budget, strict=True)
    step.demand = Demand(max(count if fixed else most for count, most, fixed in pairs), max(counts))
    return step.dense_if(step.demand)


def _errors(step: Step, gate: str, current: Tensor, *, leading: bool) -> dict[float, Tensor]:
    """Error norms by order: those the policies ask for, and L2 for scene cuts."""
    reference = step.state[f"{gate}/reference"]
    orders = {policy.order for policy in step.policies}
    if leading and step.config.scene_cut is not None:
        orders.add(2.0)
    return {order: ops.error_norm(current, reference, order) for order in sorted(orders)}


def _check_finite(current: Tensor, errors: dict[float, Tensor]) -> None:
    values = next(iter(errors.values()), current)
    if not torch.isfinite(values).all():
        raise NonFiniteError(
            "The embedded tokens contain NaN or Inf. The stream is as it was before this frame; "
            "check the decoder and the preprocessing, then go on with the next good frame."
        )


def _flush_on_cut(step: Step, gate: str, errors: dict[float, Tensor]) -> None:
    cut, slot = step.config.scene_cut, f"{gate}/scene"
    if cut is None or not errors:
        return
    error = errors[2.0]
    fresh = step.flush_rows(error.device)
    level = step.state.tensors.get(slot)
    if level is not None:
        jumped = (error > cut.factor * level[:, None]).float().mean(dim=-1) > cut.fraction
        step.flush((jumped & ~level.isnan()).tolist())
    now = running(level, sample(error).median(dim=-1).values, cut.momentum)
    before = torch.full_like(now, torch.nan) if level is None else level
    step.state.fill(slot, torch.where(fresh, before, now), owned=True)


def _select(
    step: Step, spec: BlockSpec, kind: str, current: Tensor, errors: dict[float, Tensor]
) -> Selection:
    gate = spec.gate_name(kind)
    known = step.state.memory(gate)
    context = GateContext(
        gate=gate,
        kind=kind,
        block=spec.index,
        frame=torch.tensor(step.state.frames, device=current.device) + 1,
        protected=_protected(step, spec, current.device),
        due=_due(step, spec, current),
        age=step.state.tensors.get(f"{gate}/age"),
        change=_change(step, gate, current),
        memory=dict(known),
    )
    selection = select_by_stream(step.policies, errors, context)
    if not isinstance(selection, Selection) or selection.shape != tuple(current.shape[:2]):
        raise ConfigError(
            f"The policy at gate {gate} must return a Selection of {current.shape[0]} streams "
            f"x {current.shape[1]} tokens; build it with Selection.from_mask or Selection.top."
        )
    learned = {
        name: value for name, value in context.memory.items() if value is not known.get(name)
    }
    if not step.flush_any:
        step.state.keep_memory(gate, learned)
        return selection
    # A flushing stream's error says nothing about its noise: what its policy learned is dropped.
    rows = step.flush_rows(current.device)
    for name, value in learned.items():
        before = known.get(name, torch.full_like(value, torch.nan))
        keep = rows.view(-1, *[1] * (value.dim() - 1))
        step.state.keep_memory(gate, {name: torch.where(keep, before, value)})
    return selection.with_rows(rows)


def _protected(step: Step, spec: BlockSpec, device: torch.device) -> Tensor | None:
    if not step.config.protect:
        return None
    layout = step.layouts[spec.trunk]
    mask: Tensor | None = step.shared(("protected", spec.trunk), lambda: layout.protected(device))
    return mask


def _due(step: Step, spec: BlockSpec, current: Tensor) -> Tensor | None:
    """Tokens (B, N) whose turn to be refreshed it is; None without `max_age`."""
    if step.config.max_age is None:
        return None
    period = refresh_period(step.config.max_age, spec.depth)

    def make() -> Tensor:
        turn = (torch.tensor(step.state.frames, device=current.device) + 1) % period
        return torch.arange(current.shape[1], device=current.device) % period == turn[:, None]

    due: Tensor = step.shared(("due", period, current.shape[1]), make)
    return due


def _wants_change(step: Step) -> list[bool]:
    return [bool(getattr(policy, "needs_change", False)) for policy in step.policies]


def _change(step: Step, gate: str, current: Tensor) -> Tensor | None:
    """Frame-to-frame change of the sampled tokens, in each stream's own norm."""
    if not any(_wants_change(step)):
        return None
    state, slot = step.state, f"{gate}/previous"
    # A policy assigned in mid-stream has no previous frame yet; the reference stands in.
    before = sample(state[f"{gate}/reference"])
    if slot in state:
        before = torch.where(state[slot].isnan(), before, state[slot])
    sampled = sample(current)
    orders = [policy.order for policy in step.policies]
    norms = {order: ops.error_norm(sampled, before, order) for order in set(orders)}
    return torch.stack([norms[order][stream] for stream, order in enumerate(orders)])


def _remember(step: Step, gate: str, current: Tensor, selection: Selection) -> None:
    state = step.state
    if step.config.reference == "previous":
        state.fill(f"{gate}/reference", current)
    else:
        state.write(f"{gate}/reference", selection, selection.gather(current))
    wanted = _wants_change(step)
    if any(wanted) or f"{gate}/previous" in state:
        # A sample kept past the policy that wanted it would pass for the last frame later on.
        unwanted = ~torch.tensor(wanted, device=current.device)[:, None, None]
        kept = sample(current).masked_fill(unwanted, torch.nan)
        state.fill(f"{gate}/previous", kept, owned=True)
    if step.config.max_age is not None:
        slot = f"{gate}/age"
        selected = selection.mask()
        before = state[slot] if slot in state else torch.zeros_like(selected, dtype=torch.int32)
        state.fill(slot, (before + 1).masked_fill(selected, 0), owned=True)
