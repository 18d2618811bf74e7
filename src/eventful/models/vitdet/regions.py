"""NMS and RoIAlign: by torchvision's compiled operators where they load, else in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eventful import ops
from eventful.models.vitdet.boxes import Padded, iou
from eventful.surgery.adapters.torchvision_ops import compiled_ops

_AT_ONCE = 1024  # boxes whose groups share one IoU matrix; beyond, each group has its own


def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Indices of the boxes to keep, best first: none overlaps a better kept one above `threshold`.

    Args:
        boxes: (N, 4).
        scores: (N,); of equal ones the earlier box is the better.
    """
    compiled = compiled_ops()
    if compiled is not None:
        kept: Tensor = compiled.nms(boxes.float(), scores.float(), threshold)
        return kept
    return nms_torch(boxes, scores, threshold)


def nms_torch(
    boxes: Tensor, scores: Tensor, threshold: float, groups: Tensor | None = None
) -> Tensor:
    """`nms` without compiled operators, within each of the `groups` (N,) if given.

    Greedy suppression as a fixed point: a box stays if no better box that stays suppresses it.
    Each round settles at least the next box in order, in practice all after a few rounds.
    """
    order = scores.argsort(descending=True, stable=True)
    ranked = boxes[order].to(torch.promote_types(boxes.dtype, torch.float32))
    overlaps = iou(ranked, ranked) > threshold
    if groups is not None:
        overlaps &= groups[order][:, None] == groups[order][None]
    suppresses = overlaps.triu(diagonal=1).float()
    stays = torch.ones(len(order), device=boxes.device)
    while True:
        settled = ((stays @ suppresses) == 0).float()
        if torch.equal(settled, stays):
            return order[settled.bool()]
        stays = settled


def grouped_nms(boxes: Tensor, scores: Tensor, groups: Tensor, threshold: float) -> Tensor:
    """`nms` within each group (class or pyramid level) apart; indices, best of all first."""
    compiled = compiled_ops()
    if compiled is not None and len(boxes):
        found: Tensor = compiled.nms(_moved_apart(boxes, groups), scores.double(), threshold)
        return found
    if len(boxes) <= _AT_ONCE:
        return nms_torch(boxes, scores, threshold, groups)
    kept = torch.zeros_like(groups, dtype=torch.bool)
    for group in groups.unique():
        members = (groups == group).nonzero()[:, 0]
        kept[members[nms_torch(boxes[members], scores[members], threshold)]] = True
    index = kept.nonzero()[:, 0]
    return index[scores[index].argsort(descending=True, stable=True)]


def _moved_apart(boxes: Tensor, groups: Tensor) -> Tensor:
    """Boxes shifted so that those of different groups never overlap.

    In double precision: far from the origin single precision would move the corners.
    """
    exact = boxes.double()
    span = exact.amax() - exact.amin() + 1
    return exact + (groups * span)[:, None]


def roi_align(features: Tensor, boxes: Tensor, images: Tensor, output: int, scale: float) -> Tensor:
    """Features (K, C, output, output) inside boxes, read between pixels.

    Each bin averages ceil(bin side) samples along each axis, half-pixel aligned: detectron2's
    ROIAlignV2 with sampling ratio 0. Boxes are finite, and no larger than an image or so: the work
    grows with their area.

    Args:
        features: (B, C, h, w).
        boxes: (K, 4) in pixels of the image.
        images: (K,) which of the B images each box is in.
        scale: feature pixels per image pixel.
    """
    compiled = compiled_ops()
    if compiled is not None:
        # Coordinates in single precision: half precision cannot resolve pixels.
        rois = torch.cat([images[:, None].float(), boxes.float()], dim=1)
        pooled: Tensor = compiled.roi_align(features.float(), rois, output, scale, 0, True)
        return pooled.to(features.dtype)
    return ops.roi_align(features, boxes, images, output, scale)


def suppress(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """Mask (G, N) of the boxes of each set that NMS keeps, see `ops.suppress`."""
    compiled = _compiled(boxes)
    if compiled is None:
        return ops.suppress(boxes, valid, threshold)
    kept = torch.zeros_like(valid)
    for part, real, mask in zip(boxes, valid, kept, strict=True):
        rows = real.nonzero()[:, 0]
        falling = -torch.arange(len(rows), dtype=torch.float32)
        mask[rows[compiled.nms(part[rows].float(), falling, threshold)]] = True
    return kept


def pool_regions(
    maps: Sequence[Tensor], found: Padded, output: int, first_level: int = 2
) -> Tensor:
    """RoIAlign each box on the pyramid level that suits its size.

    Args:
        maps: feature maps (B, C, h, w) from `first_level` on, level l at stride 2^l.
        found: the boxes; places without one, or with one that is not finite, give zeros.

    Returns:
        (B * n, C, output, output), image after image, channels last in memory.
    """
    last = first_level + len(maps) - 1
    level = ops.region_levels(found.boxes, found.valid, first_level, last)
    rows = tuple(_channels_last(features) for features in maps)
    scales = tuple(2.0 ** -(first_level + number) for number in range(len(maps)))
    trained = torch.is_grad_enabled() and any(part.requires_grad for part in maps)
    if trained or _compiled(found.boxes) is not None:
        pooled = ops.by_level(rows, scales, found.boxes, level, output, roi_align)
    else:
        pooled = ops.align_regions(rows, scales, found.boxes.float(), level, output)
    return pooled.permute(0, 3, 1, 2)


def _channels_last(features: Tensor) -> Tensor:
    """A map (B, C, h, w) as (B, h, w, C), each image contiguous.

    In a batch of streams the images of a level lie apart, with other levels between them.
    """
    rows = features.permute(0, 2, 3, 1)
    return rows if rows[:1].is_contiguous() else rows.contiguous()


def _compiled(boxes: Tensor) -> Any:
    """Compiled operators where they are faster than ours: on a CPU, if they load."""
    chosen = boxes.is_cuda or ops.forced_backend() is not None
    return None if chosen else compiled_ops()
