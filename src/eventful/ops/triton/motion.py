"""Motion between two frames on the device: one program finds one token's motion.

Programs whose token cannot have moved end after one comparison. Products are not fused with
sums, so that costs and interpolated rows have the reference's bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventful.ops.reference import motion as rules

_PIXELS = 256  # coarse pixels of a program that prepares pictures


@triton.jit
def _prepare_pictures(
    now, before, slots, fine, coarse, bad, high, wide, streams,
    HAS_SLOTS: tl.constexpr, LEVELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Rounded pictures and their 2 x 2 means, and which streams have a pixel that is no number.

    `high` and `wide` are the coarse picture's. Results are (2, B, ...): now, before.
    """
    stream = tl.program_id(1).to(tl.int64)
    which = tl.program_id(2)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    real = pixel < high * wide
    corner = (pixel // wide) * 4 * wide + (pixel % wide) * 2  # a fine row is 2 * wide
    size = 4 * high * wide
    out = fine + (which * streams + stream) * size
    total = tl.zeros([PIXELS], dtype=tl.float32)
    wrong = tl.zeros([PIXELS], dtype=tl.int32)
    for part in tl.static_range(4):
        at = corner + (part // 2) * 2 * wide + part % 2
        if which == 0:
            value = tl.load(now + stream * size + at, mask=real, other=0.0).to(tl.float32)
        else:
            slot = tl.load(slots + stream).to(tl.int64) if HAS_SLOTS else stream
            value = tl.load(before + slot * size + at, mask=real, other=0.0).to(tl.float32)
        wrong += ((value != value) | (tl.abs(value) == float("inf"))).to(tl.int32)
        value = tl.floor(value * LEVELS + 0.5) * (1.0 / LEVELS)
        tl.store(out + at, value, mask=real)
        total += value
    out = coarse + (which * streams + stream) * high * wide
    tl.store(out + pixel, total * 0.25, mask=real)
    if tl.sum(wrong, axis=0) > 0:
        tl.atomic_max(bad + stream, 1)


@triton.jit
def _match_blocks(
    fine, coarse, bad, hint, out, high, wide, streams,
    HAS_HINT: tl.constexpr, CELL: tl.constexpr, REACH: tl.constexpr, PULL: tl.constexpr,
    LIMIT_SHARE: tl.constexpr, LEAST: tl.constexpr, FURTHEST: tl.constexpr,
    OFFSETS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    stream = tl.program_id(1).to(tl.int64)
    row, column = token // wide, token % wide
    size = high * wide * CELL * CELL
    now, before = fine + stream * size, fine + (streams + stream) * size
    down = tl.zeros([1], dtype=tl.int32)
    across = tl.zeros([1], dtype=tl.int32)
    rest = tl.sum(_window_sums(now, before, row, column, down, across, high, wide, CELL, 1), axis=0)
    count = (_seen(row, high, CELL) * _seen(column, wide, CELL)).to(tl.float32)
    limit = LIMIT_SHARE * rest - LEAST * count
    found_y = tl.zeros([], dtype=tl.int32)
    found_x = tl.zeros([], dtype=tl.int32)
    if (limit > 0) & (tl.load(bad + stream) == 0):
        centre_y = tl.zeros([], dtype=tl.int32)
        centre_x = tl.zeros([], dtype=tl.int32)
        searched = True
        if HAS_HINT:
            given = hint + (stream * high * wide + token) * 2
            y, x = tl.load(given).to(tl.float32), tl.load(given + 1).to(tl.float32)
            searched = (tl.abs(y) < float("inf")) & (tl.abs(x) < float("inf"))
            searched = searched == 0  # of a NaN every comparison is false
            y = tl.where(searched, 0.0, y)
            x = tl.where(searched, 0.0, x)
            centre_y = _fine_pixels(y, CELL, FURTHEST)
            centre_x = _fine_pixels(x, CELL, FURTHEST)
        if searched:
            smaller = size // 4
            centre_y, centre_x, _ = _best_offset(
                coarse + stream * smaller, coarse + (streams + stream) * smaller,
                row, column, tl.zeros([], dtype=tl.int32), tl.zeros([], dtype=tl.int32),
                high, wide, CELL // 2, CELL, REACH, PULL * 2, OFFSETS,
            )  # fmt: skip
            centre_y *= 2
            centre_x *= 2
        centre_y, centre_x, cost = _best_offset(
            now, before, row, column, centre_y, centre_x, high, wide, CELL, CELL, 1, PULL, 16
        )
        found_y = tl.where(cost < limit, centre_y, 0)
        found_x = tl.where(cost < limit, centre_x, 0)
    at = out + (stream * high * wide + token) * 2
    tl.store(at, found_y.to(tl.float32) * (1.0 / CELL))
    tl.store(at + 1, found_x.to(tl.float32) * (1.0 / CELL))


@triton.jit
def _fine_pixels(tokens, CELL: tl.constexpr, FURTHEST: tl.constexpr):
    """A hint in whole fine pixels."""
    near = tl.minimum(tl.maximum(tokens, -FURTHEST), FURTHEST)
    return tl.floor(near * CELL + 0.5).to(tl.int32)


@triton.jit
def _seen(token, tokens, CELL: tl.constexpr):
    """Pixels of a token's window inside the picture, along one axis."""
    start = tl.maximum(token * CELL - CELL // 2, 0)
    return tl.minimum(token * CELL + CELL + CELL // 2, tokens * CELL) - start


@triton.jit
def _best_offset(
    now, before, row, column, centre_y, centre_x, high, wide,
    CELL: tl.constexpr, FINE: tl.constexpr, REACH: tl.constexpr, PULL: tl.constexpr,
    OFFSETS: tl.constexpr,
):  # fmt: skip
    """The best of the offsets within REACH of the centre, and its cost times the pixels.

    FINE is the cell of the fine picture, CELL that of these pictures.
    """
    SIDE: tl.constexpr = 2 * REACH + 1
    MIDDLE: tl.constexpr = SIDE * REACH + REACH
    offset = tl.arange(0, OFFSETS)
    used = offset < SIDE * SIDE
    place = tl.where(used, offset, MIDDLE)
    down = centre_y + place // SIDE - REACH
    across = centre_x + place % SIDE - REACH
    count = (_seen(row, high, CELL) * _seen(column, wide, CELL)).to(tl.float32)
    cost = _window_sums(now, before, row, column, down, across, high, wide, CELL, OFFSETS)
    cost += PULL * (tl.abs(down) + tl.abs(across)).to(tl.float32) * count
    best = tl.min(cost, axis=0)
    # Of equal costs the middle wins, then the first.
    rank = tl.where(offset == MIDDLE, -1, offset)
    rank = tl.min(tl.where(used & (cost == best), rank, OFFSETS), axis=0)
    first = tl.where(rank < 0, MIDDLE, rank)
    return centre_y + first // SIDE - REACH, centre_x + first % SIDE - REACH, best


@triton.jit
def _window_sums(
    now, before, row, column, down, across, high, wide, CELL: tl.constexpr, OFFSETS: tl.constexpr
):  # fmt: skip
    """(OFFSETS,) sums of absolute differences over a token's window, for each offset."""
    bottom, right = high * CELL - 1, wide * CELL - 1
    x = column * CELL - CELL // 2 + tl.arange(0, 2 * CELL)
    x_inside = (x >= 0) & (x <= right)
    own_x = tl.minimum(tl.maximum(x, 0), right)
    moved_x = tl.minimum(tl.maximum(x[None, :] + across[:, None], 0), right)
    total = tl.zeros([OFFSETS, 2 * CELL], dtype=tl.float32)
    first = row * CELL - CELL // 2
    for step in range(2 * CELL):
        y = first + step
        own_y = tl.minimum(tl.maximum(y, 0), bottom)
        mine = tl.load(now + own_y * (right + 1) + own_x)
        moved_y = tl.minimum(tl.maximum(y + down, 0), bottom)
        theirs = tl.load(before + (moved_y * (right + 1))[:, None] + moved_x)
        inside = x_inside & (y >= 0) & (y <= bottom)
        total += tl.where(inside[None, :], tl.abs(mine[None, :] - theirs), 0.0)
    return tl.sum(total, axis=1)


def match_blocks(
    now: Tensor, before: Tensor, slots: Tensor | None, hint: Tensor | None = None
) -> Tensor:
    """See `reference.match_blocks`."""
    (batch, *sides), device = now.shape, now.device
    high, wide = (side // rules.CELL for side in sides)
    out = torch.empty(batch, high, wide, 2, dtype=torch.float32, device=device)
    if out.numel() == 0:
        return out
    fine = torch.empty(2, batch, *sides, dtype=torch.float32, device=device)
    coarse = torch.empty(2, batch, sides[0] // 2, sides[1] // 2, dtype=torch.float32, device=device)
    bad = torch.zeros(batch, dtype=torch.int32, device=device)
    _prepare_pictures[(triton.cdiv(coarse[0, 0].numel(), _PIXELS), batch, 2)](
        now, before, bad if slots is None else slots, fine, coarse, bad,
        sides[0] // 2, sides[1] // 2, batch,
        HAS_SLOTS=slots is not None, LEVELS=float(rules.LEVELS), PIXELS=_PIXELS, num_warps=4,
    )  # fmt: skip
    _match_blocks[(high * wide, batch)](
        fine, coarse, bad, out if hint is None else hint, out, high, wide, batch,
        HAS_HINT=hint is not None, CELL=rules.CELL, REACH=rules.REACH_COARSE, PULL=rules.PULL,
        LIMIT_SHARE=1 - rules.GAIN, LEAST=rules.LEAST, FURTHEST=rules.FURTHEST,
        OFFSETS=triton.next_power_of_2((2 * rules.REACH_COARSE + 1) ** 2),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _carry(
    memory, motion, slots, out, tokens, width, prefix, high, wide, stride_b, stride_n,
    HAS_SLOTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    stream = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + stream).to(tl.int64) if HAS_SLOTS else stream
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    place = token - prefix
    own = (place >= 0) & (place < high * wide)
    moves = motion + (stream * high * wide + tl.where(own, place, 0)) * 2
    down = tl.load(moves, mask=own, other=0.0).to(tl.float32)
    across = tl.load(moves + 1, mask=own, other=0.0).to(tl.float32)
    source = memory + slot * stride_b + column
    at = out + (stream * tokens + token) * width + column
    if ((down != 0) | (across != 0)) & (down == down) & (across == across):
        y = tl.minimum(tl.maximum(place // wide + down, 0.0), high - 1.0)
        x = tl.minimum(tl.maximum(place % wide + across, 0.0), wide - 1.0)
        top, left = tl.floor(y), tl.floor(x)
        y, x = y - top, x - left
        above, first = top.to(tl.int64), left.to(tl.int64)
        below, second = tl.minimum(above + 1, high - 1), tl.minimum(first + 1, wide - 1)
        source += prefix * stride_n
        a = tl.load(source + (above * wide + first) * stride_n, mask=inside).to(tl.float32)
        b = tl.load(source + (above * wide + second) * stride_n, mask=inside).to(tl.float32)
        c = tl.load(source + (below * wide + first) * stride_n, mask=inside).to(tl.float32)
        d = tl.load(source + (below * wide + second) * stride_n, mask=inside).to(tl.float32)
        value = (a * (1 - x) + b * x) * (1 - y) + (c * (1 - x) + d * x) * y
        tl.store(at, value.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(at, tl.load(source + token.to(tl.int64) * stride_n, mask=inside), mask=inside)


def carry(memory: Tensor, motion: Tensor, prefix: int, slots: Tensor | None) -> Tensor:
    """See `reference.carry`."""
    batch, high, wide, _ = motion.shape
    tokens, width = memory.shape[1:]
    out = torch.empty(batch, tokens, width, dtype=memory.dtype, device=memory.device)
    block = max(16, min(1024, triton.next_power_of_2(width)))
    if out.numel():
        _carry[(tokens, batch, triton.cdiv(width, block))](
            memory, motion, motion if slots is None else slots, out,
            tokens, width, prefix, high, wide, *memory.stride()[:2],
            HAS_SLOTS=slots is not None, WIDTH=block, num_warps=2 if block <= 512 else 4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
