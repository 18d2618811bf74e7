"""The tensor operations of an eventful step in plain PyTorch: readable, any device, the oracle.

Tokens are (B, N, D); heads are split as (B, H, N, d) only inside attention. A trailing
underscore means the first argument is written.
"""

from __future__ import annotations

import torch
from torch import Tensor


def error_norm(current: Tensor, reference: Tensor, order: float) -> Tensor:
    """Norm of each token's error e = current - reference (Section 4.1), in fp32.

    Args:
        current: (B, N, D).
        reference: (B, N, D).
        order: order of the vector norm; 2 is the paper's.

    Returns:
        (B, N).
    """
    error = current.float() - reference.float()
    norm: Tensor = torch.linalg.vector_norm(error, ord=order, dim=-1)
    return norm


def _expand(index: Tensor, like: Tensor, dim: int) -> Tensor:
    """Index (B, M) broadcast to the shape of `like` with M along `dim`."""
    shape = [1] * like.dim()
    shape[0], shape[dim] = index.shape
    target = list(like.shape)
    target[dim] = index.shape[1]
    return index.reshape(shape).expand(target)


def gather(source: Tensor, index: Tensor, dim: int = 1) -> Tensor:
    """Entries `index` (B, M) of `source` along `dim`."""
    if source.dim() == 3 and dim == 1 and source.shape[0] == 1:
        return source[0].index_select(0, index[0])[None]
    return source.gather(dim, _expand(index, source, dim))


def scatter_(destination: Tensor, index: Tensor, values: Tensor, dim: int = 1) -> None:
    """Write `values` to the entries `index` (B, M) of `destination` along `dim`."""
    values = values.to(destination.dtype)
    if destination.dim() == 3 and dim == 1 and destination.shape[0] == 1:
        destination[0].index_copy_(0, index[0], values[0])
        return
    destination.scatter_(dim, _expand(index, destination, dim), values)


def split_heads(tokens: Tensor, heads: int) -> Tensor:
    """(B, N, H*d) to (B, H, N, d), a view."""
    batch, count, width = tokens.shape
    return tokens.view(batch, count, heads, width // heads).transpose(1, 2)


def join_heads(tokens: Tensor) -> Tensor:
    """(B, H, N, d) to (B, N, H*d)."""
    return tokens.transpose(1, 2).flatten(2)


def logits(q: Tensor, k: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Scaled query-key product with an additive bias, (B, H, M, K)."""
    product = (q * scale) @ k.transpose(-2, -1)
    return product if bias is None else product + bias


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Ordinary attention (Eq. 4-5), (B, H, M, d)."""
    return logits(q, k, scale, bias).softmax(dim=-1) @ v


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


def relative_bias(q: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Decomposed relative position as an additive bias, from the unscaled queries.

    Args:
        q: (B, H, M, d).
        rows: vectors between each query and each key row, (B or 1, M, kh, d).
        columns: the same for key columns, (B or 1, M, kw, d).

    Returns:
        (B, H, M, kh * kw).
    """
    along_rows = torch.einsum("bhmd,bmkd->bhmk", q, rows.to(q.dtype).expand(q.shape[0], -1, -1, -1))
    along_columns = torch.einsum(
        "bhmd,bmkd->bhmk", q, columns.to(q.dtype).expand(q.shape[0], -1, -1, -1)
    )
    return (along_rows[..., :, None] + along_columns[..., None, :]).flatten(-2)
