"""Boxes (x1, y1, x2, y2) in pixels: codes, borders of images, and the level that suits a box."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eventful.ops.reference.regions import area

# The largest growth of a side that a prediction can have: 1000 px from an anchor of 16.
MOST_GROWTH = math.log(1000.0 / 16)
CANONICAL_SIDE, CANONICAL_LEVEL = 224.0, 4

Weights = tuple[float, float, float, float]
NO_WEIGHTS: Weights = (1.0, 1.0, 1.0, 1.0)


def table(values: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """Numbers of the host as a tensor (n, k), without a copy from the host.

    A recorded copy would read the host's memory again at each replay, when it is gone.
    """
    made = torch.empty(len(values), len(values[0]), device=device)
    for column, numbers in zip(made.unbind(1), zip(*values, strict=True), strict=True):
        if len(set(numbers)) == 1:
            column.fill_(numbers[0])
        else:
            for place, number in zip(column.unbind(), numbers, strict=True):
                place.fill_(number)
    return made


def clip_each(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Boxes (B, n, 4) cut off at the borders of images of `sizes` (B, 2), height and width."""
    limit = sizes.to(boxes).flip(-1).repeat(1, 2)[:, None]
    return boxes.clamp_min(0).minimum(limit)


def nonempty(boxes: Tensor) -> Tensor:
    """Mask of the boxes (..., 4) with a positive width and height."""
    return (boxes[..., 2] > boxes[..., 0]) & (boxes[..., 3] > boxes[..., 1])


def box_rows(boxes: Tensor, index: Tensor) -> Tensor:
    """Of the boxes (B, N, 4) of each image those at `index` (B, n): (B, n, 4)."""
    return boxes.gather(1, index[..., None].expand(-1, -1, 4))


def centred(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Centres and sides, each (..., 2)."""
    sides = boxes[..., 2:] - boxes[..., :2]
    return boxes[..., :2] + 0.5 * sides, sides


def decode_boxes(references: Tensor, codes: Tensor, weights: Weights = NO_WEIGHTS) -> Tensor:
    """Boxes (N, K, 4) from codes (N, K, 4), or (N, 4) from (N, 4).

    Args:
        references: (N, 4) boxes that the codes are relative to.
        weights: factors on the four numbers of a code.
    """
    references = references.to(codes.dtype)
    if codes.dim() == 3:
        references = references[:, None]
    centre, sides = centred(references)
    if weights != NO_WEIGHTS:
        codes = codes / table([weights], codes.device)[0].to(codes.dtype)
    middle = codes[..., :2] * sides + centre
    half = 0.5 * sides * codes[..., 2:].clamp(max=MOST_GROWTH).exp()
    return torch.cat([middle - half, middle + half], dim=-1)


def pyramid_level(boxes: Tensor, low: int, high: int) -> Tensor:
    """Level (...) of the pyramid that each box (..., 4) reads from: 4 for one of 224 px a side."""
    side = area(boxes).clamp_min(0).sqrt()
    level = torch.floor(CANONICAL_LEVEL + torch.log2(side / CANONICAL_SIDE + 1e-8))
    return level.clamp(low, high).to(torch.int64)


def region_levels(boxes: Tensor, valid: Tensor, first: int, last: int) -> Tensor:
    """Which map each box reads, for `align_regions`: (B, K), 0 for the level `first`.

    Args:
        boxes: (B, K, 4).
        valid: (B, K) mask; other boxes, and those that are not finite, read none, which is -1.
    """
    level = pyramid_level(boxes, first, last) - first
    return torch.where(valid & boxes.isfinite().all(dim=-1), level, -1)
