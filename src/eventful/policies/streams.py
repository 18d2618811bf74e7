"""One policy for each stream of a batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from eventful.policies.base import GateContext, Policy
from eventful.tokens.selection import Selection


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
