"""Attention of a few queries over many buffered keys, split over the keys to fill the device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventful.ops.reference import Ragged
from eventful.ops.triton.tiles import Tile, fitting

_TILES: tuple[Tile, ...] = ({}, {"rows": 32, "lanes": 32}, {"rows": 16, "lanes": 16})
_MANY = 128  # queries from which on half-precision tiles with relative position hold as many


@triton.jit
def line_bias(down, place, real, tile, height, K: tl.constexpr, ROW_PAD: tl.constexpr):
    """Relative position of queries to the rows of a tile of keys, to base 2.

    A tile holds whole rows of the key grid, each padded to ROW_PAD. Of `column_bias` each tile
    has the same.
    """
    LINES: tl.constexpr = K // ROW_PAD
    if LINES == 1:
        below = tl.load(down + place * height + tile, mask=real & (tile < height), other=0.0)
        bias = below.to(tl.float32)[:, None] * 1.4426950408889634
    else:
        each = tile * LINES + tl.arange(0, LINES)
        below = tl.load(
            down + place[:, None] * height + each[None, :],
            mask=real[:, None] & (each < height)[None, :], other=0.0,
        ).to(tl.float32) * 1.4426950408889634  # fmt: skip
        below = tl.broadcast_to(below[:, :, None], (place.shape[0], LINES, ROW_PAD))
        bias = tl.reshape(below, (place.shape[0], K))
    return bias


@triton.jit
def column_bias(across, place, real, width, K: tl.constexpr, ROW_PAD: tl.constexpr):
    """Relative position of queries to the columns of any tile of keys, to base 2."""
    column = tl.arange(0, K) % ROW_PAD
    aside = tl.load(
        across + place[:, None] * width + column[None, :],
        mask=real[:, None] & (column < width)[None, :], other=0.0,
    )  # fmt: skip
    return aside.to(tl.float32) * 1.4426950408889634


@triton.jit
def _fold(
    rows, k, v, aside, down, place, real, tile, top, weight, total,
    keys, key_width, stride_kn, stride_vn, scale,
    HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, K: tl.constexpr, RELATIVE: tl.constexpr,
    ROW_PAD: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys and values into the running maximum, weight and sum of the queries."""
    d = tl.arange(0, HEAD_PAD)
    fits = d < HEAD
    lane = tl.arange(0, K)
    if RELATIVE:  # a tile holds whole rows of the key grid, each padded to ROW_PAD
        height = keys // key_width
        line = tile * (K // ROW_PAD) + lane // ROW_PAD
        n = line * key_width + lane % ROW_PAD
        valid = (lane % ROW_PAD < key_width) & (line < height)
    else:
        n = tile * K + lane
        valid = n < keys
    if FULL and HEAD == HEAD_PAD:
        kt = tl.load(k + n[None, :] * stride_kn + d[:, None])
        values = tl.load(v + n[:, None] * stride_vn + d[None, :])
    else:
        kt = tl.load(
            k + n[None, :] * stride_kn + d[:, None],
            mask=valid[None, :] & fits[:, None], other=0.0,
        )  # fmt: skip
        values = tl.load(
            v + n[:, None] * stride_vn + d[None, :],
            mask=valid[:, None] & fits[None, :], other=0.0,
        )  # fmt: skip
    score = tl.dot(rows, kt, input_precision=PRECISION) * (scale * 1.4426950408889634)
    if RELATIVE:
        score += aside
        score += line_bias(down, place, real, tile, height, K, ROW_PAD)
    if not FULL:
        score = tl.where(valid[None, :], score, -float("inf"))
    higher = tl.maximum(top, tl.max(score, axis=1))
    share = tl.exp2(score - higher[:, None])
    shrink = tl.exp2(top - higher)
    weight = weight * shrink + tl.sum(share, axis=1)
    total = tl.dot(
        share.to(values.dtype), values, total * shrink[:, None], input_precision=PRECISION
    )
    return higher, weight, total


@triton.jit(do_not_specialize=["tiles"])
def _attend(
    q, k, v, down, across, slots, counts, out, lse,
    queries, keys, key_width, heads, scale,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    tiles, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, M: tl.constexpr,
    K: tl.constexpr, SPLIT: tl.constexpr, RELATIVE: tl.constexpr, ROW_PAD: tl.constexpr,
    FULL: tl.constexpr, TAIL: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_COUNT: tl.constexpr,
    WITH_LSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    part = tl.program_id(2)
    stream = (pair // heads).to(tl.int64)
    if HAS_COUNT:  # noqa: SIM102 - queries past the count are padding, which nobody reads
        if tl.program_id(0) * M >= tl.load(counts + stream):
            return
    head = (pair % heads).to(tl.int64)
    slot = tl.load(slots + stream).to(tl.int64) if HAS_SLOTS else stream
    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, HEAD_PAD)
    real = m < queries
    keep = real[:, None] & (d < HEAD)[None, :]
    at = q + stream * stride_qb + head * stride_qh
    rows = tl.load(at + m.to(tl.int64)[:, None] * stride_qm + d[None, :], mask=keep, other=0.0)
    k += slot * stride_kb + head * stride_kh
    v += slot * stride_vb + head * stride_vh
    place = (stream * queries + m.to(tl.int64)) * heads + head
    aside = rows
    if RELATIVE:
        aside = column_bias(across, place, real, key_width, K, ROW_PAD)

    top = tl.full([M], -float("inf"), dtype=tl.float32)
    weight = tl.zeros([M], dtype=tl.float32)
    total = tl.zeros([M, HEAD_PAD], dtype=tl.float32)
    for step in range(tiles):  # the first holds a key in any case, so `top` is finite after it
        top, weight, total = _fold(
            rows, k, v, aside, down, place, real, part * tiles + step, top, weight, total,
            keys, key_width, stride_kn, stride_vn, scale,
            HEAD, HEAD_PAD, K, RELATIVE, ROW_PAD, FULL, PRECISION,
        )  # fmt: skip
    if TAIL:  # noqa: SIM102 - what is left of the keys, masked, so that the loop need not be
        if part == tl.num_programs(2) - 1:
            top, weight, total = _fold(
                rows, k, v, aside, down, place, real, keys // K, top, weight, total,
                keys, key_width, stride_kn, stride_vn, scale,
                HEAD, HEAD_PAD, K, RELATIVE, ROW_PAD, False, PRECISION,
            )  # fmt: skip

    total = total / weight[:, None]
    found = top + tl.log2(weight)
    if SPLIT:
        streams = tl.num_programs(1) // heads
        place += part.to(tl.int64) * streams * queries * heads
        tl.store(out + place[:, None] * HEAD + d[None, :], total, mask=keep)
        tl.store(lse + place, found, mask=real)
    else:
        at = out + stream * stride_ob + head * stride_oh + m[:, None].to(tl.int64) * stride_om
        tl.store(at + d[None, :], total.to(out.dtype.element_ty), mask=keep)
        if WITH_LSE:
            tl.store(lse + place, found / 1.4426950408889634, mask=real)


@triton.jit
def _weigh(
    parts, part_lse, rows, row, heads,
    PARTS: tl.constexpr, HEADS_PAD: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    """Weigh the partial attentions of one query, all heads, by their log-sum-exp."""
    head = tl.arange(0, HEADS_PAD)
    d = tl.arange(0, HEAD_PAD)
    real = head < heads
    keep = real[:, None] & (d < HEAD)[None, :]
    top = tl.full([HEADS_PAD], -float("inf"), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        at = (part * rows + row) * heads + head
        top = tl.maximum(top, tl.load(part_lse + at, mask=real, other=0.0))
    total = tl.zeros([HEADS_PAD, HEAD_PAD], dtype=tl.float32)
    weight = tl.zeros([HEADS_PAD], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        at = (part * rows + row) * heads + head
        share = tl.exp2(tl.load(part_lse + at, mask=real, other=0.0) - top)
        weight += share
        total += share[:, None] * tl.load(
            parts + at[:, None] * HEAD + d[None, :], mask=keep, other=0.0
        )
    return total / weight[:, None], (top + tl.log2(weight)) / 1.4426950408889634


@triton.jit
def _combine(
    parts, part_lse, out, lse, counts, rows, queries, heads,
    PARTS: tl.constexpr, HEADS_PAD: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr,
    HAS_COUNT: tl.constexpr, WITH_LSE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if HAS_COUNT:  # noqa: SIM102 - as above
        if row % queries >= tl.load(counts + row // queries):
            return
    head = tl.arange(0, HEADS_PAD)
    d = tl.arange(0, HEAD_PAD)
    real = head < heads
    total, found = _weigh(parts, part_lse, rows, row, heads, PARTS, HEADS_PAD, HEAD, HEAD_PAD)
    at = (row * heads + head)[:, None] * HEAD + d[None, :]
    keep = real[:, None] & (d < HEAD)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=keep)
    if WITH_LSE:
        tl.store(lse + row * heads + head, found, mask=real)


def multiprocessors(device: torch.device) -> int:
    """Of a device."""
    if device.type != "cuda":
        return 4  # the interpreter: enough to take the split path in tests
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Plan:
    """How the keys are shared out: splits of so many tiles, all full, and perhaps a tail."""

    splits: int
    tiles: int
    full: bool
    tail: bool = False


def split_tiles(
    queries: int,
    tiles: int,
    pairs: int,
    device: torch.device,
    full: bool,
    splits: int | None = None,
) -> tuple[int, Plan]:
    """Queries per program, and splits to have about three programs per multiprocessor."""
    rows = 64 if queries > 16 else 16
    if splits is None:
        programs = triton.cdiv(queries, rows) * pairs
        wanted = max(1.0, min(3 * multiprocessors(device) / programs, tiles, 16.0))
        # Every number of splits is a kernel to compile, so that they are about powers of two.
        power = 2 ** round(math.log2(wanted))
        # Splits of equal length need no masks: take the nearest number that divides the tiles.
        near = [n for n in range(max(1, power - 1), min(power + 2, tiles + 1)) if tiles % n == 0]
        splits = min(near, key=lambda n: abs(n - power), default=min(power, tiles))
    each = triton.cdiv(tiles, splits)
    splits = triton.cdiv(tiles, each)
    return rows, Plan(splits, each, full and tiles == splits * each)


def split_keys(
    queries: int,
    keys: int,
    lanes: int,
    pairs: int,
    device: torch.device,
    splits: int | None = None,
) -> tuple[int, Plan]:
    """The same for keys in a row, whose rest is masked apart where the full tiles share evenly."""
    whole, rest = divmod(keys, lanes)
    if whole and rest:
        rows, plan = split_tiles(queries, whole, pairs, device, True, splits)
        if plan.full:
            return rows, replace(plan, tail=True)
    return split_tiles(queries, triton.cdiv(keys, lanes), pairs, device, rest == 0, splits)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    relative: tuple[Tensor, Tensor] | None,
    slots: Tensor | None,
    ragged: Ragged | None = None,
    *,
    with_lse: bool,
    kind: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention output (B, M, H, d) and log-sum-exp (B, M, H).

    Args:
        kind: dtype of the output; None for that of `q`.
    """
    width = 0 if relative is None else relative[1].shape[-1]
    key = ("attend", q.device, q.dtype, q.shape[-1], width)
    launch = partial(
        _run, q, k, v, scale, relative, slots, ragged, with_lse=with_lse, kind=kind or q.dtype
    )
    return fitting(key, _TILES, launch)


def _tiling(
    q: Tensor,
    keys: int,
    relative: tuple[Tensor, Tensor] | None,
    ragged: Ragged | None,
    lanes: int,
) -> tuple[int, int, int, Plan]:
    """Queries of a tile, its keys, keys of a padded row of the grid (1 without), and the plan."""
    batch, heads, queries, _ = q.shape
    if ragged is not None:  # programs past the counts end at once and fill nothing
        queries = min(queries, max(17, triton.cdiv(ragged.rows, batch)))
    if relative is None:
        rows, plan = split_keys(queries, keys, lanes, batch * heads, q.device)
        return rows, lanes, 1, plan
    height, width = relative[0].shape[-1], relative[1].shape[-1]
    row_pad = max(16, triton.next_power_of_2(width))
    lanes = max(lanes, row_pad)
    lines = lanes // row_pad
    full = width == row_pad and height % lines == 0
    tiles = triton.cdiv(height, lines)
    rows, plan = split_tiles(queries, tiles, batch * heads, q.device, full)
    return rows, lanes, row_pad, plan


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    relative: tuple[Tensor, Tensor] | None,
    slots: Tensor | None,
    ragged: Ragged | None,
    *,
    with_lse: bool,
    kind: torch.dtype,
    **tile: int,
) -> tuple[Tensor, Tensor | None]:
    """The same with `rows` and `lanes` of the tile, which may be left to this function."""
    batch, heads, queries, head = q.shape
    lanes = tile.get("lanes", 64)
    auto_rows, lanes, row_pad, plan = _tiling(q, k.shape[2], relative, ragged, lanes)
    if relative is not None and queries >= _MANY and q.dtype != torch.float32:
        auto_rows = 128
    rows, splits = tile.get("rows", auto_rows), plan.splits
    make = partial(torch.empty, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, queries, heads, head, dtype=kind, device=q.device)
    lse = make(batch, queries, heads) if with_lse else None
    target, target_lse = out, (lse if lse is not None else out)
    split = splits > 1
    if split:
        target = make(splits, batch, queries, heads, head)
        target_lse = make(splits, batch, queries, heads)
    down, across = (q, q) if relative is None else relative
    pad = max(16, triton.next_power_of_2(head))
    counts = q if ragged is None else ragged.count
    _attend[(triton.cdiv(queries, rows), batch * heads, splits)](
        q, k, v, down, across, q if slots is None else slots, counts, target, target_lse,
        queries, k.shape[2], 1 if relative is None else across.shape[-1], heads, scale,
        q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
        v.stride(0), v.stride(1), v.stride(2),
        out.stride(0), out.stride(2), out.stride(1),
        tiles=plan.tiles, HEAD=head, HEAD_PAD=pad, M=rows, K=lanes,
        SPLIT=split, RELATIVE=relative is not None, ROW_PAD=row_pad, FULL=plan.full, TAIL=plan.tail,
        HAS_SLOTS=slots is not None, HAS_COUNT=ragged is not None, WITH_LSE=with_lse,
        PRECISION=precision(q.dtype), num_warps=4, num_stages=3,
    )  # fmt: skip
    if split:
        _combine[(batch * queries,)](
            target, target_lse, out, target_lse if lse is None else lse, counts,
            batch * queries, queries, heads,
            PARTS=splits, HEADS_PAD=triton.next_power_of_2(heads), HEAD=head, HEAD_PAD=pad,
            HAS_COUNT=ragged is not None, WITH_LSE=with_lse, num_warps=4,
        )  # fmt: skip
    return out, lse


def precision(dtype: torch.dtype) -> str:
    """How products of fp32 numbers are formed: at full precision, unless the user allows TF32.

    Three TF32 products are as accurate as one in fp32, as in the stock kernels, and many times
    faster than Triton's fp32 product, which does without the matrix units.
    """
    if dtype != torch.float32:
        return "tf32"  # ignored for half precision
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


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
    """See `reference.attend`; no dense bias."""
    return run(q, k, v, scale, relative, slots, ragged, with_lse=False)[0].transpose(1, 2)


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
    """See `reference.attend_lse`; no dense bias."""
    out, lse = run(q, k, v, scale, relative, slots, ragged, with_lse=True)
    assert lse is not None
    return out.transpose(1, 2), lse.transpose(1, 2)


def attend_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.attend_partial`; over all keys, without a bias."""
    out, lse = run(q, k, v, scale, None, None, with_lse=True, kind=torch.float32)
    assert lse is not None
    return out.transpose(1, 2), lse.transpose(1, 2)
