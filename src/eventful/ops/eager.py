"""The operations that stock fused kernels serve better than the reference arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.ops import reference


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Attention of (B, H, M, d) queries over (B, H, K, d) keys through SDPA."""
    if 0 in q.shape:  # some fused kernels crash on nothing to do
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)


def attend_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with its log-sum-exp, both fp32, through the CPU's flash kernel."""
    if q.device.type != "cpu" or 0 in q.shape or 0 in k.shape:  # the kernel crashes on no work
        return reference.attend_partial(q, k, v, scale, bias, valid)
    mask = None if bias is None else bias.float()
    if valid is not None:
        blocked = torch.zeros(valid.shape).masked_fill(~valid, -torch.inf)[:, None, None]
        mask = blocked.expand(*q.shape[:3], -1) if mask is None else mask + blocked
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.float(), k.float(), v.float(), 0.0, False, attn_mask=mask, scale=scale
    )
    if valid is not None:  # the kernel reports 0 for a row without keys
        lse = lse.masked_fill(~valid.any(dim=-1)[:, None, None], -torch.inf)
    return out, lse
