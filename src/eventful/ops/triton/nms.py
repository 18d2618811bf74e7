"""NMS kernels: of sets of boxes as a mask, and of an image until enough boxes are kept."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD = 32  # boxes whose bits share an int32
MOST_KEPT = 512  # boxes of an image that `keep_apart` holds in registers
_ROWS = 32


@triton.jit
def _overlaps(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, threshold):
    """Whether boxes overlap by more than the threshold, rounded as the reference rounds."""
    width = tl.maximum(tl.minimum(ax2, bx2) - tl.maximum(ax1, bx1), 0.0)
    height = tl.maximum(tl.minimum(ay2, by2) - tl.maximum(ay1, by1), 0.0)
    inter = width * height
    union = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - inter
    some = inter > 0
    return some & (tl.div_rn(inter, tl.where(some, union, 1.0)) > threshold)


@triton.jit
def _suppressed(
    boxes, bits, count, words, threshold,
    ROWS: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """For ROWS boxes a word of bits: the later boxes of that word that each one suppresses."""
    group = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1)
    column = word * WORD + tl.arange(0, WORD)
    if (word + 1) * WORD > tl.program_id(0) * ROWS:  # earlier words are never read
        at = boxes + group * count * 4
        here, there = row < count, column < count
        ax1 = tl.load(at + row * 4, mask=here, other=0.0).to(tl.float32)
        ay1 = tl.load(at + row * 4 + 1, mask=here, other=0.0).to(tl.float32)
        ax2 = tl.load(at + row * 4 + 2, mask=here, other=0.0).to(tl.float32)
        ay2 = tl.load(at + row * 4 + 3, mask=here, other=0.0).to(tl.float32)
        bx1 = tl.load(at + column * 4, mask=there, other=0.0).to(tl.float32)
        by1 = tl.load(at + column * 4 + 1, mask=there, other=0.0).to(tl.float32)
        bx2 = tl.load(at + column * 4 + 2, mask=there, other=0.0).to(tl.float32)
        by2 = tl.load(at + column * 4 + 3, mask=there, other=0.0).to(tl.float32)
        over = _overlaps(
            ax1[:, None], ay1[:, None], ax2[:, None], ay2[:, None],
            bx1[None, :], by1[None, :], bx2[None, :], by2[None, :], threshold,
        )  # fmt: skip
        over = over & (column[None, :] > row[:, None])
        found = tl.sum(over.to(tl.int32) << tl.arange(0, WORD)[None, :], axis=1)
        tl.store(bits + (group * words * WORD + row) * words + word, found)


@triton.jit
def _settle(valid, bits, kept, count, words, WORDS: tl.constexpr, WORD: tl.constexpr):
    """One set: its boxes in order, a word at a time; what a kept box suppresses is marked.

    Which rows are read does not depend on what is kept, so that reading runs ahead.
    """
    group = tl.program_id(0).to(tl.int64)
    column, lane = tl.arange(0, WORDS), tl.arange(0, WORD)
    gone = tl.zeros((WORDS,), dtype=tl.int32)
    for word in range(0, words):
        row = word * WORD + lane
        real = tl.load(valid + group * count + row, mask=row < count, other=0).to(tl.int32) != 0
        lost = tl.sum(tl.where(column == word, gone, 0), axis=0)
        lost = lost | tl.sum((~real).to(tl.int32) << lane, axis=0)
        first = bits + (group * words + word) * WORD * words
        for place in tl.static_range(0, WORD):
            stays = ((lost >> place) & 1) == 0
            near = tl.load(first + place * words + word)
            lost = tl.where(stays, lost | near, lost)
            later = (column > word) & (column < words)
            far = tl.load(first + place * words + column, mask=later, other=0)
            gone = tl.where(stays, gone | far, gone)
        tl.store(kept + group * count + row, ((lost >> lane) & 1) == 0, mask=row < count)


def suppress(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """See `reference.suppress`."""
    sets, count = valid.shape
    kept = torch.empty(sets, count, dtype=torch.bool, device=boxes.device)
    words = triton.cdiv(count, WORD)
    if not kept.numel():
        return kept
    bits = torch.empty(sets, words * WORD, words, dtype=torch.int32, device=boxes.device)
    _suppressed[(triton.cdiv(words * WORD, _ROWS), words, sets)](
        boxes, bits, count, words, float(threshold), ROWS=_ROWS, WORD=WORD,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    _settle[(sets,)](
        valid.view(torch.uint8), bits, kept.view(torch.uint8), count, words,
        WORDS=triton.next_power_of_2(words), WORD=WORD, num_warps=1,
    )  # fmt: skip
    return kept


@triton.jit
def _keep_apart(
    boxes, groups, counts, index, found, total, limit, threshold,
    LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One image: some boxes at a time against the kept ones, then against one another."""
    image = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(counts + image), total).to(tl.int32)
    slot, lane = tl.arange(0, LIMIT), tl.arange(0, BLOCK)
    kx1 = tl.zeros((LIMIT,), dtype=tl.float32)
    ky1 = tl.zeros((LIMIT,), dtype=tl.float32)
    kx2 = tl.zeros((LIMIT,), dtype=tl.float32)
    ky2 = tl.zeros((LIMIT,), dtype=tl.float32)
    kept_group = tl.zeros((LIMIT,), dtype=tl.int32) - 1  # of no box
    number = tl.program_id(0) * 0
    start = tl.program_id(0) * 0
    while (start < count) & (number < limit):
        row = start + lane
        inside = row < count
        at = boxes + (image * total + row) * 4
        x1 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        y1 = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(at + 2, mask=inside, other=0.0).to(tl.float32)
        y2 = tl.load(at + 3, mask=inside, other=0.0).to(tl.float32)
        group = tl.load(groups + image * total + row, mask=inside, other=0).to(tl.int32)
        over = _overlaps(
            kx1[:, None], ky1[:, None], kx2[:, None], ky2[:, None],
            x1[None, :], y1[None, :], x2[None, :], y2[None, :], threshold,
        )  # fmt: skip
        over = over & (kept_group[:, None] == group[None, :])
        free = inside & (tl.max(over.to(tl.int32), axis=0) == 0)
        near = _overlaps(
            x1[:, None], y1[:, None], x2[:, None], y2[:, None],
            x1[None, :], y1[None, :], x2[None, :], y2[None, :], threshold,
        )  # fmt: skip
        near = near & (group[:, None] == group[None, :]) & (lane[:, None] < lane[None, :])
        stays = free.to(tl.int32)
        changed = tl.sum(stays, axis=0)
        while changed > 0:
            hits = tl.max(near.to(tl.int32) * stays[:, None], axis=0)
            settled = tl.where(free & (hits == 0), 1, 0)
            changed = tl.sum(tl.where(settled != stays, 1, 0), axis=0)
            stays = settled
        place = number + tl.cumsum(stays, axis=0) - 1
        tl.store(
            index + image * limit + place, row.to(tl.int64), mask=(stays != 0) & (place < limit)
        )
        taken = (slot[:, None] == place[None, :]) & (stays[None, :] != 0)
        kx1 += tl.sum(tl.where(taken, x1[None, :], 0.0), axis=1)
        ky1 += tl.sum(tl.where(taken, y1[None, :], 0.0), axis=1)
        kx2 += tl.sum(tl.where(taken, x2[None, :], 0.0), axis=1)
        ky2 += tl.sum(tl.where(taken, y2[None, :], 0.0), axis=1)
        kept_group += tl.sum(tl.where(taken, group[None, :] + 1, 0), axis=1)
        number += tl.sum(stays, axis=0)
        start += BLOCK
    number = tl.minimum(number, limit)
    tl.store(
        index + image * limit + slot, slot.to(tl.int64) * 0, mask=(slot >= number) & (slot < limit)
    )
    tl.store(found + image, number.to(tl.int64))


def keep_apart(
    boxes: Tensor, groups: Tensor, count: Tensor, threshold: float, limit: int
) -> tuple[Tensor, Tensor]:
    """See `reference.keep_apart`."""
    images, total = groups.shape
    index = torch.empty(images, limit, dtype=torch.int64, device=boxes.device)
    found = torch.empty(images, dtype=torch.int64, device=boxes.device)
    block = triton.next_power_of_2(limit)
    if images:
        _keep_apart[(images,)](
            boxes, groups, count, index, found, total, limit, float(threshold),
            LIMIT=block, BLOCK=32, num_warps=4 if block <= 128 else 8, enable_fp_fusion=False,
        )  # fmt: skip
    return index, found
