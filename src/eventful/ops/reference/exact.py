"""Resident operator gating in plain PyTorch: gates with norms, and the exact rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.ops.reference.attention import attend_partial, merge_partial
from eventful.ops.reference.gates import Picked, error_norm
from eventful.ops.reference.rows import gather, held, join_heads, split_heads, write_rows_


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """The numbers of a layer norm: weight and bias (D,), None without, and epsilon."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def apply(self, tokens: Tensor) -> Tensor:
        """The norm of (..., D)."""
        return F.layer_norm(tokens, tokens.shape[-1:], self.weight, self.bias, self.eps)


@dataclass(frozen=True, eq=False)
class ExactMemory:
    """What the exact rule keeps of one attention, a row per slot.

    Attributes:
        query, key, value: (S, N, H*d).
        out: (S, N, H*d) fp32 attention outputs.
        lse, condition: (S, N, H) fp32.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    condition: Tensor

    @property
    def heads(self) -> int:
        """H."""
        return self.lse.shape[-1]


def gate_error(
    current: Tensor,
    reference_: Tensor,
    slots: Tensor | None,
    norm: LayerNorm | None = None,
    update: Tensor | None = None,
    stored: bool = False,
) -> tuple[Tensor, Tensor]:
    """The error norms (B, N) at a gate, and the residual sum that stands before it.

    Args:
        current: (B, N, D), or a memory (S, N, D) if `stored`.
        reference_: (S, N, D), in whose dtype tokens are compared.
        norm: the gate looks at normed tokens.
        update: (S, N, D) added to the tokens first.

    Returns:
        The sum, (B, N, D), which is `current` itself without an update, and the errors.
    """
    tokens = held(current, slots) if stored else current
    if update is not None:
        tokens = tokens + held(update, slots)
    seen = tokens.to(reference_.dtype)
    seen = seen if norm is None else norm.apply(seen)
    before = current if update is None else tokens
    return before, error_norm(seen, reference_, 2.0, slots)


def gate_rows(
    current: Tensor,
    reference_: Tensor,
    index: Tensor,
    count: Tensor | None,
    slots: Tensor | None,
    norm: LayerNorm | None = None,
    stored: bool = False,
) -> Tensor:
    """The selected tokens (B, M, D) as a gate sees them, remembered as the reference.

    Args:
        current: (B, N, D), or a memory (S, N, D) if `stored`.
        reference_: (S, N, D), written.
        index, count: (B, M) and (B,), the selection; None for a count of M everywhere.
        norm: the gate looks at normed tokens.
    """
    tokens = held(current, slots) if stored else current
    rows = gather(tokens, index).to(reference_.dtype)
    rows = rows if norm is None else norm.apply(rows)
    write_rows_((reference_,), (rows,), index, count, slots)
    return rows


def add_held(tokens: Tensor, memory: Tensor, slots: Tensor) -> Tensor:
    """Tokens (B, N, D) plus their streams' rows of a memory (S, N, D)."""
    return tokens + held(memory, slots)


def exchange_(
    memory: ExactMemory,
    new: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor],
    picked: Picked,
    scale: float,
    rebase: float,
    slots: Tensor | None,
    width: int,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Swap the share of the changed keys in the rows of queries that did not change.

    Args:
        new, old: keys and values (B, J, H*d) of the changed tokens, as they are and as they were.
        picked: the changed queries; its counts are those of the keys, too.
        rebase: condition beyond which a row must be recomputed, or twice a fresh row's.
        width: R.
        bias: (B, H, N, J) added to the logits; None without.

    Returns:
        Rows that must be recomputed, (B, R), the worst first, and how many there are, (B,):
        where they are more than R, the others wait for the next step.
    """
    heads = memory.heads

    def split(tokens: Tensor) -> Tensor:
        return split_heads(tokens, heads)

    kept = ("query", "out", "lse", "condition")
    own = {name: held(getattr(memory, name), slots) for name in kept}
    valid = torch.arange(new[0].shape[1], device=new[0].device) < picked.count[:, None]
    q = split(own["query"])
    parts = [attend_partial(q, split(k), split(v), scale, bias, valid) for k, v in (new, old)]
    state = (
        split(own["out"]),
        own["lse"].transpose(1, 2),
        own["condition"].transpose(1, 2),
    )
    out, lse, condition = merge_partial(state, parts[0], parts[1])
    lost = condition.isinf()
    out = torch.where(lost[..., None], state[0], out)
    lse = torch.where(lost, state[1], lse)
    assert picked.places is not None
    stays = ((picked.places >= 0) | (picked.count == 0)[:, None])[:, None]  # (B, 1, N)
    out = torch.where(stays[..., None], state[0], out)
    lse, condition = torch.where(stays, state[1], lse), torch.where(stays, state[2], condition)
    rows = torch.arange(len(q), device=q.device) if slots is None else slots
    memory.out.index_copy_(0, rows, join_heads(out))
    memory.lse.index_copy_(0, rows, lse.transpose(1, 2).contiguous())
    memory.condition.index_copy_(0, rows, condition.transpose(1, 2).contiguous())
    return lost_rows(lse.transpose(1, 2), condition.transpose(1, 2), stays[:, 0], rebase, width)


def lost_rows(
    lse: Tensor, condition: Tensor, stays: Tensor, rebase: float, width: int
) -> tuple[Tensor, Tensor]:
    """The rows whose condition is beyond its limit, as `exchange_` returns them.

    Args:
        lse, condition: (B, N, H).
        stays: (B, N) rows that are not looked at.
    """
    # A fresh row starts at 1 + |L|, so the limit must lie above that, or it would never rest.
    limit = (2 * (1 + lse.abs())).clamp_min(rebase)
    beyond = (condition / limit).amax(dim=-1).masked_fill(stays, 0.0)
    worst = beyond.argsort(dim=-1, descending=True, stable=True)
    return worst[:, :width].contiguous(), (beyond > 1).sum(dim=-1)


def recompute_(
    memory: ExactMemory,
    rows: tuple[tuple[Tensor, Tensor], ...],
    scale: float,
    slots: Tensor | None,
    bias: Tensor | None = None,
) -> None:
    """Ordinary attention for the queries of some rows, whose condition starts anew.

    Args:
        rows: pairs of index (B, M) and count (B,), which may be larger than M.
        bias: (B, H, M, N) added to the logits of one list of rows; None without.
    """
    heads = memory.heads
    k, v = (split_heads(held(part, slots), heads) for part in (memory.key, memory.value))
    for index, count in rows:
        q = gather(held(memory.query, slots), index)
        out, lse = attend_partial(split_heads(q, heads), k, v, scale, bias)
        found = lse.transpose(1, 2).contiguous()
        write_rows_(
            (memory.out, memory.lse, memory.condition),
            (join_heads(out), found, 1 + found.abs()),
            index, count.clamp_max(index.shape[1]), slots,
        )  # fmt: skip
