"""Kernels from the predictions at every anchor to the best boxes of each image."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventful.ops.reference.maps import MapLevels
from eventful.ops.triton.boxes import clipped, decoded, finite

MOST_LEVELS = 5
_BLOCK = 256  # anchors of a program
_RANKED, _STEP = 16, 512  # boxes that a program ranks, and those it compares them with at once


@triton.jit
def _first_pixel(level, b, c, d, e, end):
    """The first pixel of a level; behind the last level, the number of pixels."""
    first = tl.where(level > 0, b, 0)
    first = tl.where(level > 1, c, first)
    first = tl.where(level > 2, d, first)
    first = tl.where(level > 3, e, first)
    return tl.where(level > 4, end, first)


@triton.jit
def _level_logits(
    rows, slots, out, b, c, d, e, end, most,
    ANCHORS: tl.constexpr, HAS_SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some anchors of one level of one image."""
    level = tl.program_id(1)
    image = tl.program_id(2).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = _first_pixel(level, b, c, d, e, end)
    count = (_first_pixel(level + 1, b, c, d, e, end) - first) * ANCHORS
    own = image
    if HAS_SLOTS:
        own = tl.load(slots + image).to(tl.int64)
    at = (own * end + first + place // ANCHORS) * (5 * ANCHORS) + place % ANCHORS
    value = tl.load(rows + at, mask=place < count, other=-float("inf")).to(tl.float32)
    to = out + (image * tl.num_programs(1) + level) * most + place
    tl.store(to, value, mask=place < most)


def _offsets(levels: MapLevels) -> tuple[int, ...]:
    """First pixels of the second to the fifth level, then the number of pixels."""
    found = levels.offsets[1:]
    return (*found, *[levels.pixels] * (MOST_LEVELS - len(levels.offsets)), levels.pixels)


def level_logits(rows: Tensor, levels: MapLevels, slots: Tensor | None = None) -> Tensor:
    """See `reference.level_logits`."""
    images = len(rows) if slots is None else len(slots)
    anchors = rows.shape[2] // 5
    most = anchors * max(high * wide for high, wide in levels.sizes)
    out = torch.empty(images, len(levels.sizes), most, dtype=torch.float32, device=rows.device)
    if out.numel():
        _level_logits[(triton.cdiv(most, _BLOCK), len(levels.sizes), images)](
            rows, rows if slots is None else slots, out, *_offsets(levels), most,
            ANCHORS=anchors, HAS_SLOTS=slots is not None, BLOCK=_BLOCK, num_warps=2,
        )  # fmt: skip
    return out


@triton.jit
def _proposal_boxes(
    rows, slots, top, index, anchors, sizes, boxes, valid, b, c, d, e, end, count,
    ANCHORS: tl.constexpr, HAS_SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some chosen anchors of one level of one image."""
    level = tl.program_id(1)
    image = tl.program_id(2).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    to = (image * tl.num_programs(1) + level) * count + place
    score = tl.load(top + to, mask=inside, other=-float("inf")).to(tl.float32)
    real = inside & finite(score)
    number = tl.load(index + to, mask=real, other=0)
    first = _first_pixel(level, b, c, d, e, end)
    own = image
    if HAS_SLOTS:
        own = tl.load(slots + image).to(tl.int64)
    pixel = own * end + first + number // ANCHORS
    at = rows + pixel * (5 * ANCHORS) + ANCHORS + number % ANCHORS * 4
    dx = tl.load(at, mask=real, other=0.0).to(tl.float32)
    dy = tl.load(at + 1, mask=real, other=0.0).to(tl.float32)
    dw = tl.load(at + 2, mask=real, other=0.0).to(tl.float32)
    dh = tl.load(at + 3, mask=real, other=0.0).to(tl.float32)
    at = anchors + (first * ANCHORS + number) * 4
    x1 = tl.load(at, mask=real, other=0.0)
    y1 = tl.load(at + 1, mask=real, other=0.0)
    x2 = tl.load(at + 2, mask=real, other=0.0)
    y2 = tl.load(at + 3, mask=real, other=0.0)
    x1, y1, x2, y2 = decoded(x1, y1, x2, y2, dx, dy, dw, dh)
    real = real & finite(x1) & finite(y1) & finite(x2) & finite(y2)
    high = tl.load(sizes + image * 2).to(tl.float32)
    wide = tl.load(sizes + image * 2 + 1).to(tl.float32)
    x1, y1, x2, y2 = clipped(x1, wide), clipped(y1, high), clipped(x2, wide), clipped(y2, high)
    real = real & (x2 > x1) & (y2 > y1)
    tl.store(boxes + to * 4, tl.where(real, x1, 0.0), mask=inside)
    tl.store(boxes + to * 4 + 1, tl.where(real, y1, 0.0), mask=inside)
    tl.store(boxes + to * 4 + 2, tl.where(real, x2, 0.0), mask=inside)
    tl.store(boxes + to * 4 + 3, tl.where(real, y2, 0.0), mask=inside)
    tl.store(valid + to, real.to(tl.uint8), mask=inside)


def proposal_boxes(
    rows: Tensor,
    top: Tensor,
    index: Tensor,
    anchors: Tensor,
    levels: MapLevels,
    sizes: Tensor,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.proposal_boxes`."""
    images, parts, count = top.shape
    boxes = torch.empty(*top.shape, 4, dtype=torch.float32, device=rows.device)
    valid = torch.empty(top.shape, dtype=torch.bool, device=rows.device)
    if valid.numel():
        _proposal_boxes[(triton.cdiv(count, 64), parts, images)](
            rows, rows if slots is None else slots, top, index, anchors, sizes, boxes,
            valid.view(torch.uint8), *_offsets(levels), count,
            ANCHORS=rows.shape[2] // 5, HAS_SLOTS=slots is not None, BLOCK=64,
            num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip
    return boxes, valid


@triton.jit
def _kept_scores(scores, kept, start, column, total):
    """Scores of some boxes of an image; NaN for those that are not kept, which beat none."""
    inside = column < total
    stays = tl.load(kept + start + column, mask=inside, other=0) != 0
    score = tl.load(scores + start + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(stays, score, float("nan"))


@triton.jit
def _best_boxes(
    boxes, scores, kept, out, valid, total, places, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Some boxes of one image: how many kept ones are ahead of each is the place it goes to."""
    image = tl.program_id(1).to(tl.int64)
    start = image * total
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, STEP)
    score = _kept_scores(scores, kept, start, row, total)
    mine = score[:, None]
    ahead = tl.zeros((BLOCK, STEP), dtype=tl.int32)
    number = tl.zeros((STEP,), dtype=tl.int32)
    own = tl.program_id(0) * BLOCK // STEP * STEP  # the step that these boxes lie in
    for first in range(0, own, STEP):  # of equal ones, earlier boxes are ahead
        other = _kept_scores(scores, kept, start, first + lane, total)
        ahead += (other[None, :] >= mine).to(tl.int32)
        number += (other == other).to(tl.int32)
    other = _kept_scores(scores, kept, start, own + lane, total)
    earlier = (own + lane)[None, :] < row[:, None]
    ahead += ((other[None, :] > mine) | ((other[None, :] == mine) & earlier)).to(tl.int32)
    number += (other == other).to(tl.int32)
    for first in range(own + STEP, total, STEP):
        other = _kept_scores(scores, kept, start, first + lane, total)
        ahead += (other[None, :] > mine).to(tl.int32)
        number += (other == other).to(tl.int32)
    place = tl.sum(ahead, axis=1)
    stays = (score == score) & (place < places)
    at = boxes + (start + row) * 4
    to = out + (image * places + place) * 4
    for side in tl.static_range(0, 4):
        value = tl.load(at + side, mask=stays, other=0.0)
        tl.store(to + side, value, mask=stays)
    tl.store(valid + image * places + place, stays.to(tl.uint8), mask=stays)
    empty = (row >= tl.sum(number, axis=0)) & (row < places)
    to = image * places + row
    for side in tl.static_range(0, 4):
        tl.store(out + to * 4 + side, tl.zeros((BLOCK,), dtype=tl.float32), mask=empty)
    tl.store(valid + to, tl.zeros((BLOCK,), dtype=tl.uint8), mask=empty)


def best_boxes(boxes: Tensor, scores: Tensor, kept: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """See `reference.best_boxes`."""
    images, total = scores.shape
    places = min(limit, total)
    out = torch.empty(images, places, 4, dtype=boxes.dtype, device=boxes.device)
    valid = torch.empty(images, places, dtype=torch.bool, device=boxes.device)
    if valid.numel():
        _best_boxes[(triton.cdiv(total, _RANKED), images)](
            boxes, scores, kept.view(torch.uint8), out, valid.view(torch.uint8), total, places,
            BLOCK=_RANKED, STEP=_STEP, num_warps=4,
        )  # fmt: skip
    return out, valid
