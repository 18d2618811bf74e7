"""Kernels of resident operator gating: gates with norms, and the exact rule's exchange."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventful.ops.reference import ExactMemory, LayerNorm, Picked
from eventful.ops.triton.attention import _fold, _weigh, precision, split_keys
from eventful.ops.triton.tiles import Tile, fitting

_LARGE_TILE: Tile = {"rows": 128, "lanes": 128, "warps": 8, "stages": 3}
_SMALL_TILES: tuple[Tile, ...] = (
    {"rows": 64, "lanes": 64, "warps": 4, "stages": 2},
    {"rows": 32, "lanes": 32, "warps": 4, "stages": 1},
    {"rows": 16, "lanes": 16, "warps": 4, "stages": 1},
)


@triton.jit
def _normed(x, weight, bias, column, inside, width, eps,
            HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """Layer norm of one row."""
    mean = tl.sum(tl.where(inside, x, 0.0), axis=0) / width
    centred = tl.where(inside, x - mean, 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    if HAS_WEIGHT:
        y = y * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y = y + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def _gate_error(
    current, update, reference, weight, bias, slots, total, errors, tokens, width, eps,
    STORED: tl.constexpr, HAS_UPDATE: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    stream = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + stream).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = (token < tokens)[:, None] & (column < width)[None, :]
    held = (slot * tokens + token)[:, None] * width + column[None, :]
    own = (stream * tokens + token)[:, None] * width + column[None, :]
    x = tl.load(current + (held if STORED else own), mask=inside, other=0.0)
    before = tl.load(reference + held, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        u = tl.load(update + held, mask=inside, other=0.0)
        x = (x.to(tl.float32) + u.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + own, x, mask=inside)
    kind: tl.constexpr = reference.dtype.element_ty
    seen = x.to(kind)
    if NORM:
        y = seen.to(tl.float32)
        mean = tl.sum(y, axis=1) / width
        y = tl.where(inside, y - mean[:, None], 0.0)
        y = y * tl.rsqrt(tl.sum(y * y, axis=1) / width + eps)[:, None]
        if HAS_WEIGHT:
            y = y * tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        if HAS_BIAS:
            y = y + tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        seen = y.to(kind)
    error = tl.where(inside, seen.to(tl.float32) - before, 0.0)
    norm = tl.sqrt(tl.sum(error * error, axis=1))
    tl.store(errors + stream * tokens + token, norm, mask=token < tokens)


def gate_error(
    current: Tensor,
    reference_: Tensor,
    slots: Tensor,
    norm: LayerNorm | None = None,
    update: Tensor | None = None,
    stored: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `reference.gate_error`."""
    batch, (tokens, width) = len(slots), current.shape[1:]
    total = current if update is None else torch.empty_like(current)
    errors = torch.empty(batch, tokens, dtype=torch.float32, device=current.device)
    block = triton.next_power_of_2(width)
    rows = 4 if block <= 1024 else 1
    _gate_error[(triton.cdiv(tokens, rows), batch)](
        current, current if update is None else update, reference_,
        *_norm_parts(norm, current), slots, total, errors, tokens, width,
        0.0 if norm is None else norm.eps,
        STORED=stored, HAS_UPDATE=update is not None, **_norm_flags(norm), WIDTH=block, ROWS=rows,
        num_warps=4,
    )  # fmt: skip
    return total, errors


def _norm_parts(norm: LayerNorm | None, filler: Tensor) -> tuple[Tensor, Tensor]:
    parts = (None, None) if norm is None else (norm.weight, norm.bias)
    return tuple(filler if part is None else part for part in parts)  # type: ignore[return-value]


def _norm_flags(norm: LayerNorm | None) -> dict[str, bool]:
    return {
        "NORM": norm is not None,
        "HAS_WEIGHT": norm is not None and norm.weight is not None,
        "HAS_BIAS": norm is not None and norm.bias is not None,
    }


@triton.jit
def _gate_rows(
    current, reference, weight, bias, index, counts, slots, out, tokens, taken, width, eps,
    STORED: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + stream).to(tl.int64)
    token = tl.load(index + stream * taken + row)
    column = tl.arange(0, WIDTH)
    inside = column < width
    held = (slot * tokens + token) * width + column
    own = (stream * tokens + token) * width + column
    kind: tl.constexpr = out.dtype.element_ty
    x = tl.load(current + (held if STORED else own), mask=inside, other=0.0).to(kind)
    if NORM:
        x = _normed(x.to(tl.float32), weight, bias, column, inside, width, eps,
                    HAS_WEIGHT, HAS_BIAS).to(kind)  # fmt: skip
    tl.store(out + (stream * taken + row) * width + column, x, mask=inside)
    tl.store(reference + held, x, mask=inside & (row < tl.load(counts + stream)))


def gate_rows(
    current: Tensor,
    reference_: Tensor,
    index: Tensor,
    count: Tensor,
    slots: Tensor,
    norm: LayerNorm | None = None,
    stored: bool = False,
) -> Tensor:
    """See `reference.gate_rows`."""
    batch, taken = index.shape
    tokens, width = current.shape[1:]
    out = torch.empty(batch, taken, width, dtype=reference_.dtype, device=current.device)
    block = triton.next_power_of_2(width)
    if taken:
        _gate_rows[(taken, batch)](
            current, reference_, *_norm_parts(norm, current), index, count, slots, out,
            tokens, taken, width, 0.0 if norm is None else norm.eps,
            STORED=stored, **_norm_flags(norm), WIDTH=block,
            num_warps=2 if block <= 1024 else 4,
        )  # fmt: skip
    return out


@triton.jit
def _add_held(tokens, memory, slots, out, size, BLOCK: tl.constexpr):
    stream = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + stream).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(tokens + stream * size + at, mask=inside)
    u = tl.load(memory + slot * size + at, mask=inside)
    total = (x.to(tl.float32) + u.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + stream * size + at, total, mask=inside)


def add_held(tokens: Tensor, memory: Tensor, slots: Tensor) -> Tensor:
    """See `reference.add_held`."""
    out = torch.empty_like(tokens)
    size, block = tokens[0].numel(), 2048
    _add_held[(triton.cdiv(size, block), len(tokens))](
        tokens, memory, slots, out, size, BLOCK=block, num_warps=8
    )
    return out


@triton.jit(do_not_specialize=["tiles"])
def _exchange(
    q, k_new, v_new, k_old, v_old, out, lse, condition, counts, places, slots,
    claimed, lost_rows, lost_counts,
    tokens, taken, heads, scale, rebase, lost_width, stride_kb, stride_km, stride_vb, stride_vm,
    tiles, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, M: tl.constexpr,
    K: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    stream = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    slot = tl.load(slots + stream).to(tl.int64)
    count = tl.load(counts + stream)
    n = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, HEAD_PAD)
    fits = d < HEAD
    real = n < tokens
    moves = real & (tl.load(places + stream * tokens + n, mask=real, other=0) < 0) & (count > 0)
    width = heads * HEAD
    at = (slot * tokens + n.to(tl.int64)) * width + head * HEAD
    keep = moves[:, None] & fits[None, :]
    rows = tl.load(q + at[:, None] + d[None, :], mask=keep, other=0.0)
    place = (slot * tokens + n.to(tl.int64)) * heads + head
    held = tl.load(lse + place, mask=moves, other=0.0)
    base = held * 1.4426950408889634

    # Weights relative to the row's own sum: an old share is at most 1, and no maximum is needed.
    # A new share beyond 2^60 would drown the rest; such rows are recomputed.
    gain = tl.zeros([M], dtype=tl.float32)
    loss = tl.zeros([M], dtype=tl.float32)
    change = tl.zeros([M, HEAD_PAD], dtype=tl.float32)
    factor = scale * 1.4426950408889634
    k_new += stream * stride_kb + head * HEAD
    v_new += stream * stride_vb + head * HEAD
    k_old += stream * taken * width + head * HEAD
    v_old += stream * taken * width + head * HEAD
    for tile in range(tiles):
        j = tile * K + tl.arange(0, K)
        valid = j < count
        kn, ko = (
            k_new + j[None, :] * stride_km + d[:, None],
            k_old + j[None, :] * width + d[:, None],
        )
        vn, vo = (
            v_new + j[:, None] * stride_vm + d[None, :],
            v_old + j[:, None] * width + d[None, :],
        )
        if FULL:
            kn, ko, vn, vo = tl.load(kn), tl.load(ko), tl.load(vn), tl.load(vo)
        else:
            across, along = valid[None, :] & fits[:, None], valid[:, None] & fits[None, :]
            kn, ko = tl.load(kn, mask=across, other=0.0), tl.load(ko, mask=across, other=0.0)
            vn, vo = tl.load(vn, mask=along, other=0.0), tl.load(vo, mask=along, other=0.0)
        score = tl.dot(rows, kn, input_precision=PRECISION) * factor - base[:, None]
        share = tl.exp2(tl.minimum(tl.where(valid[None, :], score, -float("inf")), 60.0))
        gain += tl.sum(share, axis=1)
        change = tl.dot(share.to(vn.dtype), vn, change, input_precision=PRECISION)
        score = tl.dot(rows, ko, input_precision=PRECISION) * factor - base[:, None]
        share = tl.exp2(tl.minimum(tl.where(valid[None, :], score, -float("inf")), 60.0))
        loss += tl.sum(share, axis=1)
        change = tl.dot((-share).to(vo.dtype), vo, change, input_precision=PRECISION)

    if count > 0:
        grown = tl.load(condition + place, mask=moves, other=1.0)
        before = tl.load(out + at[:, None] + d[None, :], mask=keep, other=0.0)
        total = 1.0 + gain - loss
        lost = ~(total > 0) | (gain > 1e9)
        safe = tl.where(lost, 1.0, total)
        merged_lse = tl.where(lost, held, held + tl.log(safe))
        grown = (grown + (gain + loss) * (1 + tl.abs(merged_lse))) / safe
        grown = tl.where(lost, float("inf"), grown)
        merged = (before + change) / safe[:, None]
        tl.store(out + at[:, None] + d[None, :], merged, mask=keep & ~lost[:, None])
        tl.store(lse + place, merged_lse, mask=moves)
        tl.store(condition + place, grown, mask=moves)
        # Few rows are beyond their limit: the first head to find one puts it on the list.
        beyond = moves & (grown > tl.maximum(2 * (1 + tl.abs(merged_lse)), rebase))
        seen = tl.atomic_max(claimed + stream * tokens + n, 1, mask=beyond)
        first = beyond & (seen == 0)
        nowhere = tl.zeros([M], dtype=tl.int64)
        spot = tl.atomic_add(lost_counts + stream + nowhere, nowhere + 1, mask=first)
        tl.store(
            lost_rows + stream * lost_width + spot, n.to(tl.int64), mask=first & (spot < lost_width)
        )


def exchange_(
    memory: ExactMemory,
    new: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor],
    picked: Picked,
    scale: float,
    rebase: float,
    slots: Tensor,
    width: int,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.exchange_`; of too many rows the first found are taken, not the worst."""
    kind, head = memory.query.dtype, memory.query.shape[2] // memory.heads
    tiles = _SMALL_TILES if kind == torch.float32 else (_LARGE_TILE, *_SMALL_TILES)
    launch = partial(_launch_exchange, memory, new, old, picked, scale, rebase, slots, width)
    return fitting(("exchange", slots.device, kind, head), tiles, launch)


def _launch_exchange(
    memory: ExactMemory,
    new: tuple[Tensor, Tensor],
    old: tuple[Tensor, Tensor],
    picked: Picked,
    scale: float,
    rebase: float,
    slots: Tensor,
    width: int,
    **tile: int,
) -> tuple[Tensor, Tensor]:
    rows, lanes = tile["rows"], tile["lanes"]
    batch, taken = picked.index.shape
    tokens, heads = memory.query.shape[1], memory.heads
    head = memory.query.shape[2] // heads
    device = slots.device
    pad = max(16, triton.next_power_of_2(head))
    claimed = torch.zeros(batch, tokens, dtype=torch.int32, device=device)
    lost = torch.empty(batch, width, dtype=torch.int64, device=device)
    lost_count = torch.zeros(batch, dtype=torch.int64, device=device)
    if taken:
        _exchange[(triton.cdiv(tokens, rows), batch * heads)](
            memory.query, *new, *(part.contiguous() for part in old),
            memory.out, memory.lse, memory.condition,
            picked.count, picked.places, slots, claimed, lost, lost_count,
            tokens, taken, heads, scale, rebase, width, *new[0].stride()[:2], *new[1].stride()[:2],
            tiles=triton.cdiv(taken, lanes), HEAD=head, HEAD_PAD=pad, M=rows, K=lanes,
            FULL=taken % lanes == 0 and head == pad,
            PRECISION=precision(new[0].dtype), num_warps=tile["warps"], num_stages=tile["stages"],
        )  # fmt: skip
    return lost, lost_count


@triton.jit
def _row_of(m, first, first_count, first_taken, second, second_count, second_taken, stream):
    """The token that slot m of two lists stands for, -1 for padding."""
    in_first = m < first_taken
    n1 = tl.load(first_count + stream)
    n2 = tl.load(second_count + stream)
    a = tl.load(first + stream * first_taken + m, mask=in_first & (m < n1), other=-1)
    rest = m - first_taken
    b = tl.load(
        second + stream * second_taken + rest,
        mask=(rest >= 0) & (rest < second_taken) & (rest < n2), other=-1,
    )  # fmt: skip
    return tl.where(in_first, a, b)


@triton.jit(do_not_specialize=["tiles"])
def _attend_rows(
    q, k, v, first, first_count, second, second_count, slots, parts, part_lse,
    first_taken, second_taken, tokens, heads, scale,
    tiles, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, M: tl.constexpr,
    K: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    stream = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    part = tl.program_id(2)
    slot = tl.load(slots + stream).to(tl.int64)
    m = tl.program_id(0) * M + tl.arange(0, M)
    token = _row_of(m, first, first_count, first_taken, second, second_count, second_taken, stream)
    real = token >= 0
    d = tl.arange(0, HEAD_PAD)
    fits = d < HEAD
    width = heads * HEAD
    base = slot * tokens * width + head * HEAD
    keep = real[:, None] & fits[None, :]
    rows = tl.load(q + base + token[:, None] * width + d[None, :], mask=keep, other=0.0)
    top = tl.full([M], -float("inf"), dtype=tl.float32)
    weight = tl.zeros([M], dtype=tl.float32)
    total = tl.zeros([M, HEAD_PAD], dtype=tl.float32)
    for step in range(tiles):
        top, weight, total = _fold(
            rows, k + base, v + base, rows, parts, token, real, part * tiles + step,
            top, weight, total, tokens, 1, width, width, scale,
            HEAD, HEAD_PAD, K, False, 1, FULL, PRECISION,
        )  # fmt: skip
    if TAIL:  # noqa: SIM102 - the outer test is for the compiler
        if part == tl.num_programs(2) - 1:
            top, weight, total = _fold(
                rows, k + base, v + base, rows, parts, token, real, tokens // K,
                top, weight, total, tokens, 1, width, width, scale,
                HEAD, HEAD_PAD, K, False, 1, False, PRECISION,
            )  # fmt: skip
    every = first_taken + second_taken
    streams = tl.num_programs(1) // heads
    place = ((part * streams + stream) * every + m) * heads + head
    tl.store(parts + place[:, None] * HEAD + d[None, :], total / weight[:, None], mask=keep)
    tl.store(part_lse + place, top + tl.log2(weight), mask=real)


@triton.jit
def _settle_rows(
    parts, part_lse, out, lse, condition, first, first_count, second, second_count, slots,
    first_taken, second_taken, tokens, heads,
    PARTS: tl.constexpr, HEADS_PAD: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    stream = tl.program_id(1).to(tl.int64)
    every = first_taken + second_taken
    token = _row_of(m, first, first_count, first_taken, second, second_count, second_taken, stream)
    if token >= 0:
        slot = tl.load(slots + stream).to(tl.int64)
        head = tl.arange(0, HEADS_PAD)
        d = tl.arange(0, HEAD_PAD)
        real = head < heads
        keep = real[:, None] & (d < HEAD)[None, :]
        rows = tl.num_programs(1).to(tl.int64) * every
        total, found = _weigh(
            parts, part_lse, rows, stream * every + m, heads, PARTS, HEADS_PAD, HEAD, HEAD_PAD
        )
        place = (slot * tokens + token) * heads + head
        tl.store(out + place[:, None] * HEAD + d[None, :], total, mask=keep)
        tl.store(lse + place, found, mask=real)
        tl.store(condition + place, 1 + tl.abs(found), mask=real)


def recompute_(
    memory: ExactMemory,
    rows: tuple[tuple[Tensor, Tensor], ...],
    scale: float,
    slots: Tensor,
    bias: Tensor | None = None,
) -> None:
    """See `reference.recompute_`; two lists of rows at most."""
    head = memory.query.shape[2] // memory.heads
    key = ("recompute", slots.device, memory.query.dtype, head)
    tiles = ({"most": 64, "lanes": 64}, {"most": 32, "lanes": 32}, {"most": 16, "lanes": 16})
    fitting(key, tiles, partial(_launch_recompute, memory, rows, scale, slots))


def _launch_recompute(
    memory: ExactMemory,
    rows: tuple[tuple[Tensor, Tensor], ...],
    scale: float,
    slots: Tensor,
    *,
    most: int,
    lanes: int,
) -> None:
    first, second = rows[0], rows[-1]
    taken = (first[0].shape[1], second[0].shape[1] if len(rows) > 1 else 0)
    every = sum(taken)
    batch, heads = len(slots), memory.heads
    tokens, head = memory.query.shape[1], memory.query.shape[2] // heads
    if every == 0:
        return
    held, plan = split_keys(every, tokens, lanes, batch * heads, slots.device)
    held, splits = min(held, most), plan.splits
    device = slots.device
    parts = torch.empty(splits, batch, every, heads, head, dtype=torch.float32, device=device)
    part_lse = torch.empty(splits, batch, every, heads, dtype=torch.float32, device=device)
    lists = (*first, *second)
    pad = max(16, triton.next_power_of_2(head))
    _attend_rows[(triton.cdiv(every, held), batch * heads, splits)](
        memory.query, memory.key, memory.value, *lists, slots, parts, part_lse,
        *taken, tokens, heads, scale,
        tiles=plan.tiles, HEAD=head, HEAD_PAD=pad, M=held, K=lanes, FULL=plan.full, TAIL=plan.tail,
        PRECISION=precision(memory.query.dtype), num_warps=4, num_stages=3,
    )  # fmt: skip
    _settle_rows[(every, batch)](
        parts, part_lse, memory.out, memory.lse, memory.condition, *lists, slots,
        *taken, tokens, heads, PARTS=splits, HEADS_PAD=triton.next_power_of_2(heads),
        HEAD=head, HEAD_PAD=pad, num_warps=4,
    )  # fmt: skip
