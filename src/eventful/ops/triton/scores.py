"""Scores at a frame gate on the device: each operation in one or two kernels.

`_hypot` and powers are written out, since the interpreter has no library functions of the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventful.ops.reference import REPORT, Picked
from eventful.ops.reference import scores as rules

MOST_CHANGES = 8  # memories of context that one launch reads
_TILE = 1024  # tokens that one program sums at a time


@triton.jit
def _hypot(a, b):
    """Root of a^2 + b^2 of numbers that are not negative, without overflow; NaN stays NaN."""
    large = tl.where(a > b, a, b)
    small = tl.where(a > b, b, a)
    ratio = small / tl.where(large == 0, 1.0, large)
    return large * tl.sqrt(1 + ratio * ratio)


@triton.jit
def _relative_change(
    change, size, slot, row, tokens, width, TINY: tl.constexpr, WIDTH: tl.constexpr
):
    """Norms of some rows of a memory, relative to the size of its stream."""
    column = tl.arange(0, WIDTH)
    inside = (row < tokens)[:, None] & (column < width)[None, :]
    at = change + (slot * tokens + row)[:, None] * width + column[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    norm = tl.sqrt(tl.sum(x * x, axis=1))
    unit = tl.load(size + slot).to(tl.float32)
    return norm / tl.where(unit < TINY, TINY, unit)


@triton.jit
def _lost(motion, stream, row, prefix, high, wide):
    """Which tokens' content was more than half a token outside the grid."""
    place = row - prefix
    own = (place >= 0) & (place < high * wide)
    moves = motion + (stream * high * wide + place) * 2
    y = place // wide + tl.load(moves, mask=own, other=0.0).to(tl.float32)
    x = place % wide + tl.load(moves + 1, mask=own, other=0.0).to(tl.float32)
    return own & ((y < -0.5) | (y > high - 0.5) | (x < -0.5) | (x > wide - 0.5))


@triton.jit
def _frame_score(
    errors, contrasts, motion, slots, out,
    change0, change1, change2, change3, change4, change5, change6, change7,
    size0, size1, size2, size3, size4, size5, size6, size7,
    tokens, width, share, prefix, high, wide,
    CHANGES: tl.constexpr, MOVES: tl.constexpr, HAS_SLOTS: tl.constexpr,
    LOST: tl.constexpr, FAINT: tl.constexpr, TINY: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    stream = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + stream).to(tl.int64) if HAS_SLOTS else stream
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < tokens
    contrast = tl.load(contrasts + stream)
    score = tl.load(errors + stream * tokens + row, mask=real, other=0.0)
    if MOVES:
        lost = _lost(motion, stream, row, prefix, high, wide)
        score = tl.where(lost, score + LOST * contrast, score)
    if CHANGES > 0:
        total = _relative_change(change0, size0, slot, row, tokens, width, TINY, WIDTH)
        if CHANGES > 1:
            total += _relative_change(change1, size1, slot, row, tokens, width, TINY, WIDTH)
        if CHANGES > 2:
            total += _relative_change(change2, size2, slot, row, tokens, width, TINY, WIDTH)
        if CHANGES > 3:
            total += _relative_change(change3, size3, slot, row, tokens, width, TINY, WIDTH)
        if CHANGES > 4:
            total += _relative_change(change4, size4, slot, row, tokens, width, TINY, WIDTH)
        if CHANGES > 5:
            total += _relative_change(change5, size5, slot, row, tokens, width, TINY, WIDTH)
        if CHANGES > 6:
            total += _relative_change(change6, size6, slot, row, tokens, width, TINY, WIDTH)
        if CHANGES > 7:
            total += _relative_change(change7, size7, slot, row, tokens, width, TINY, WIDTH)
        caused = total * share
        caused = tl.where(caused < FAINT, 0.0, caused)
        score = _hypot(score, caused * contrast)
    tl.store(out + stream * tokens + row, score, mask=real)


def frame_score(
    error: Tensor,
    contrast: Tensor,
    changes: tuple[Tensor, ...],
    sizes: tuple[Tensor, ...],
    weight: float,
    motion: Tensor | None,
    prefix: int,
    slots: Tensor | None,
) -> Tensor:
    """See `reference.frame_score`; up to MOST_CHANGES memories."""
    if motion is None and not changes:
        return error
    batch, tokens = error.shape
    out = torch.empty_like(error)
    if out.numel() == 0:
        return out
    width = changes[0].shape[-1] if changes else 1
    high, wide = (0, 1) if motion is None else motion.shape[1:3]
    block = triton.next_power_of_2(width)
    rows = 4 if changes else 256
    unread = (error,) * (MOST_CHANGES - len(changes))  # any pointer will do
    _frame_score[(triton.cdiv(tokens, rows), batch)](
        error, contrast, error if motion is None else motion, error if slots is None else slots,
        out, *changes, *unread, *sizes, *unread,
        tokens, width, weight / max(len(changes), 1), prefix, high, wide,
        CHANGES=len(changes), MOVES=motion is not None, HAS_SLOTS=slots is not None,
        LOST=rules.LOST, FAINT=rules.FAINT, TINY=rules.TINY, ROWS=rows, WIDTH=block, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _estimate_error(
    errors, contrasts, places, moved, turns, renewals, slots, report, tokens,
    HAS_SLOTS: tl.constexpr, TILE: tl.constexpr, REPORT: tl.constexpr, TINY: tl.constexpr,
    LEAST: tl.constexpr, FACTOR: tl.constexpr, BY_ERROR: tl.constexpr, BY_CHANGE: tl.constexpr,
    LASTING: tl.constexpr, HIGHEST: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    stream = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + stream).to(tl.int64) if HAS_SLOTS else stream
    contrast = tl.load(contrasts + stream)
    contrast = tl.where(contrast < TINY, TINY, contrast)
    total = tl.zeros([TILE], dtype=tl.float32)
    for start in range(0, tokens, TILE):
        token = start + tl.arange(0, TILE)
        real = token < tokens
        place = tl.load(places + stream * tokens + token, mask=real, other=0)
        error = tl.load(errors + stream * tokens + token, mask=real & (place < 0), other=0.0)
        error = error / contrast
        total += error * error
    rest = tl.sqrt(tl.sum(total, axis=0) / tokens)
    waiting = tl.where(rest < LEAST, LEAST, rest)
    change = tl.load(moved + slot)
    change = tl.where(change != change, waiting, change)
    change = tl.where(change < LEAST, LEAST, change)
    estimate = FACTOR * tl.exp2(BY_ERROR * tl.log2(waiting) + BY_CHANGE * tl.log2(change))
    estimate = tl.where(rest == 0, 0.0, estimate)
    turn = tl.load(turns + stream).to(tl.float32)
    renewal = tl.load(renewals + stream).to(tl.float32)
    report += stream * REPORT
    lasting = tl.where(estimate > LASTING, LASTING, estimate)
    if (lasting * turn > renewal) & (tl.load(report + 1) > 0):
        tl.store(report + 2, 1)
    shown = tl.where(estimate > HIGHEST, HIGHEST, estimate)
    shown = tl.where(shown == shown, shown, 0.0)
    tl.store(report + 5, (shown * UNIT).to(tl.int32))


def estimate_error_(
    error: Tensor,
    contrast: Tensor,
    picked: Picked,
    moved: Tensor,
    turn: Tensor,
    renewal: Tensor,
    slots: Tensor | None,
    report: Tensor,
) -> None:
    """See `reference.estimate_error_`; with known places."""
    batch, tokens = error.shape
    _estimate_error[(batch,)](
        error, contrast, picked.places, moved, turn, renewal, turn if slots is None else slots,
        report, tokens, HAS_SLOTS=slots is not None,
        TILE=min(_TILE, triton.next_power_of_2(tokens)), REPORT=REPORT, TINY=rules.TINY,
        LEAST=rules.LEAST, FACTOR=rules.FACTOR, BY_ERROR=rules.BY_ERROR,
        BY_CHANGE=rules.BY_CHANGE, LASTING=rules.LASTING, HIGHEST=rules.HIGHEST, UNIT=rules.UNIT,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _normed(x, inside, width, EPS: tl.constexpr):
    """Layer norm of one row, without weights."""
    centred = tl.where(inside, x - tl.sum(x, axis=0) / width, 0.0)
    return centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + EPS)


@triton.jit
def _change_of_rows(
    rows, memory, index, counts, slots, squares, taken, width,
    stride_rb, stride_rm, stride_mb, stride_mn, stride_ib,
    HAS_COUNT: tl.constexpr, HAS_SLOTS: tl.constexpr, EPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Mean square of the difference of normed rows, (B, M); padding is left out."""
    stream = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64)
    many = tl.load(counts + stream) if HAS_COUNT else taken
    if row < many:
        slot = tl.load(slots + stream).to(tl.int64) if HAS_SLOTS else stream
        token = tl.load(index + stream * stride_ib + row)
        column = tl.arange(0, WIDTH)
        inside = column < width
        new = tl.load(rows + stream * stride_rb + row * stride_rm + column, mask=inside, other=0.0)
        at = memory + slot * stride_mb + token * stride_mn + column
        old = tl.load(at, mask=inside, other=0.0)
        apart = _normed(new.to(tl.float32), inside, width, EPS)
        apart -= _normed(old.to(tl.float32), inside, width, EPS)
        tl.store(squares + stream * taken + row, tl.sum(apart * apart, axis=0) / width)


@triton.jit
def _follow_change(
    squares, counts, slots, moved, taken,
    HAS_COUNT: tl.constexpr, HAS_SLOTS: tl.constexpr, KEPT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    stream = tl.program_id(0).to(tl.int64)
    many = tl.load(counts + stream).to(tl.int32) if HAS_COUNT else taken
    if many > 0:
        slot = tl.load(slots + stream).to(tl.int64) if HAS_SLOTS else stream
        total = tl.zeros([TILE], dtype=tl.float32)
        for start in range(0, many, TILE):
            row = start + tl.arange(0, TILE)
            total += tl.load(squares + stream * taken + row, mask=row < many, other=0.0)
        now = tl.sqrt(tl.sum(total, axis=0) / many)
        before = tl.load(moved + slot)
        after = tl.where(before != before, now, now + KEPT * (before - now))
        tl.store(moved + slot, after)


def follow_change_(
    moved: Tensor,
    rows: Tensor,
    memory: Tensor,
    index: Tensor,
    count: Tensor | None,
    slots: Tensor | None,
) -> None:
    """See `reference.follow_change_`."""
    batch, taken, width = rows.shape
    if 0 in rows.shape:
        return
    squares = torch.empty(batch, taken, dtype=torch.float32, device=rows.device)
    counts, own = index if count is None else count, index if slots is None else slots
    has = {"HAS_COUNT": count is not None, "HAS_SLOTS": slots is not None}
    _change_of_rows[(taken, batch)](
        rows, memory, index, counts, own, squares, taken, width,
        *rows.stride()[:2], *memory.stride()[:2], index.stride(0),
        **has, EPS=rules.EPS, WIDTH=triton.next_power_of_2(width),
        num_warps=2 if width <= 1024 else 4,
    )  # fmt: skip
    _follow_change[(batch,)](
        squares, counts, own, moved, taken,
        **has, KEPT=rules.KEPT, TILE=min(_TILE, triton.next_power_of_2(taken)), num_warps=4,
    )  # fmt: skip


@triton.jit
def _contrast(patches, out, taken, width, stride_b, stride_n, R: tl.constexpr, W: tl.constexpr):
    """The sum of the variances of W channels over some patches."""
    stream = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * W + tl.arange(0, W)
    fits = column < width
    patches += stream * stride_b + column
    # Apart from the first one, so that equal patches have no contrast at all.
    first = tl.load(patches, mask=fits, other=0.0).to(tl.float32)
    total = tl.zeros([W], dtype=tl.float32)
    for start in range(0, taken, R):
        row = start + tl.arange(0, R)
        there = (row < taken)[:, None] & fits[None, :]
        at = patches[None, :] + row.to(tl.int64)[:, None] * stride_n
        total += tl.sum(
            tl.where(there, tl.load(at, mask=there).to(tl.float32) - first, 0.0), axis=0
        )
    mean = total / taken
    spread = tl.zeros([W], dtype=tl.float32)
    for start in range(0, taken, R):
        row = start + tl.arange(0, R)
        there = (row < taken)[:, None] & fits[None, :]
        at = patches[None, :] + row.to(tl.int64)[:, None] * stride_n
        apart = tl.where(there, tl.load(at, mask=there).to(tl.float32) - first - mean, 0.0)
        spread += tl.sum(apart * apart, axis=0)
    tl.store(out + stream * tl.num_programs(0) + tl.program_id(0), tl.sum(spread, axis=0) / taken)


def contrast(patches: Tensor) -> Tensor:
    """See `reference.contrast`."""
    drawn = rules.spread_sample(patches)
    batch, taken, width = drawn.shape
    parts = triton.cdiv(width, 64)
    out = torch.empty(batch, parts, device=patches.device)
    _contrast[(parts, batch)](
        drawn, out, taken, width, *drawn.stride()[:2], R=64, W=64, num_warps=4
    )
    return out.sum(dim=1).sqrt()
