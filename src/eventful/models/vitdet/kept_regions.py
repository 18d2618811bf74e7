"""Regions that need not be computed again: the same box, and nothing changed inside it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.models.vitdet.boxes import Padded, pyramid_level, rows
from eventful.ops import MapLevels
from eventful.rules.local import HeadMemory

_FIRST, _LAST = 2, 5  # levels that regions are pooled from

Compute = Callable[[Padded], tuple[Tensor, Tensor]]


class RegionMemory:
    """What box stages made of the regions of the last frame, in a step on the host.

    Args:
        changed: (B, P) pixels of the maps that changed since.
        levels: p2 to p6, how the maps lie.
    """

    def __init__(self, memory: HeadMemory, changed: Tensor, levels: MapLevels) -> None:
        self._memory, self._changed, self._levels = memory, changed, levels

    def stage(
        self, stage: str, regions: Padded, compute: Compute, macs: int
    ) -> tuple[Tensor, Tensor]:
        """Logits (B * K, C) and codes (B * K, k, 4) of regions: the kept ones, and the others anew.

        Args:
            stage: name of the box stage.
            compute: makes them for (B, n) regions.
            macs: operations of one region.
        """
        names = [f"{stage}/{what}" for what in ("boxes", "logits", "codes")]
        boxes, valid = regions.boxes.float(), regions.valid
        batch, count = valid.shape
        held = self._held(names, boxes)
        kept = torch.full_like(valid, -1, dtype=torch.int64)
        if held is not None:
            kept = kept_regions(boxes, held[0], self._changed, self._levels)
        due = valid & (kept < 0)
        most = int(due.sum(dim=1).max())
        place = due.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
        some = Padded(rows(boxes, place), due.gather(1, place))
        outputs = []
        if held is not None and not most:
            made = [part[:, :0] for part in held[1:]]
        else:
            made = [part.unflatten(0, (batch, most)) for part in compute(some)]
        for new, old in zip(made, (None, None) if held is None else held[1:], strict=True):
            filled = new.new_zeros(batch, count, *new.shape[2:])
            if old is not None:
                index = kept.clamp_min(0).view(batch, count, *[1] * (new.dim() - 2))
                filled = old.gather(1, index.expand_as(filled))
            image, spot = some.valid.nonzero(as_tuple=True)
            filled[image, place[image, spot]] = new[image, spot]
            outputs.append(filled)
        # What stands in places without a region was not computed: nothing may match it later.
        stored = boxes.masked_fill(~valid[..., None], torch.nan)
        for name, value in zip(names, (stored, *outputs), strict=True):
            self._memory.state.fill(self._memory.slot(name), value)
        self._memory.note(stage, macs, due.shape[1], due.sum(dim=1))
        return outputs[0].flatten(0, 1), outputs[1].flatten(0, 1)

    def _held(self, names: list[str], boxes: Tensor) -> list[Tensor] | None:
        """Boxes, logits and codes of the last frame; None where there are none of this shape."""
        state = self._memory.state
        if any(self._memory.slot(name) not in state for name in names):
            return None
        held = [self._memory.maps(name) for name in names]
        return held if held[0].shape == boxes.shape else None


def kept_regions(boxes: Tensor, before: Tensor, changed: Tensor, levels: MapLevels) -> Tensor:
    """Which regions keep the outputs that a head made of them in the last frame.

    A region is its box: of equal boxes on equal maps all outputs are equal. A box that is not
    finite matches nothing.

    Args:
        boxes: (B, K, 4) in pixels of the image.
        before: (B, K', 4) those of the last frame.
        changed: (B, P) pixels of the maps that changed since.
        levels: p2 to p6, how the maps lie.

    Returns:
        (B, K) int64 place of each region among those of the last frame; -1 to compute it.
    """
    if before.shape[1] == 0:
        return torch.full(boxes.shape[:2], -1, device=boxes.device)
    bits = [part.contiguous().view(torch.int32) for part in (boxes, before)]
    same = (bits[0][:, :, None] == bits[1][:, None]).all(dim=-1)
    kept = same.any(dim=2) & boxes.isfinite().all(dim=-1)
    kept = kept & (_changed_inside(boxes, changed, levels) == 0)
    return torch.where(kept, same.byte().argmax(dim=2), -1)


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
