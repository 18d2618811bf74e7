"""Attention in windows, and attention with its log-sum-exp, through the fused kernels of torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.ops import products, reference
from eventful.ops.reference import WindowGrid, window_map
from eventful.ops.scratch import scratch

_HALF = (torch.float16, torch.bfloat16)


def whole_bias(bias: Tensor | None, relative: tuple[Tensor, Tensor] | None) -> Tensor | None:
    """See `reference.whole_bias`; in memory that is kept."""
    if relative is None:
        return bias
    down, across = (part.transpose(1, 2) for part in relative)
    shape = (*down.shape, across.shape[-1])
    room = scratch("bias", shape, down)
    return torch.add(down[..., :, None], across[..., None, :], out=room).flatten(-2)


def attend_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    relative: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
    ragged: reference.Ragged | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.attend_lse`; through the fused kernel of the device, if it has one."""
    fused = {"cpu": _on_cpu, "cuda": _on_cuda}.get(q.device.type)
    if fused is None or 0 in q.shape or 0 in k.shape:  # the kernels crash on no work
        return reference.attend_lse(q, k, v, scale, bias, relative, slots)
    if q.is_cuda and not _served(q):
        return reference.attend_lse(q, k, v, scale, bias, relative, slots)
    k, v = (reference.held(part, slots).to(q.dtype) for part in (k, v))
    if products.serves(q, k, bias):
        return products.attention_lse(q, k, v, scale, bias, relative)
    mask = whole_bias(bias, relative)
    return fused(q, k, v, scale, None if mask is None else mask.to(q.dtype))


def _on_cpu(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=mask, scale=scale
    )
    return out, lse.float()


def _served(q: Tensor) -> bool:
    """Whether a fused kernel of CUDA takes such queries as they are."""
    return q.dtype in (*_HALF, torch.float32) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _on_cuda(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    queries, keys = q.shape[2], k.shape[2]
    if mask is None and q.dtype in _HALF and torch.cuda.get_device_capability(q.device) >= (8, 0):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, False, False, scale=scale
        )
        return out, lse[..., :queries]
    if mask is not None:  # the kernel loads a mask in pieces of 16 numbers
        mask = F.pad(mask, (0, -keys % 16))[..., :keys].expand(*q.shape[:3], keys)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, True, 0.0, False, scale=scale
    )
    return out, lse[..., :queries]  # the kernel pads the queries to a multiple of 32


def key_bias(down: Tensor, across: Tensor, at: Tensor) -> Tensor:
    """`reference.key_bias` of one stream, as a product with ones at the places of the keys.

    It is exact for finite numbers, and several times faster than gathering. It is in memory that
    is kept, as that of `whole_bias`.
    """
    tall, wide = down.shape[-1], across.shape[-1]
    ones = torch.zeros(tall + wide, len(at), device=at.device)
    ones.scatter_(0, torch.stack([at // wide, tall + at % wide]), 1.0)
    shape = (*down.shape[:3], tall + wide)  # (1, N, H, kh + kw)
    room = scratch("relative", shape, down)
    parts = torch.cat([down, across], dim=-1, out=room).float().flatten(0, 2)
    made = torch.mm(parts, ones, out=scratch("bias", (len(parts), len(at)), parts))
    return made.view(*shape[:3], len(at)).transpose(1, 2)


def attend_windows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    windows: WindowGrid,
    index: Tensor,
    relative: tuple[Tensor, Tensor] | None = None,
    pad: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """See `reference.attend_windows`; one padded batch of the windows that hold a query."""
    batch, heads, count, width = q.shape
    if count == 0:
        return q
    k, v = reference.held(k, slots), reference.held(v, slots)
    spots = window_map(windows, q.device)
    token = index.flatten()
    stream = torch.arange(batch, device=q.device).repeat_interleave(count)
    home, group, size = torch.unique(
        stream * windows.count + spots.window_of[token], return_inverse=True, return_counts=True
    )
    order = group.argsort(stable=True)
    rank = torch.empty_like(group)
    rank[order] = torch.arange(len(group), device=q.device) - (size.cumsum(0) - size)[group[order]]
    most = int(size.max())
    queries = q.new_zeros(len(home), most, heads, width)
    queries[group, rank] = q.transpose(1, 2).reshape(-1, heads, width)
    stream_of, window_of = home // windows.count, home % windows.count
    members = spots.members[window_of]  # (T, S)
    inside = members < windows.grid[0] * windows.grid[1]
    row = stream_of[:, None] * k.shape[2] + members.clamp_max(k.shape[2] - 1)
    outside = (~inside).flatten().nonzero()[:, 0] if pad is not None else None

    def taken(name: str, source: Tensor, filler: Tensor | None) -> Tensor:
        """(T, S, H, d)."""
        every = source.transpose(1, 2).reshape(-1, heads * width)
        room = scratch(name, (row.numel(), heads * width), every)
        part = torch.index_select(every, 0, row.flatten(), out=room)
        if filler is not None and outside is not None:
            part.index_copy_(0, outside, filler.to(part.dtype).view(1, -1).expand(len(outside), -1))
        return part.view(*row.shape, heads, width)

    bias = None
    if relative is not None:
        parts = [part.new_zeros(len(home), most, *part.shape[2:]) for part in relative]
        for into, part in zip(parts, relative, strict=True):
            into[group, rank] = part.flatten(0, 1)
        bias = whole_bias(None, (parts[0], parts[1]))
    if pad is None and windows.padded:
        bias = reference.border_bias(inside[:, None, None], bias, q.dtype)
    result = F.scaled_dot_product_attention(
        queries.transpose(1, 2),
        taken("window keys", k, pad and pad[0]).transpose(1, 2),
        taken("window values", v, pad and pad[1]).transpose(1, 2),
        attn_mask=bias,
        scale=scale,
    )
    return result.transpose(1, 2)[group, rank].view(batch, count, heads, width).transpose(1, 2)
