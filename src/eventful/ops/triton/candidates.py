"""Kernels from boxes to the maps they read, and from the outputs of box heads to candidates."""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from eventful.ops.reference.boxes import CANONICAL_LEVEL, CANONICAL_SIDE, Weights
from eventful.ops.triton.boxes import clipped, decoded, finite

MOST_STAGES = 3
MOST_LEVELS = 4  # that boxes are spread over
HIGHEST_LEVEL = 9
_BLOCK = 128


def _least_ratio(level: int) -> float:
    """The smallest ratio of a box's side to 224 px that `reference.pyramid_level` gives a level.

    It rounds to fp32 after the logarithm and after the sum, so this lies just below a power of 2.
    """
    ratio = np.float32(2.0 ** (level - CANONICAL_LEVEL))
    while True:
        lower = np.nextafter(ratio, np.float32(0))
        if np.float32(CANONICAL_LEVEL) + np.float32(math.log2(lower)) < level:
            return float(ratio)
        ratio = lower


_BOUNDS = tuple(_least_ratio(level) for level in range(HIGHEST_LEVEL + 1))


@triton.jit
def _region_levels(
    boxes, valid, out, count, second, third, fourth, canonical, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    at = boxes + place.to(tl.int64) * 4
    x1 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    y1 = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(at + 2, mask=inside, other=0.0).to(tl.float32)
    y2 = tl.load(at + 3, mask=inside, other=0.0).to(tl.float32)
    real = tl.load(valid + place, mask=inside, other=0) != 0
    real = real & finite(x1) & finite(y1) & finite(x2) & finite(y2)
    area = tl.maximum((x2 - x1) * (y2 - y1), 0.0)
    ratio = tl.div_rn(tl.sqrt_rn(area), canonical) + 1e-8
    level = (ratio >= second).to(tl.int64)
    level += (ratio >= third).to(tl.int64) + (ratio >= fourth).to(tl.int64)
    tl.store(out + place, tl.where(real, level, -1), mask=inside)


def region_levels(boxes: Tensor, valid: Tensor, first: int, last: int) -> Tensor:
    """See `reference.region_levels`."""
    out = torch.empty(valid.shape, dtype=torch.int64, device=boxes.device)
    bounds = _BOUNDS[first + 1 : last + 1]
    bounds += (math.inf,) * (MOST_LEVELS - 1 - len(bounds))
    if out.numel():
        _region_levels[(triton.cdiv(out.numel(), _BLOCK),)](
            boxes, valid.view(torch.uint8), out, out.numel(), *bounds, CANONICAL_SIDE,
            BLOCK=_BLOCK, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def _refine_boxes(
    boxes, codes, sizes, out, count, per_image, stride, wx, wy, ww, wh, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    at = boxes + place.to(tl.int64) * 4
    x1 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    y1 = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(at + 2, mask=inside, other=0.0).to(tl.float32)
    y2 = tl.load(at + 3, mask=inside, other=0.0).to(tl.float32)
    at = codes + place.to(tl.int64) * stride
    dx = tl.div_rn(tl.load(at, mask=inside, other=0.0).to(tl.float32), wx)
    dy = tl.div_rn(tl.load(at + 1, mask=inside, other=0.0).to(tl.float32), wy)
    dw = tl.div_rn(tl.load(at + 2, mask=inside, other=0.0).to(tl.float32), ww)
    dh = tl.div_rn(tl.load(at + 3, mask=inside, other=0.0).to(tl.float32), wh)
    x1, y1, x2, y2 = decoded(x1, y1, x2, y2, dx, dy, dw, dh)
    size = sizes + place // per_image * 2
    high = tl.load(size, mask=inside, other=0).to(tl.float32)
    wide = tl.load(size + 1, mask=inside, other=0).to(tl.float32)
    to = out + place.to(tl.int64) * 4
    tl.store(to, clipped(x1, wide), mask=inside)
    tl.store(to + 1, clipped(y1, high), mask=inside)
    tl.store(to + 2, clipped(x2, wide), mask=inside)
    tl.store(to + 3, clipped(y2, high), mask=inside)


def refine_boxes(boxes: Tensor, codes: Tensor, weights: Weights, sizes: Tensor) -> Tensor:
    """See `reference.refine_boxes`."""
    out = torch.empty(boxes.shape, dtype=torch.float32, device=boxes.device)
    count = boxes.shape[0] * boxes.shape[1]
    if count:
        _refine_boxes[(triton.cdiv(count, _BLOCK),)](
            boxes, codes, sizes, out, count, boxes.shape[1], codes.stride(0), *weights,
            BLOCK=_BLOCK, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def _softmax(logits, row, column, stride, here):
    """Probabilities of some rows; 0 in the columns of padding."""
    at = logits + row[:, None].to(tl.int64) * stride + column[None, :]
    value = tl.load(at, mask=here, other=-float("inf")).to(tl.float32)
    value = tl.exp(value - tl.max(value, axis=1)[:, None])
    return tl.div_rn(value, tl.sum(value, axis=1)[:, None])


@triton.jit
def _region_scores(
    a, b, c, codes, boxes, valid, sizes, scores, out, count, per_image, classes, columns,
    stride_a, stride_b, stride_c, stride, wx, wy, ww, wh, threshold,
    STAGES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some regions, all classes."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = row < count
    here = inside[:, None] & (column <= classes)[None, :]  # the last one is background
    score = _softmax(a, row, column, stride_a, here)
    if STAGES > 1:
        score += _softmax(b, row, column, stride_b, here)
    if STAGES > 2:
        score += _softmax(c, row, column, stride_c, here)
    if STAGES > 1:
        score = tl.div_rn(score, 1.0 * STAGES)
    bad = here & ~finite(score)
    here = inside[:, None] & (column < columns)[None, :]
    at = boxes + row.to(tl.int64) * 4
    x1 = tl.load(at, mask=inside, other=0.0).to(tl.float32)[:, None]
    y1 = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)[:, None]
    x2 = tl.load(at + 2, mask=inside, other=0.0).to(tl.float32)[:, None]
    y2 = tl.load(at + 3, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = codes + row[:, None].to(tl.int64) * stride + column[None, :] * 4
    dx = tl.div_rn(tl.load(at, mask=here, other=0.0).to(tl.float32), wx)
    dy = tl.div_rn(tl.load(at + 1, mask=here, other=0.0).to(tl.float32), wy)
    dw = tl.div_rn(tl.load(at + 2, mask=here, other=0.0).to(tl.float32), ww)
    dh = tl.div_rn(tl.load(at + 3, mask=here, other=0.0).to(tl.float32), wh)
    x1, y1, x2, y2 = decoded(x1, y1, x2, y2, dx, dy, dw, dh)
    bad = bad | (here & ~(finite(x1) & finite(y1) & finite(x2) & finite(y2)))
    size = sizes + row // per_image * 2
    high = tl.load(size, mask=inside, other=0).to(tl.float32)[:, None]
    wide = tl.load(size + 1, mask=inside, other=0).to(tl.float32)[:, None]
    to = out + (row[:, None].to(tl.int64) * columns + column[None, :]) * 4
    tl.store(to, clipped(x1, wide), mask=here)
    tl.store(to + 1, clipped(y1, high), mask=here)
    tl.store(to + 2, clipped(x2, wide), mask=here)
    tl.store(to + 3, clipped(y2, high), mask=here)
    fine = tl.load(valid + row, mask=inside, other=0) != 0
    fine = fine & (tl.max(bad.to(tl.int32), axis=1) == 0)
    score = tl.where(fine[:, None] & (score > threshold), score, -float("inf"))
    to = scores + row[:, None].to(tl.int64) * classes + column[None, :]
    tl.store(to, score, mask=inside[:, None] & (column < classes)[None, :])


def region_scores(
    logits: tuple[Tensor, ...],
    codes: Tensor,
    regions: tuple[Tensor, Tensor],
    weights: Weights,
    sizes: Tensor,
    threshold: float,
) -> tuple[Tensor, Tensor]:
    """See `reference.region_scores`."""
    boxes, valid = regions
    images, count = valid.shape
    classes, columns = logits[0].shape[1] - 1, codes.shape[1]
    scores = torch.empty(images, count * classes, dtype=torch.float32, device=boxes.device)
    out = torch.empty(images, count * columns, 4, dtype=torch.float32, device=boxes.device)
    if valid.numel():
        width = triton.next_power_of_2(classes + 1)
        rows = max(1, 128 // width)
        parts = logits + logits[:1] * (MOST_STAGES - len(logits))
        _region_scores[(triton.cdiv(images * count, rows),)](
            *parts, codes, boxes, valid.view(torch.uint8), sizes, scores, out,
            images * count, count, classes, columns, *(part.stride(0) for part in parts),
            codes.stride(0), *weights, float(threshold), STAGES=len(logits), ROWS=rows,
            COLUMNS=width, num_warps=max(1, min(8, width // 128)), enable_fp_fusion=False,
        )  # fmt: skip
    return scores, out


@triton.jit
def _take_candidates(
    scores, order, boxes, out, labels, counts, stride_s, stride_o, count, rows, classes,
    SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some candidates of one image; the program of the last one writes how many there are."""
    image = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    source = tl.load(order + image * stride_o + place, mask=inside, other=0)
    row = source
    if SHARED:
        row = source // classes
    to = image * count + place
    for side in tl.static_range(0, 4):
        value = tl.load(boxes + (image * rows + row) * 4 + side, mask=inside, other=0.0)
        tl.store(out + to * 4 + side, value, mask=inside)
    tl.store(labels + to, source % classes, mask=inside)
    at = scores + image * stride_s + place
    none = -float("inf")
    here = tl.load(at, mask=inside, other=none) > none
    after = tl.load(at + 1, mask=place + 1 < count, other=none) > none
    last = (here & ~after) | (inside & (place == 0) & ~here)
    tl.store(counts + image + place * 0, tl.where(here, place + 1, 0).to(tl.int64), mask=last)


def take_candidates(
    scores: Tensor, order: Tensor, boxes: Tensor, classes: int, shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.take_candidates`."""
    images, count = order.shape
    out = torch.empty(images, count, 4, dtype=boxes.dtype, device=boxes.device)
    labels = torch.empty(images, count, dtype=torch.int64, device=boxes.device)
    if not labels.numel():
        return out, labels, torch.zeros(images, dtype=torch.int64, device=boxes.device)
    counts = torch.empty(images, dtype=torch.int64, device=boxes.device)
    _take_candidates[(triton.cdiv(count, _BLOCK), images)](
        scores, order, boxes, out, labels, counts, scores.stride(0), order.stride(0), count,
        boxes.shape[1], classes, SHARED=shared, BLOCK=_BLOCK, num_warps=1,
    )  # fmt: skip
    return out, labels, counts


@triton.jit
def _take_found(
    index, counts, boxes, scores, labels, some, score, label, places, total, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < places
    held = inside & (place < tl.load(counts + image))
    to = image * places + place
    row = tl.load(index + to, mask=held, other=0)
    for side in tl.static_range(0, 4):
        value = tl.load(boxes + (image * total + row) * 4 + side, mask=held, other=0.0)
        tl.store(some + to * 4 + side, value, mask=inside)
    value = tl.load(scores + image * stride + row, mask=held, other=0.0)
    tl.store(score + to, value, mask=inside)
    value = tl.load(labels + image * total + row, mask=held, other=0)
    tl.store(label + to, value, mask=inside)


def take_found(
    index: Tensor, count: Tensor, boxes: Tensor, scores: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.take_found`."""
    images, places = index.shape
    device = boxes.device
    some = torch.empty(images, places, 4, dtype=boxes.dtype, device=device)
    score = torch.empty(images, places, dtype=scores.dtype, device=device)
    label = torch.empty(images, places, dtype=labels.dtype, device=device)
    if index.numel():
        _take_found[(triton.cdiv(places, _BLOCK), images)](
            index, count, boxes, scores, labels, some, score, label, places, boxes.shape[1],
            scores.stride(0), BLOCK=_BLOCK, num_warps=1,
        )  # fmt: skip
    return some, score, label
