"""Regions that need not be computed again: same anchor, same box, and nothing changed inside."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.models.vitdet.boxes import pyramid_level
from eventful.ops import MapLevels

_FIRST, _LAST = 2, 5  # levels that regions are pooled from


def kept_regions(
    boxes: Tensor,
    anchors: Tensor,
    before: tuple[Tensor, Tensor],
    changed: Tensor,
    levels: MapLevels,
) -> Tensor:
    """Which regions keep the outputs that a head made of them in the last frame. Never waits.

    Args:
        boxes: (B, K, 4) in pixels of the image.
        anchors: (B, K) the anchor each comes from, an anchor no more than once in a stream;
            negative for padding, which keeps nothing.
        before: boxes (B, K', 4) and anchors (B, K') of the last frame.
        changed: (B, P) pixels of the maps that changed since.
        levels: p2 to p6, how the maps lie.

    Returns:
        (B, K) int64 place of each region among those of the last frame; -1 to compute it.
    """
    old_boxes, old_anchors = before
    if old_anchors.shape[1] == 0:
        return torch.full_like(anchors, -1, dtype=torch.int64)
    # Sorted, so that the memory needed grows with K and not with its square.
    known, order = old_anchors.sort(dim=1)
    place = torch.searchsorted(known, anchors.contiguous()).clamp_max(known.shape[1] - 1)
    index = order.gather(1, place)
    kept = (known.gather(1, place) == anchors) & (anchors >= 0)
    held = old_boxes.gather(1, index[..., None].expand(-1, -1, 4))
    kept = kept & (held.view(torch.int32) == boxes.contiguous().view(torch.int32)).all(dim=-1)
    kept = kept & (_changed_inside(boxes, changed, levels) == 0)
    return torch.where(kept, index, -1)


def _changed_inside(boxes: Tensor, changed: Tensor, levels: MapLevels) -> Tensor:
    """(B, K) how many changed pixels RoIAlign may read for each box, on the level of its size."""
    batch, count = boxes.shape[:2]
    level = pyramid_level(boxes.flatten(0, 1), _FIRST, _LAST).view(batch, count)
    finite = boxes.nan_to_num(0.0, 0.0, 0.0)
    found = torch.zeros_like(level)
    for number in range(_FIRST, _LAST + 1):
        high, wide = levels.sizes[number - _FIRST]
        mask = levels.part(changed[..., None], number - _FIRST)[..., 0]
        sums = F.pad(mask.long().cumsum(1).cumsum(2), (1, 0, 1, 0))
        corner = finite * 2.0**-number - 0.5
        # A sample lies between two pixels; up to one pixel outside the border pixel counts.
        left, top = (
            corner[..., side].floor().clamp(0, size - 1).long()
            for side, size in ((0, wide), (1, high))
        )
        right, bottom = (
            (corner[..., side].floor() + 2).clamp(1, size).long()
            for side, size in ((2, wide), (3, high))
        )
        inside = _at(sums, bottom, right) - _at(sums, top, right)
        inside = inside - _at(sums, bottom, left) + _at(sums, top, left)
        found = torch.where(level == number, inside, found)
    return found


def _at(sums: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Entries (B, K) of sums (B, h + 1, w + 1)."""
    return sums.flatten(1).gather(1, y * sums.shape[2] + x)
