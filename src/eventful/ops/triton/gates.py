"""Gates on the device: error norms, and the choice of tokens without asking the host.

Choosing the largest r of N needs no sort: a token's rank is the number of tokens ahead of it,
and N^2 comparisons spread over the device take less time than any search that runs in steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventful.ops.reference import REPORT, SAMPLE, Picked, PickRule

MOST_TOKENS = 32768


@triton.jit
def _error_norm(
    current, reference, slots, out,
    tokens, width, stride_cb, stride_cn, stride_rb, stride_rn,
    HAS_SLOTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    stream = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    slot = tl.load(slots + stream).to(tl.int64) if HAS_SLOTS else stream
    inside = (row < tokens)[:, None] & (column < width)[None, :]
    a = tl.load(
        current + stream * stride_cb + row[:, None] * stride_cn + column[None, :],
        mask=inside, other=0.0,
    ).to(tl.float32)  # fmt: skip
    b = tl.load(
        reference + slot * stride_rb + row[:, None] * stride_rn + column[None, :],
        mask=inside, other=0.0,
    ).to(tl.float32)  # fmt: skip
    error = a - b
    norm = tl.sqrt(tl.sum(error * error, axis=1))
    tl.store(out + stream * tokens + row, norm, mask=row < tokens)


def error_norm(
    current: Tensor, reference: Tensor, order: float, slots: Tensor | None = None
) -> Tensor:
    """See `reference.error_norm`; order 2."""
    batch, tokens, width = current.shape
    out = torch.empty(batch, tokens, dtype=torch.float32, device=current.device)
    rows = 4
    _error_norm[(triton.cdiv(tokens, rows), batch)](
        current, reference, current if slots is None else slots, out,
        tokens, width, *current.stride()[:2], *reference.stride()[:2],
        HAS_SLOTS=slots is not None, ROWS=rows, WIDTH=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _pick(
    errors, levels, caps, lows, floors, turns, phases, slots, scenes, shown, far, index, counts,
    places, report,
    tokens, width, prefix, suffix, period, cut_factor, cut_fraction, cut_momentum,
    LEADING: tl.constexpr, SCENE: tl.constexpr, HAS_SLOTS: tl.constexpr, TILES: tl.constexpr,
    OWN: tl.constexpr, OTHER: tl.constexpr, WIDTH: tl.constexpr, SAMPLE: tl.constexpr,
    REPORT: tl.constexpr, FLOOR: tl.constexpr, FAR: tl.constexpr, PHASED: tl.constexpr,
):  # fmt: skip
    if SCENE:  # noqa: SIM102 - the last program looks at the scene, the others at their tokens
        if tl.program_id(0) == tl.num_programs(0) - 1:
            _scene(
                shown, slots, scenes, far, report, tokens, cut_factor, cut_fraction, cut_momentum,
                HAS_SLOTS, TILES, OTHER, SAMPLE, REPORT, FAR,
            )  # fmt: skip
            return
    stream = tl.program_id(1)
    level = tl.load(levels + stream)
    cap = tl.load(caps + stream)
    low = tl.load(lows + stream) if FLOOR else level
    turn = tl.load(turns + stream).to(tl.int32) if period > 0 else 0
    errors += stream * tokens

    start = tl.program_id(0) * OWN
    i = start + tl.arange(0, OWN)
    mine = tl.load(errors + i, mask=i < tokens, other=0.0)
    my_raw = mine.to(tl.int32, bitcast=True)  # errors are not negative: their bits order as they do
    my_key = tl.where(
        _forced(i, phases, tokens, prefix, suffix, period, turn, PHASED), 0x7FFFFFFF, my_raw
    )

    behind = tl.zeros([OWN, OTHER], dtype=tl.int32)  # summed over tokens after the loop: once
    bad = tl.zeros([OTHER], dtype=tl.int32)
    above = tl.zeros([OTHER], dtype=tl.int32)
    fills = tl.zeros([OTHER], dtype=tl.int32)
    least = tl.zeros([OTHER], dtype=tl.int32)
    home = start // OTHER
    for tile in range(TILES):
        j = tile * OTHER + tl.arange(0, OTHER)
        real = j < tokens
        error = tl.load(errors + j, mask=real, other=0.0)
        forced = _forced(j, phases, tokens, prefix, suffix, period, turn, PHASED)
        bad += ((error != error) | (error == float("inf"))).to(tl.int32)
        above += (real & (error > level) & (forced == 0)).to(tl.int32)
        if FLOOR:
            fills += (real & (error > low) & (forced == 0)).to(tl.int32)
        least += forced.to(tl.int32)
        key = tl.where(forced, 0x7FFFFFFF, error.to(tl.int32, bitcast=True))
        key = tl.where(real, key, -1)
        # Of equals the first is ahead. Tiles before one's own are ahead in place, those after are
        # not; one's own tile is looked at token by token, below.
        edge = tl.where(tile < home, my_key - 1, tl.where(tile > home, my_key, 0x7FFFFFFF))
        behind += (key[None, :] > edge[:, None]).to(tl.int32)

    j = home * OTHER + tl.arange(0, OTHER)
    error = tl.load(errors + j, mask=j < tokens, other=0.0)
    key = tl.where(
        _forced(j, phases, tokens, prefix, suffix, period, turn, PHASED), 0x7FFFFFFF,
        error.to(tl.int32, bitcast=True),
    )  # fmt: skip
    key = tl.where(j < tokens, key, -1)
    tied = (key[None, :] == my_key[:, None]) & (j[None, :] < i[:, None])
    behind += ((key[None, :] > my_key[:, None]) | tied).to(tl.int32)
    rank = tl.sum(behind, axis=1)

    finite = tl.sum(bad, axis=0) == 0
    if not LEADING:
        finite = finite & (tl.load(report + stream * REPORT + 1) > 0)
    fixed = tl.sum(least, axis=0)
    by_error = tl.sum(above, axis=0)
    if FLOOR:
        filled = tl.minimum(tl.sum(fills, axis=0), tl.load(floors + stream))
        by_error = tl.maximum(by_error, filled).to(tl.int32)
    allowed = tl.where(finite, fixed + tl.minimum(cap, by_error), 0).to(tl.int32)
    wanted = tl.where(finite, fixed + by_error, 0).to(tl.int32)
    wanted = tl.where(level == -float("inf"), allowed, wanted)
    count = tl.minimum(allowed, width)
    chosen = (rank < count) & (i < tokens)
    tl.store(index + stream * width + rank, i.to(tl.int64), mask=chosen)
    tl.store(places + stream * tokens + i, tl.where(chosen, rank, -1), mask=i < tokens)
    leads = tl.sum(((rank == 0) & (i < tokens)).to(tl.int32), axis=0) > 0
    if leads | ((tl.program_id(0) == 0) & (count == 0)):  # who holds the first fills the padding
        head = tl.sum(tl.where((rank == 0) & (i < tokens), i, 0), axis=0)
        head = tl.where(count > 0, head, 0)
        pad = tl.arange(0, WIDTH)
        filler = tl.zeros([WIDTH], dtype=tl.int64) + head
        tl.store(index + stream * width + pad, filler, mask=(pad >= count) & (pad < width))
    if tl.program_id(0) == 0:
        tl.store(counts + stream, count.to(tl.int64))
        if LEADING:
            tl.store(report + stream * REPORT, wanted)
            tl.store(report + stream * REPORT + 1, finite.to(tl.int32))
            if not SCENE:
                tl.store(report + stream * REPORT + 2, 0)
            tl.store(report + stream * REPORT + 3, allowed)
        else:
            tl.atomic_max(report + stream * REPORT + 3, allowed)


@triton.jit
def _scene(
    errors, slots, scenes, far, report, tokens, cut_factor, cut_fraction, cut_momentum,
    HAS_SLOTS: tl.constexpr, TILES: tl.constexpr, OTHER: tl.constexpr, SAMPLE: tl.constexpr,
    REPORT: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Whether the scene was cut; the running level moves toward the median of a sample."""
    stream = tl.program_id(1)
    slot = tl.load(slots + stream) if HAS_SLOTS else stream
    before = tl.load(scenes + slot)
    edge = cut_factor * before
    if FAR:
        edge = tl.maximum(edge, tl.load(far + stream))
    errors += stream * tokens
    bad = tl.zeros([OTHER], dtype=tl.int32)
    beyond = tl.zeros([OTHER], dtype=tl.int32)
    for tile in range(TILES):
        j = tile * OTHER + tl.arange(0, OTHER)
        error = tl.load(errors + j, mask=j < tokens, other=0.0)
        bad += ((error != error) | (error == float("inf"))).to(tl.int32)
        beyond += ((j < tokens) & (error > edge)).to(tl.int32)
    finite = tl.sum(bad, axis=0) == 0
    size = tl.minimum(tokens, SAMPLE)
    k = tl.arange(0, SAMPLE)
    at = (k.to(tl.int64) * tokens // size).to(tl.int32)
    drawn = tl.load(errors + at, mask=k < size, other=0.0)
    keys = tl.where(k < size, drawn.to(tl.int32, bitcast=True), -1)
    # The k-th largest key, two bits at a time; three counts fit into one sum.
    rank = size - (size - 1) // 2
    found = tl.zeros([], dtype=tl.int32)
    one = tl.full([], 1, tl.int32)
    found = tl.where(tl.sum((keys >= (one << 30)).to(tl.int32), axis=0) >= rank, one << 30, found)
    for step in tl.static_range(15):
        shift = 28 - 2 * step
        low, high = one << shift, one << (shift + 1)
        packed = tl.sum(
            (keys >= (found | low)).to(tl.int32)
            + ((keys >= (found | high)).to(tl.int32) << 10)
            + ((keys >= (found | low | high)).to(tl.int32) << 20),
            axis=0,
        )
        digit = ((packed & 0x3FF) >= rank).to(tl.int32)
        digit += (((packed >> 10) & 0x3FF) >= rank).to(tl.int32)
        digit += ((packed >> 20) >= rank).to(tl.int32)
        found = found | (digit << shift)
    median = found.to(tl.float32, bitcast=True)
    known = before == before
    after = tl.where(known, median + cut_momentum * (before - median), median)
    tl.store(scenes + slot, tl.where(finite, after, before))
    share = tl.sum(beyond, axis=0).to(tl.float32) / tokens
    tl.store(report + stream * REPORT + 2, (known & (share > cut_fraction)).to(tl.int32))


@triton.jit
def _forced(token, phases, tokens, prefix, suffix, period, turn, PHASED: tl.constexpr):
    """Special tokens, and those whose turn to be refreshed it is."""
    forced = (token < prefix) | (token >= tokens - suffix)
    if period > 0:
        phase = tl.load(phases + token, mask=token < tokens, other=0) if PHASED else token
        forced = forced | (phase % period == turn % period)
    return forced & (token < tokens)


def pick(error: Tensor, rule: PickRule, width: int, report: Tensor) -> Picked:
    """See `reference.pick`."""
    batch, tokens = error.shape
    device = error.device
    index = torch.empty(batch, width, dtype=torch.int64, device=device)
    count = torch.empty(batch, dtype=torch.int64, device=device)
    places = torch.empty(batch, tokens, dtype=torch.int32, device=device)
    own, other = 8, max(8, min(512, triton.next_power_of_2(tokens)))
    cut = rule.cut or (0.0, 0.0, 0.0)
    filled = (rule.low, rule.floor) if rule.low is not None and rule.floor is not None else None
    _pick[(triton.cdiv(tokens, own) + (rule.scene is not None), batch)](
        error, rule.level, rule.cap, *(filled or (error, count)),
        rule.turn if rule.turn is not None else count,
        count if rule.phase is None else rule.phase,
        count if rule.slots is None else rule.slots, error if rule.scene is None else rule.scene,
        error if rule.scene_error is None else rule.scene_error,
        error if rule.cut_least is None else rule.cut_least, index, count, places, report,
        tokens, width, rule.prefix, rule.suffix, rule.period or 0, *cut,
        LEADING=rule.leading, SCENE=rule.scene is not None, HAS_SLOTS=rule.slots is not None,
        TILES=triton.cdiv(tokens, other), OWN=own, OTHER=other,
        WIDTH=triton.next_power_of_2(max(width, 1)), SAMPLE=SAMPLE, REPORT=REPORT,
        FLOOR=filled is not None, FAR=rule.cut_least is not None,
        PHASED=rule.phase is not None, num_warps=4,
    )  # fmt: skip
    return Picked(index, count, places)
