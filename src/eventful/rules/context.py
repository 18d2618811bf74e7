"""Selection by context: a token counts as changed where what it attends to has changed.

Much of the error of a kept output is in tokens that did not change themselves. At a few layers
the queries of all tokens are kept; each update adds to every token the change of its attention
output that the new keys and values cause, until the token is updated itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eventful import ops
from eventful.rules.attention import GlobalAttention, swap_keys
from eventful.rules.spec import BlockSpec
from eventful.rules.step import Step

_KEPT = ("query", "lse", "change")


def attend_in_context(
    attention: GlobalAttention,
    qkv: tuple[Tensor, Tensor, Tensor],
    fresh: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Attention of the selected queries (B, M, H*d) that also follows the context.

    With a packing, queries and outputs are (1, P, H*d), and keys and values as its target is.

    Args:
        fresh: see `GlobalAttention.selected_queries`.
    """
    step, spec, chosen = attention.step, attention.spec, attention.selection
    state, (q, k, v) = step.state, qkv
    old = None
    if step.flush_all:
        state.write_all({spec.slot("key"): k, spec.slot("value"): v}, chosen)
    else:
        (k, v), old = swap_keys(attention, (k, v))
    attended, lse = attention.selected_queries_lse(q, fresh)
    if old is not None and chosen.width:
        state.open(spec.slot("change"))
        _add_context(attention, (k, v), old)
    q = attention.placed(q)
    rows = {"query": q, "lse": attention.placed(lse), "change": torch.zeros_like(q)}
    state.write_all({spec.slot(name): value for name, value in rows.items()}, attention.target)
    if step.flush_any:
        packing = attention.packing
        _keep_size(step, spec, attended if packing is None else packing.unpack(attended))
    return attended


def _add_context(
    attention: GlobalAttention, new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor]
) -> None:
    """Add what changed keys and values do to the output of every query, see `swap_keys`."""
    state, spec, packing = attention.step.state, attention.spec, attention.packing
    memory = tuple(state.raw(spec.slot(name)) for name in _KEPT)
    named = attention.context_bias()
    if packing is None or not packing.by_stream or attention.step.config.pool > 1:
        ops.add_context_(
            ops.ContextMemory(*memory), new, old, attention.keys.count, spec.scale, state.slots,
            **named,
        )  # fmt: skip
        return
    for stream, rows, index in packing.streams():
        own = slice(stream, stream + 1)
        bias: dict[str, Any] = {}
        if named:
            down, across = named["relative"]
            bias = {"relative": (down[own], across[own]), "index": index}
        ops.add_context_(
            ops.ContextMemory(*(part[own] for part in memory)),
            (new[0][:, rows], new[1][:, rows]), (old[0][:, rows], old[1][:, rows]),
            None, spec.scale, None, **bias,
        )  # fmt: skip


def _keep_size(step: Step, spec: BlockSpec, attended: Tensor) -> None:
    """Remember how large attention outputs (B, N, H*d) are in the streams that flush."""
    name = spec.slot("size")
    size = attended.float().norm(dim=-1).mean(dim=-1)
    if not step.flush_all:
        size = torch.where(step.flush_rows(size.device), size, step.state[name])
    step.state.fill(name, size, owned=True)


@dataclass(frozen=True, eq=False)
class ContextChange:
    """What the context adds to the errors at a frame gate, see `ops.frame_score`.

    Attributes:
        changes: (S, N, W) of each layer that is followed.
        sizes: (S,) of each.
        weight: of their mean.
    """

    changes: tuple[Tensor, ...] = ()
    sizes: tuple[Tensor, ...] = ()
    weight: float = 0.0

    @classmethod
    def of(cls, step: Step, spec: BlockSpec) -> ContextChange:
        """Of the trunk of a frame gate; nothing where no context is followed."""
        context, state = step.config.context, step.state
        if context is None or not spec.context:
            return cls()
        changes, sizes = (
            tuple(state.raw(f"{name}/{kind}") for name in spec.context)
            for kind in ("change", "size")
        )
        return cls(changes, sizes, context.weight)
