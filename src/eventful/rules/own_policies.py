"""Selection by policies of the user's own: their `select` is called, with a context."""

from __future__ import annotations

import torch
from torch import Tensor

from eventful import ops
from eventful.errors import ConfigError
from eventful.policies import GateContext, select_by_stream
from eventful.rules.levels import Seen
from eventful.rules.refresh import refresh_turns
from eventful.rules.spec import BlockSpec
from eventful.rules.step import Step
from eventful.tokens.selection import Selection


def select_by_policies(
    step: Step, spec: BlockSpec, kind: str, errors: dict[float, Tensor], seen: Seen
) -> Selection:
    """Let each stream's policy choose, and keep what it learned.

    Args:
        errors: (B, N) error norms by order.
        seen: what the gate measured of its tokens.
    """
    gate, state = spec.gate_name(kind), step.state
    batch, tokens = next(iter(errors.values())).shape
    device = next(iter(errors.values())).device
    known, age = state.memory(gate), f"{gate}/age"
    context = GateContext(
        gate=gate,
        kind=kind,
        block=spec.index,
        frame=torch.tensor(state.frames, device=device) + 1,
        protected=_protected(step, spec, device),
        due=_due(step, spec, tokens, device),
        age=state[age] if age in state else None,  # noqa: SIM401 - a state has no `get`
        change=None if seen.sampled is None else _change(step, gate, seen.sampled),
        contrast=seen.contrast,
        memory=dict(known),
    )
    selection = select_by_stream(step.policies, errors, context)
    if not isinstance(selection, Selection) or selection.shape != (batch, tokens):
        raise ConfigError(
            f"The policy at gate {gate} must return a Selection of {batch} streams x {tokens} "
            "tokens; build it with Selection.from_mask or Selection.top."
        )
    learned = {
        name: value for name, value in context.memory.items() if value is not known.get(name)
    }
    if step.flush_any:
        # A flushing stream's error says nothing about its noise: what its policy learned is
        # dropped.
        rows = step.flush_rows(device)
        learned = {
            name: torch.where(
                rows.view(-1, *[1] * (value.dim() - 1)),
                known.get(name, torch.full_like(value, torch.nan)),
                value,
            )
            for name, value in learned.items()
        }
    state.keep_memory(gate, learned)
    return selection


def _protected(step: Step, spec: BlockSpec, device: torch.device) -> Tensor | None:
    if not step.config.protect:
        return None
    layout = step.layouts[spec.trunk]
    mask: Tensor | None = step.shared(("protected", spec.trunk), lambda: layout.protected(device))
    return mask


def _due(step: Step, spec: BlockSpec, tokens: int, device: torch.device) -> Tensor | None:
    """Tokens (B, N) whose turn to be refreshed it is; None without `max_age`."""
    if step.config.max_age is None:
        return None
    turns = refresh_turns(step, spec, device)

    def make() -> Tensor:
        turn = (torch.tensor(step.state.frames, device=device) + 1) % turns.period
        return turns.phase == turn[:, None]

    due: Tensor = step.shared(("due", turns.period, tokens), make)
    return due


def _change(step: Step, gate: str, sampled: Tensor) -> Tensor | None:
    """Frame-to-frame change of the sampled tokens (B, S), in each stream's own norm."""
    if not any(getattr(policy, "needs_change", False) for policy in step.policies):
        return None
    state, name = step.state, f"{gate}/previous"
    # A policy assigned in mid-stream has no previous frame yet; the reference stands in.
    before = ops.sample(state[f"{gate}/reference"])
    if name in state:
        before = torch.where(state[name].isnan(), before, state[name])
    orders = [policy.order for policy in step.policies]
    norms = {order: ops.error_norm(sampled, before, order) for order in set(orders)}
    return torch.stack([norms[order][stream] for stream, order in enumerate(orders)])
