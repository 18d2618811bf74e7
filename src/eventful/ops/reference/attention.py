"""Attention in plain PyTorch: whole, partial with its log-sum-exp, and relative position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eventful.ops.reference.rows import held


def logits(q: Tensor, k: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Scaled query-key product with an additive bias, (B, H, M, K)."""
    product = (q * scale) @ k.transpose(-2, -1)
    return product if bias is None else product + bias


@dataclass(frozen=True, eq=False)
class Ragged:
    """Queries of which streams have different numbers.

    Attributes:
        count: (B,) queries that count. What the others get is not defined.
        rows: about how many count in all streams together.
    """

    count: Tensor
    rows: int


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    relative: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
    ragged: Ragged | None = None,
) -> Tensor:
    """Ordinary attention (Eq. 4-5) of some queries, (B, H, M, d).

    Args:
        q: (B, H, M, d).
        k, v: (S, H, K, d).
        bias: added to the logits, (B, H, M, K).
        relative: the same in two parts, for each row and each column of the keys' grid
            (see `relative_logits`).
        slots: (B,) row of `k` and `v` that belongs to each stream; None if row b does.
        ragged: which queries count; None if all do.
    """
    k, v = held(k, slots), held(v, slots)
    return logits(q, k, scale, whole_bias(bias, relative)).softmax(dim=-1) @ v


def attend_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    relative: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
    ragged: Ragged | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as `attend` computes it, with the log-sum-exp of the logits.

    Without keys the output is 0 and the log-sum-exp -inf.

    Returns:
        (B, H, M, d) in the dtype of `q`, and (B, H, M) fp32.
    """
    kind = torch.promote_types(q.dtype, torch.float32)
    k, v, bias = held(k, slots), held(v, slots), whole_bias(bias, relative)
    with torch.autocast(q.device.type, enabled=False):
        scores = logits(q.to(kind), k.to(kind), scale, None if bias is None else bias.to(kind))
        out = scores.softmax(dim=-1) @ v.to(kind)
        return out.to(q.dtype), torch.logsumexp(scores, dim=-1).float()


def whole_bias(bias: Tensor | None, relative: tuple[Tensor, Tensor] | None) -> Tensor | None:
    """An additive bias (B, H, M, K) from its parts (B, M, H, kh) and (B, M, H, kw)."""
    if relative is None:
        return bias
    down, across = (part.transpose(1, 2) for part in relative)
    return (down[..., :, None] + across[..., None, :]).flatten(-2)


def attend_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys, with its log-sum-exp, both fp32.

    Args:
        bias: added to the logits, (B, H, M, J).
        valid: (B, J), false for keys that do not count. A row without any has weight zero:
            output 0, log-sum-exp -inf.

    Returns:
        (B, H, M, d) and (B, H, M).
    """
    with torch.autocast(q.device.type, enabled=False):
        scores = logits(q.float(), k.float(), scale, None if bias is None else bias.float())
        if valid is not None:
            scores = scores.masked_fill(~valid[:, None, None], -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None])
        return weights @ v.float(), lse


def merge_partial(
    state: tuple[Tensor, Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace the share of some keys in an attention output.

    The exact rule (docs/update-rules.md): with weights relative to m = max(L, L_n), the
    old share is taken out and the new one put in. The condition number c grows with the
    cancellation that costs; rows where it is too large, or where nothing is left to
    divide by, must be recomputed by the caller.

    Args:
        state: output (B, H, N, d), log-sum-exp (B, H, N), condition (B, H, N).
        new: partial attention over the changed keys as they are.
        old: the same over the keys as they were.

    Returns:
        The three state tensors, with condition inf where the row is lost.
    """
    out, lse, condition = state
    top = torch.maximum(lse, new[1])
    keep, gain, loss = (torch.exp(part - top) for part in (lse, new[1], old[1]))
    total = keep + gain - loss
    lost = ~(total > 0)
    safe = total.masked_fill(lost, 1.0)
    share_keep, share_gain, share_loss = ((w / safe)[..., None] for w in (keep, gain, loss))
    merged = share_keep * out + share_gain * new[0] - share_loss * old[0]
    merged_lse = top + safe.log()
    grown = (keep * condition + (gain + loss) * (1 + merged_lse.abs())) / safe
    return merged, merged_lse, grown.masked_fill(lost, float("inf"))


def relative_logits_all(
    query: Tensor, heads: int, rows: Tensor, columns: Tensor, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`relative_logits` of all queries of a grid, without a table per query.

    Args:
        query: (S, N, H*d), a buffer; N = h * w.
        rows, columns: (h, kh, d) and (w, kw, d), as in `relative_logits`.
        slots: (B,) row of the buffer that belongs to each stream; None if row b does.

    Returns:
        (B, N, H, kh) and (B, N, H, kw).
    """
    kept = held(query, slots)
    grid = kept.view(len(kept), rows.shape[0], columns.shape[0], heads, -1)
    down = torch.einsum("byxhd,ykd->byxhk", grid, rows.to(query.dtype))
    across = torch.einsum("byxhd,xkd->byxhk", grid, columns.to(query.dtype))
    return down.flatten(1, 2).contiguous(), across.flatten(1, 2).contiguous()


def relative_logits(
    q: Tensor, rows: Tensor, columns: Tensor, index: Tensor
) -> tuple[Tensor, Tensor]:
    """Decomposed relative position of some queries, from the unscaled queries.

    Args:
        q: (B, H, M, d).
        rows: vectors between each row of queries and each row of keys, (h, kh, d).
        columns: the same for columns, (w, kw, d).
        index: places of the queries in their h x w grid, (B or 1, M).

    Returns:
        (B, M, H, kh) and (B, M, H, kw).
    """
    width = columns.shape[0]
    index = index.expand(q.shape[0], -1)
    return (
        torch.einsum("bhmd,bmkd->bmhk", q, rows.to(q.dtype)[index // width]),
        torch.einsum("bhmd,bmkd->bmhk", q, columns.to(q.dtype)[index % width]),
    )
