"""Selection by context: a token counts as changed where what it attends to has changed.

Much of the error of a kept output is in tokens that did not change themselves. At a few layers
the queries of all tokens are kept; each update adds to every token the change of its attention
output that the new keys and values cause, until the token is updated itself.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    With a packing, queries and outputs are (1, P, H*d); keys and values are not packed.

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
        memory = ops.ContextMemory(*(state.raw(spec.slot(name)) for name in _KEPT))
        ops.add_context_(
            memory, (k, v), old, attention.keys.count, spec.scale, state.slots,
            **attention.context_bias(),
        )  # fmt: skip
    q = attention.spread(q)
    rows = {"query": q, "lse": attention.spread(lse), "change": torch.zeros_like(q)}
    state.write_all({spec.slot(name): value for name, value in rows.items()}, chosen)
    if step.flush_any:
        _keep_size(step, spec, attention.spread(attended))
    return attended


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
