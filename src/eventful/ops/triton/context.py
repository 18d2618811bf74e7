"""Kernel of selection by context: what changed keys do to the attention of other tokens."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventful.ops.reference import ContextMemory
from eventful.ops.triton.attention import multiprocessors, precision
from eventful.ops.triton.relative import relative_at
from eventful.ops.triton.tiles import Tile, fitting

# Weights up to this are summed without a running maximum; fp16 holds them.
_LARGEST = 2.0**15
_LARGE_TILE: Tile = {"rows": 128, "lanes": 64, "warps": 8, "stages": 4}
_MIDDLE_TILE: Tile = {"rows": 64, "lanes": 64, "warps": 4, "stages": 2}
_SHORT_TILE: Tile = {"rows": 64, "lanes": 32, "warps": 4, "stages": 3}  # for a few keys
_SMALL_TILES: tuple[Tile, ...] = (
    _MIDDLE_TILE,
    {"rows": 32, "lanes": 32, "warps": 4, "stages": 1},
    {"rows": 16, "lanes": 16, "warps": 4, "stages": 1},
)
_FEW_KEYS = 64
_FILLED = 2  # programs of the large tile per multiprocessor from which on it is the fastest


@triton.jit
def _shift(
    base, below, aside, index, j, valid, key_width,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, RELATIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What is added to the logits of a tile of keys, to base 2: less the queries' log-sum-exp."""
    shift = tl.where(valid, 0.0, -float("inf"))[None, :] - base[:, None]
    if RELATIVE:
        at_key = tl.load(index + j, mask=valid, other=0).to(tl.int32)
        shift += 1.4426950408889634 * relative_at(
            below, aside, at_key // key_width, at_key % key_width, DOWN, ACROSS, PRECISION
        )
    return shift


@triton.jit
def _logits(
    rows, k, v, shift, j, valid, stride_k, stride_v, factor,
    HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits of the queries toward a tile of keys, and the values of these keys."""
    d = tl.arange(0, HEAD_PAD)
    fits = d < HEAD
    kt = tl.load(
        k + j[None, :] * stride_k + d[:, None], mask=valid[None, :] & fits[:, None], other=0.0
    )
    values = tl.load(
        v + j[:, None] * stride_v + d[None, :], mask=valid[:, None] & fits[None, :], other=0.0
    )
    return tl.dot(rows, kt, input_precision=PRECISION) * factor + shift, values


@triton.jit
def _add_shares(score, values, weight, total, PRECISION: tl.constexpr):
    """One tile into the weight and the sum, which are shares of all keys."""
    share = tl.exp2(score)
    total = tl.dot(share.to(values.dtype), values, total, input_precision=PRECISION)
    return weight + tl.sum(share, axis=1), total


@triton.jit
def _fold(score, values, top, weight, total, PRECISION: tl.constexpr):
    """One tile into the running maximum, weight and sum."""
    higher = tl.maximum(top, tl.max(score, axis=1))
    share = tl.exp2(score - higher[:, None])
    shrink = tl.exp2(top - higher)
    weight = weight * shrink + tl.sum(share, axis=1)
    total = tl.dot(
        share.to(values.dtype), values, total * shrink[:, None], input_precision=PRECISION
    )
    return higher, weight, total


@triton.jit(do_not_specialize=["taken"])
def _add_context(
    q, lse, change, k_new, v_new, k_old, v_old, counts, slots, down, across, index,
    tokens, taken, heads, scale, key_height, key_width,
    stride_knb, stride_kn, stride_vnb, stride_vn, stride_kob, stride_ko, stride_vob, stride_vo,
    HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
    HAS_COUNT: tl.constexpr, HAS_SLOTS: tl.constexpr, RELATIVE: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, PRECISION: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    stream = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    slot = tl.load(slots + stream).to(tl.int64) if HAS_SLOTS else stream
    count = tl.minimum(tl.load(counts + stream).to(tl.int32), taken) if HAS_COUNT else taken
    if count > 0:  # a stream without changed keys is not written
        n = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
        d = tl.arange(0, HEAD_PAD)
        real = n < tokens
        keep = real[:, None] & (d < HEAD)[None, :]
        at = ((slot * tokens + n) * heads + head)[:, None] * HEAD + d[None, :]
        rows = tl.load(q + at, mask=keep, other=0.0)
        base = tl.load(lse + (slot * tokens + n) * heads + head, mask=real, other=0.0)
        base = base * 1.4426950408889634
        k_new += stream * stride_knb + head * HEAD
        v_new += stream * stride_vnb + head * HEAD
        k_old += stream * stride_kob + head * HEAD
        v_old += stream * stride_vob + head * HEAD
        index += stream * taken
        place = (stream * tokens + n) * heads + head
        factor = scale * 1.4426950408889634
        below = rows
        aside = rows
        if RELATIVE:
            y = tl.arange(0, DOWN)
            x = tl.arange(0, ACROSS)
            below = tl.load(
                down + place[:, None] * key_height + y[None, :],
                mask=real[:, None] & (y < key_height)[None, :], other=0.0,
            )  # fmt: skip
            aside = tl.load(
                across + place[:, None] * key_width + x[None, :],
                mask=real[:, None] & (x < key_width)[None, :], other=0.0,
            )  # fmt: skip

        weight_new = tl.zeros([M], dtype=tl.float32)
        weight_old = tl.zeros([M], dtype=tl.float32)
        total_new = tl.zeros([M, HEAD_PAD], dtype=tl.float32)
        total_old = tl.zeros([M, HEAD_PAD], dtype=tl.float32)
        for step in range(tl.cdiv(count, K)):
            j = step * K + tl.arange(0, K)
            valid = j < count
            shift = _shift(
                base, below, aside, index, j, valid, key_width, DOWN, ACROSS, RELATIVE, PRECISION
            )
            score, values = _logits(
                rows, k_new, v_new, shift, j, valid, stride_kn, stride_vn, factor,
                HEAD, HEAD_PAD, PRECISION,
            )  # fmt: skip
            weight_new, total_new = _add_shares(score, values, weight_new, total_new, PRECISION)
            score, values = _logits(
                rows, k_old, v_old, shift, j, valid, stride_ko, stride_vo, factor,
                HEAD, HEAD_PAD, PRECISION,
            )  # fmt: skip
            weight_old, total_old = _add_shares(score, values, weight_old, total_old, PRECISION)

        if tl.max(tl.maximum(weight_new, weight_old), axis=0) > LARGEST:
            # Keys far above all that the query knew: again, relative to the largest logit.
            top_new = tl.full([M], -float("inf"), dtype=tl.float32)
            top_old = tl.full([M], -float("inf"), dtype=tl.float32)
            weight_new = tl.zeros([M], dtype=tl.float32)
            weight_old = tl.zeros([M], dtype=tl.float32)
            total_new = tl.zeros([M, HEAD_PAD], dtype=tl.float32)
            total_old = tl.zeros([M, HEAD_PAD], dtype=tl.float32)
            for step in range(tl.cdiv(count, K)):  # each tile holds a key, so tops are finite
                j = step * K + tl.arange(0, K)
                valid = j < count
                shift = _shift(
                    base, below, aside, index, j, valid, key_width,
                    DOWN, ACROSS, RELATIVE, PRECISION,
                )  # fmt: skip
                score, values = _logits(
                    rows, k_new, v_new, shift, j, valid, stride_kn, stride_vn, factor,
                    HEAD, HEAD_PAD, PRECISION,
                )  # fmt: skip
                top_new, weight_new, total_new = _fold(
                    score, values, top_new, weight_new, total_new, PRECISION
                )
                score, values = _logits(
                    rows, k_old, v_old, shift, j, valid, stride_ko, stride_vo, factor,
                    HEAD, HEAD_PAD, PRECISION,
                )  # fmt: skip
                top_old, weight_old, total_old = _fold(
                    score, values, top_old, weight_old, total_old, PRECISION
                )
            # Of the keys' own attention, the share that they have of all keys: at most one.
            share_new = tl.exp2(tl.minimum(top_new + tl.log2(weight_new), 0.0)) / weight_new
            share_old = tl.exp2(tl.minimum(top_old + tl.log2(weight_old), 0.0)) / weight_old
            gained = total_new * share_new[:, None] - total_old * share_old[:, None]
        else:
            share_new = 1.0 / tl.maximum(weight_new, 1.0)
            share_old = 1.0 / tl.maximum(weight_old, 1.0)
            gained = total_new * share_new[:, None] - total_old * share_old[:, None]
        before = tl.load(change + at, mask=keep, other=0.0).to(tl.float32)
        tl.store(change + at, (before + gained).to(change.dtype.element_ty), mask=keep)


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
    """See `reference.add_context_`; no dense bias."""
    if 0 in new[0].shape or memory.query.shape[1] == 0:
        return
    kind, head = memory.query.dtype, memory.query.shape[2] // memory.heads
    form, tiles = _tiles(memory, len(new[0]), new[0].shape[1])
    launch = partial(_launch, memory, new, old, count, scale, slots, relative, index)
    fitting(("context", memory.query.device, kind, head, relative is None, form), tiles, launch)


def _tiles(memory: ContextMemory, batch: int, taken: int) -> tuple[str, tuple[Tile, ...]]:
    """The tiles to try, and a name for them."""
    if memory.query.dtype == torch.float32:
        return "small", _SMALL_TILES
    if taken <= _FEW_KEYS:
        return "short", (_SHORT_TILE, *_SMALL_TILES)
    programs = triton.cdiv(memory.query.shape[1], _LARGE_TILE["rows"]) * batch * memory.heads
    if programs < _FILLED * multiprocessors(memory.query.device):
        return "small", _SMALL_TILES
    return "large", (_LARGE_TILE, *_SMALL_TILES)


def _launch(
    memory: ContextMemory,
    new: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor],
    count: Tensor | None,
    scale: float,
    slots: Tensor | None,
    relative: tuple[Tensor, Tensor] | None,
    index: Tensor | None,
    **tile: int,
) -> None:
    batch, taken, width = new[0].shape
    tokens, heads = memory.query.shape[1], memory.heads
    q, head = memory.query, width // heads
    down, across = (q, q) if relative is None else (part.contiguous() for part in relative)
    sides = (1, 1) if relative is None else (down.shape[-1], across.shape[-1])
    strides = [side for part in (*new, *old) for side in part.stride()[:2]]
    _add_context[(triton.cdiv(tokens, tile["rows"]), batch * heads)](
        q, memory.lse, memory.change, *new, *old,
        q if count is None else count, q if slots is None else slots,
        down, across, q if index is None else index.contiguous(),
        tokens, taken, heads, scale, *sides, *strides,
        HEAD=head, HEAD_PAD=max(16, triton.next_power_of_2(head)), M=tile["rows"], K=tile["lanes"],
        HAS_COUNT=count is not None, HAS_SLOTS=slots is not None, RELATIVE=relative is not None,
        DOWN=max(16, triton.next_power_of_2(sides[0])),
        ACROSS=max(16, triton.next_power_of_2(sides[1])),
        PRECISION=precision(down.dtype), LARGEST=_LARGEST,
        num_warps=tile["warps"], num_stages=tile["stages"],
    )  # fmt: skip
