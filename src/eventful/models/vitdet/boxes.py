"""Boxes (x1, y1, x2, y2) in pixels: overlap, coding, anchors, matching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eventful import ops
from eventful.ops import (
    area,
    centred,
    clip_each,
    intersection,
    iou,
    nonempty,
    pyramid_level,
    table,
)
from eventful.ops import box_rows as rows

BACKGROUND, IGNORED, FOREGROUND = 0, -1, 1

__all__ = [
    "BACKGROUND",
    "FOREGROUND",
    "IGNORED",
    "BoxCoder",
    "Matches",
    "Padded",
    "area",
    "cell_anchors",
    "clip",
    "clip_each",
    "covered",
    "giou_loss",
    "grid_anchors",
    "intersection",
    "iou",
    "match",
    "nonempty",
    "paired_iou",
    "pyramid_level",
    "rows",
    "table",
]


def clip(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Boxes cut off at the borders of an image of `size` (height, width)."""
    height, width = size
    x, y = boxes[..., 0::2].clamp(0, width), boxes[..., 1::2].clamp(0, height)
    return torch.stack([x[..., 0], y[..., 0], x[..., 1], y[..., 1]], dim=-1)


def paired_iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union (N,) of each pair of boxes (N, 4); 0 where both are empty."""
    inter = intersection(a, b)
    return torch.where(inter > 0, inter / (area(a) + area(b) - inter), inter.new_zeros(()))


def covered(boxes: Tensor, by: Tensor) -> Tensor:
    """The largest share (..., N) of each box (..., N, 4) that lies in one box `by` (..., M, 4)."""
    if not by.shape[-2]:
        return torch.zeros_like(area(boxes))
    inter = intersection(boxes[..., :, None, :], by[..., None, :, :]).amax(dim=-1)
    return torch.where(inter > 0, inter / area(boxes), inter.new_zeros(()))


def giou_loss(a: Tensor, b: Tensor, eps: float = 1e-7) -> Tensor:
    """1 - generalised IoU (...) of each pair of boxes (..., 4)."""
    inter = intersection(a, b)
    union = area(a) + area(b) - inter
    sides = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    hull = sides[..., 0] * sides[..., 1]
    return 1 - (inter / (union + eps) - (hull - union) / (hull + eps))


@dataclass(frozen=True)
class BoxCoder:
    """Boxes as (dx, dy, dw, dh) relative to a reference: shifts in its sides, logs of growth.

    Attributes:
        weights: factors on the four numbers, so that a head sees values of similar size.
    """

    weights: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)

    def encode(self, reference: Tensor, target: Tensor) -> Tensor:
        """Codes (..., 4) that turn `reference` into `target`; references must not be empty."""
        centre, sides = centred(reference)
        goal, goal_sides = centred(target)
        codes = torch.cat([(goal - centre) / sides, torch.log(goal_sides / sides)], dim=-1)
        return codes * self._factors(codes)

    def decode(self, reference: Tensor, codes: Tensor) -> Tensor:
        """Boxes (N, K, 4) from codes (N, K, 4), or (N, 4) from (N, 4)."""
        return ops.decode_boxes(reference, codes, self.weights)

    def _factors(self, codes: Tensor) -> Tensor:
        return table([self.weights], codes.device)[0].to(codes.dtype)


def cell_anchors(
    size: float, ratios: Sequence[float], device: torch.device | None = None
) -> Tensor:
    """Anchors (A, 4) around the origin: area size², one for each height/width ratio."""
    sides = [[size * ratio**-0.5, size * ratio**0.5] for ratio in ratios]
    made = table(sides, device or torch.device("cpu"))
    return torch.cat([-made / 2, made / 2], dim=1)


def grid_anchors(cells: Tensor, grid: tuple[int, int], stride: int) -> Tensor:
    """The anchors at every place of a feature map, (h * w * A, 4), places row by row."""
    y = torch.arange(grid[0], device=cells.device, dtype=cells.dtype) * stride
    x = torch.arange(grid[1], device=cells.device, dtype=cells.dtype) * stride
    y, x = torch.meshgrid(y, x, indexing="ij")
    places = torch.stack([x, y, x, y], dim=-1).reshape(-1, 1, 4)
    return (places + cells).flatten(0, 1)


@dataclass(frozen=True)
class Padded:
    """Boxes of B images in one tensor, the same number of places for each.

    Attributes:
        boxes: (B, n, 4), zero where there is none.
        valid: (B, n) mask of the places with a box.
    """

    boxes: Tensor
    valid: Tensor

    @classmethod
    def where(cls, valid: Tensor, boxes: Tensor) -> Padded:
        """The `valid` ones (B, n) of boxes (B, n, 4); the others may be anything."""
        return cls(torch.where(valid[..., None], boxes, boxes.new_zeros(())), valid)


@dataclass(frozen=True)
class Matches:
    """For each of N candidates: the ground truth it overlaps most, and its label.

    Attributes:
        index: (..., N) row of the ground truth, 0 where there is none.
        label: (..., N) FOREGROUND, BACKGROUND or IGNORED.
    """

    index: Tensor
    label: Tensor


def match(overlap: Tensor, low: float, high: float, *, rescue: bool = False) -> Matches:
    """Match candidates to ground truth by overlap.

    Args:
        overlap: (..., ground truth, candidates) IoU.
        low: below it a candidate is background; between the two it is ignored.
        high: from it on a candidate is foreground.
        rescue: also label the best candidates of each ground truth as foreground, so that each
            one that any candidate overlaps has a match.
    """
    truths, candidates = overlap.shape[-2:]
    if not truths:
        none = torch.zeros_like(overlap.sum(dim=-2), dtype=torch.int64)
        return Matches(none, none.clone())
    best, index = overlap.max(dim=-2)
    label = torch.full_like(index, IGNORED)
    label.masked_fill_(best < low, BACKGROUND).masked_fill_(best >= high, FOREGROUND)
    if rescue and candidates:
        best = overlap.amax(dim=-1, keepdim=True)
        label.masked_fill_(((overlap == best) & (best > 0)).any(dim=-2), FOREGROUND)
    return Matches(index, label)
