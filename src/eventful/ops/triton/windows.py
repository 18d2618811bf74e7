"""Attention inside windows for the selected queries alone, read straight from the buffers."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventful.ops.reference import WindowGrid
from eventful.ops.triton.attention import column_bias, line_bias, precision
from eventful.ops.triton.tiles import Tile, fitting

_TILES: tuple[Tile, ...] = ({}, {"rows": 32, "lanes": 32}, {"rows": 16, "lanes": 16})


@triton.jit
def _spots(
    part, top_y, left_x, height, width, TALL: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr
):  # fmt: skip
    """Tokens of a part of a window's places, and which of the places are in the grid."""
    spot = part * FEW + tl.arange(0, FEW)
    y = top_y + spot // WIDE
    x = left_x + spot % WIDE
    return y * width + x, (spot < TALL * WIDE) & (y < height) & (x < width)


@triton.jit
def _attend_windows(
    q, k, v, pad_k, pad_v, down, across, places, slots, out,
    queries, heads, height, width, windows_across, q_tiles, scale,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    TALL: tl.constexpr, WIDE: tl.constexpr, SPOTS: tl.constexpr, FEW: tl.constexpr,
    ROW_PAD: tl.constexpr, TILES: tl.constexpr,
    HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    RELATIVE: tl.constexpr, PADDED: tl.constexpr, HAS_SLOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    window = tl.program_id(0) // q_tiles
    tile = tl.program_id(0) % q_tiles
    head = tl.program_id(1).to(tl.int64)
    stream = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + stream).to(tl.int64) if HAS_SLOTS else stream
    top_y = (window // windows_across) * TALL
    left_x = (window % windows_across) * WIDE

    # The selected queries of the window, one after another: the tile takes M of them. Most tiles
    # have none, so that they are counted first.
    here = places + stream * height * width
    found = 0
    for part in range(SPOTS // FEW):
        at, inside = _spots(part, top_y, left_x, height, width, TALL, WIDE, FEW)
        found += tl.sum((tl.load(here + at, mask=inside, other=-1) >= 0).to(tl.int32), axis=0)
    if tile * M < found:
        mine = tile * M + tl.arange(0, M)
        holder = tl.zeros([M], dtype=tl.int32)
        before = 0
        for part in range(SPOTS // FEW):
            at, inside = _spots(part, top_y, left_x, height, width, TALL, WIDE, FEW)
            held_at = tl.load(here + at, mask=inside, other=-1)
            chosen = (held_at >= 0).to(tl.int32)
            rank = tl.where(held_at >= 0, before + tl.cumsum(chosen, axis=0) - 1, -1)
            holder += tl.sum(tl.where(mine[:, None] == rank[None, :], held_at[None, :], 0), axis=1)
            before += tl.sum(chosen, axis=0)
        real = mine < found
        m = holder.to(tl.int64)
        d = tl.arange(0, HEAD_PAD)
        fits = d < HEAD
        rows = tl.load(
            q + stream * stride_qb + head * stride_qh + m[:, None] * stride_qm + d[None, :],
            mask=real[:, None] & fits[None, :], other=0.0,
        )  # fmt: skip
        k += slot * stride_kb + head * stride_kh
        v += slot * stride_vb + head * stride_vh
        lane = tl.arange(0, K)
        column = lane % ROW_PAD
        place = (stream * queries + m) * heads + head
        aside = rows
        if RELATIVE:
            aside = column_bias(across, place, real, WIDE, K, ROW_PAD)
        top = tl.full([M], -float("inf"), dtype=tl.float32)
        weight = tl.zeros([M], dtype=tl.float32)
        total = tl.zeros([M, HEAD_PAD], dtype=tl.float32)
        for step in range(TILES):
            line = step * (K // ROW_PAD) + lane // ROW_PAD
            valid = (column < WIDE) & (line < TALL)
            ky, kx = top_y + line, left_x + column
            held = valid & (ky < height) & (kx < width)
            n = ky * width + kx
            key_at = k + n * stride_kn
            value_at = v + n * stride_vn
            if PADDED:  # places over the border hold the model's padding token
                key_at = tl.where(held, key_at, pad_k + head * HEAD)
                value_at = tl.where(held, value_at, pad_v + head * HEAD)
                held = valid
            else:  # windows end at the border
                valid = held
            kt = tl.load(
                key_at[None, :] + d[:, None], mask=held[None, :] & fits[:, None], other=0.0
            )
            values = tl.load(
                value_at[:, None] + d[None, :], mask=held[:, None] & fits[None, :], other=0.0
            )
            score = tl.dot(rows, kt, input_precision=PRECISION) * (scale * 1.4426950408889634)
            if RELATIVE:
                score += aside
                score += line_bias(down, place, real, step, TALL, K, ROW_PAD)
            score = tl.where(valid[None, :], score, -float("inf"))
            higher = tl.maximum(top, tl.max(score, axis=1))
            share = tl.exp2(score - higher[:, None])
            shrink = tl.exp2(top - higher)
            weight = weight * shrink + tl.sum(share, axis=1)
            total = total * shrink[:, None]
            total = tl.dot(share.to(values.dtype), values, total, input_precision=PRECISION)
            top = higher
        total = total / weight[:, None]
        at = out + stream * stride_ob + head * stride_oh + m[:, None] * stride_om + d[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=real[:, None] & fits[None, :])


def places_of(index: Tensor, tokens: int) -> Tensor:
    """(B, N) first slot of `index` (B, M) that holds each token, -1 for tokens not in it."""
    slot = torch.arange(index.shape[1], dtype=torch.int32, device=index.device).expand_as(index)
    places = torch.full((len(index), tokens), -1, dtype=torch.int32, device=index.device)
    return places.scatter_reduce_(1, index, slot, "amin", include_self=False)


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
    """See `reference.attend_windows`."""
    if places is None:
        places = places_of(index, k.shape[2])
        out = attend_windows(q, k, v, scale, windows, index, relative, pad, slots, places)
        twin = places.gather(1, index).long()[:, None, :, None]  # a padded slot equals its twin
        return out.gather(2, twin.expand_as(out))
    key = ("windows", q.device, q.dtype, q.shape[-1], windows.window)
    launch = partial(_launch, q, k, v, scale, windows, relative, pad, slots, places)
    return fitting(key, _TILES, launch).transpose(1, 2)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    windows: WindowGrid,
    relative: tuple[Tensor, Tensor] | None,
    pad: tuple[Tensor, Tensor] | None,
    slots: Tensor | None,
    places: Tensor,
    **tile: int,
) -> Tensor:
    """Outputs (B, M, H, d); `rows` and `lanes` of the tile may be left to this function."""
    batch, heads, queries, head = q.shape
    (height, width), (tall, wide) = windows.grid, windows.window
    out = torch.empty(batch, queries, heads, head, dtype=q.dtype, device=q.device)
    if queries == 0:
        return out
    row_pad = triton.next_power_of_2(wide)
    lanes = max(tile.get("lanes", 64), row_pad)
    rows = tile.get("rows", 64 if tall * wide > 32 else 16)
    q_tiles = triton.cdiv(tall * wide, rows)
    down, across = relative or (q, q)
    pad_k, pad_v = (q, q) if pad is None else (part.to(k.dtype) for part in pad)
    spots = triton.next_power_of_2(tall * wide)
    _attend_windows[(windows.count * q_tiles, heads, batch)](
        q, k, v, pad_k, pad_v, down, across, places, q if slots is None else slots, out,
        queries, heads, height, width, windows.across, q_tiles, scale,
        q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
        v.stride(0), v.stride(1), v.stride(2), out.stride(0), out.stride(2), out.stride(1),
        TALL=tall, WIDE=wide, SPOTS=spots, FEW=min(spots, 256), ROW_PAD=row_pad,
        TILES=triton.cdiv(tall, lanes // row_pad),
        HEAD=head, HEAD_PAD=max(16, triton.next_power_of_2(head)), M=rows, K=lanes,
        RELATIVE=relative is not None, PADDED=pad is not None, HAS_SLOTS=slots is not None,
        PRECISION=precision(q.dtype), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
