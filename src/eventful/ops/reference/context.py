"""Selection by context in plain PyTorch: what changed keys do to the attention of other tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eventful.ops.reference.attention import attend_partial
from eventful.ops.reference.rows import held, join_heads, split_heads


@dataclass(frozen=True, eq=False)
class ContextMemory:
    """What selection by context keeps of one attention, a row per slot.

    Attributes:
        query: (S, N, H*d).
        lse: (S, N, H) fp32, log-sum-exp of a query's logits when it was last computed.
        change: (S, N, H*d), sum of the changes of the attention output that other tokens caused
            since then.
    """

    query: Tensor
    lse: Tensor
    change: Tensor

    @property
    def heads(self) -> int:
        """H."""
        return self.lse.shape[-1]


def add_context_(
    memory: ContextMemory,
    new: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor],
    count: Tensor | None,
    scale: float,
    slots: Tensor | None,
    relative: tuple[Tensor, Tensor] | None = None,
    index: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Add to `memory.change` what changed keys and values do to the output of every query.

    With the log-sum-exp L of a query as it was remembered, the changed keys have the part
    p = sum_j exp(s_j - L) v_j of its output. The change is p of the new keys less p of the old
    ones. Where the weights exp(s_j - L) sum to more than one, p is divided by that sum. The
    arithmetic is fp32. A stream without changed keys is left bit for bit as it was.

    Args:
        memory: `change` is written.
        new, old: keys and values (B, J, H*d) of the changed tokens, as they are and as they were.
        count: (B,) changed tokens of each stream; the other slots are padding. None if all count.
        slots: (B,) row of the memory that belongs to each stream; None if row b does.
        relative: relative position of all queries in two parts, (B, N, H, kh) and (B, N, H, kw)
            (see `relative_logits`).
        index: (B, J) places of the changed keys in the kh x kw grid; needed with `relative`.
        bias: (B, H, N, J) added to the logits, instead of `relative`.
    """
    batch, taken = new[0].shape[:2]
    if taken == 0:
        return
    device, heads = new[0].device, memory.heads
    count = torch.full((batch,), taken, device=device) if count is None else count
    valid = torch.arange(taken, device=device) < count[:, None]
    q = split_heads(held(memory.query, slots), heads)
    lse = held(memory.lse, slots).transpose(1, 2)
    bias = key_bias(bias, relative, index)
    parts = []
    for pair in (new, old):
        k, v = (split_heads(part.masked_fill(~valid[..., None], 0), heads) for part in pair)
        parts.append(context_part(attend_partial(q, k, v, scale, bias, valid), lse))
    before = held(memory.change, slots)
    after = (before.float() + join_heads(parts[0] - parts[1])).to(before.dtype)
    rows = torch.arange(batch, device=device) if slots is None else slots
    memory.change.index_copy_(0, rows, torch.where((count > 0)[:, None, None], after, before))


def context_part(partial: tuple[Tensor, Tensor], lse: Tensor) -> Tensor:
    """The part (B, H, N, d) that some keys have in an output, at most a share of one.

    Args:
        partial: attention over these keys alone, and its log-sum-exp (see `attend_partial`).
        lse: (B, H, N) log-sum-exp over all keys.
    """
    return partial[0] * (partial[1] - lse).clamp_max(0).exp()[..., None]


def key_bias(
    bias: Tensor | None, relative: tuple[Tensor, Tensor] | None, index: Tensor | None
) -> Tensor | None:
    """An additive bias (B, H, N, J) of the keys at `index` (B, J), from its two parts, in fp32."""
    if relative is None:
        return bias
    assert index is not None
    down, across = (part.transpose(1, 2) for part in relative)
    width = across.shape[-1]
    at = index[:, None, None].expand(*down.shape[:3], -1)
    return down.gather(-1, at // width).float() + across.gather(-1, at % width).float()
