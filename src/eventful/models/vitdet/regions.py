"""NMS and RoIAlign: by torchvision's compiled operators where they load, else in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.models.vitdet.boxes import iou, pyramid_level
from eventful.surgery.adapters.torchvision_ops import compiled_ops

_AT_ONCE = 1024  # boxes whose groups share one IoU matrix; beyond, each group has its own
_MOST_PAIRS = 1 << 25  # IoUs computed at once for several images
_MOST_BYTES = 1 << 30  # of the matrices of several images that are kept until NMS has settled


def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Indices of the boxes to keep, best first: none overlaps a better kept one above `threshold`.

    Args:
        boxes: (N, 4).
        scores: (N,); of equal ones the earlier box is the better.
    """
    ops = compiled_ops()
    if ops is not None:
        kept: Tensor = ops.nms(boxes.float(), scores.float(), threshold)
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
    ops = compiled_ops()
    if ops is not None and len(boxes):
        found: Tensor = ops.nms(_moved_apart(boxes, groups), scores.double(), threshold)
        return found
    if len(boxes) <= _AT_ONCE:
        return nms_torch(boxes, scores, threshold, groups)
    kept = torch.zeros_like(groups, dtype=torch.bool)
    for group in groups.unique():
        members = (groups == group).nonzero()[:, 0]
        kept[members[nms_torch(boxes[members], scores[members], threshold)]] = True
    index = kept.nonzero()[:, 0]
    return index[scores[index].argsort(descending=True, stable=True)]


def nms_padded(boxes: Tensor, valid: Tensor, counts: Sequence[int], threshold: float) -> Tensor:
    """Mask (B, N) of what `nms` keeps in each group of each image; all settle together.

    The host waits once a round, not once an image and group.

    Args:
        boxes: (B, N, 4); group after group, the best of each group first.
        valid: (B, N) mask of the boxes that count.
        counts: boxes of each group.
    """
    dtype = torch.bfloat16 if boxes.is_cuda else torch.float32
    pairs = max(1, sum(count * count for count in counts))
    images = max(1, _MOST_BYTES // (pairs * dtype.itemsize))
    parts = zip(boxes.split(images), valid.split(images), strict=True)
    with torch.autocast(boxes.device.type, enabled=False):
        return torch.cat([_settle(*part, counts, threshold, dtype) for part in parts])


def _settle(
    boxes: Tensor, valid: Tensor, counts: Sequence[int], threshold: float, dtype: torch.dtype
) -> Tensor:
    """`nms_padded` of a few images. Sums of ones are above 0 in any precision, as is needed."""
    groups = boxes.split(list(counts), dim=1)
    suppresses = [_suppresses(group, threshold, dtype) for group in groups]
    stays = valid
    while True:
        parts = stays.to(dtype)[:, None].split(list(counts), dim=2)
        hits = [torch.bmm(*both) for both in zip(parts, suppresses, strict=True)]
        settled = (torch.cat(hits, dim=2)[:, 0] == 0) & valid
        if torch.equal(settled, stays):
            return settled
        stays = settled


def _suppresses(boxes: Tensor, threshold: float, dtype: torch.dtype) -> Tensor:
    """(B, M, M): 1 where the first box is better than the second and overlaps it too much."""
    images, count = boxes.shape[:2]
    found = boxes.new_empty((images, count, count), dtype=dtype)
    step = max(1, _MOST_PAIRS // max(1, count * count))
    for some, part in zip(boxes.split(step), found.split(step), strict=True):
        part.copy_((iou(some, some) > threshold).triu(1))
    return found


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
    ops = compiled_ops()
    if ops is not None:
        # Coordinates in single precision: half precision cannot resolve pixels.
        rois = torch.cat([images[:, None].float(), boxes.float()], dim=1)
        pooled: Tensor = ops.roi_align(features.float(), rois, output, scale, 0, True)
        return pooled.to(features.dtype)
    return roi_align_torch(features, boxes, images, output, scale)


def roi_align_torch(
    features: Tensor, boxes: Tensor, images: Tensor, output: int, scale: float
) -> Tensor:
    """`roi_align` without compiled operators: every bin is a weighted sum over a bag of pixels.

    The bags differ in size with the boxes; `embedding_bag` sums them without gathering. Boxes that
    are not finite have empty ones, hence zeros.
    """
    channels, height, width = features.shape[1:]
    corner = boxes.float() * scale - 0.5
    sides = (corner[:, 2:] - corner[:, :2]) / output  # of one bin: (K, 2) as x, y
    samples = sides.nan_to_num(0, 0, 0).ceil().clamp_min(0).to(torch.int64)

    bins = output * output
    count = samples.prod(dim=1).repeat_interleave(bins)  # samples of each bin, (K * bins,)
    start = count.cumsum(0) - count
    bag = torch.repeat_interleave(torch.arange(len(count), device=boxes.device), count)
    place = torch.arange(len(bag), device=boxes.device) - start[bag]
    box, cell = bag // bins, bag % bins
    across = samples[box, 0]

    x = _sample(corner[box, 0], sides[box, 0], cell % output, place % across, across)
    y = _sample(corner[box, 1], sides[box, 1], cell // output, place // across, samples[box, 1])
    columns, column_weights = _taps(x, width)
    rows, row_weights = _taps(y, height)

    pixel = (images[box, None] * height + rows)[:, :, None] * width + columns[:, None]
    weight = row_weights[:, :, None] * column_weights[:, None] / count[bag, None, None]
    table = features.permute(0, 2, 3, 1).reshape(-1, channels).float()
    summed = F.embedding_bag(
        pixel.flatten(), table, 4 * start, mode="sum", per_sample_weights=weight.flatten()
    )
    return summed.reshape(len(boxes), output, output, channels).permute(0, 3, 1, 2).to(features)


def _sample(corner: Tensor, side: Tensor, cell: Tensor, place: Tensor, count: Tensor) -> Tensor:
    """Coordinate of a sample: the middle of its share of its bin."""
    return corner + (cell + (place + 0.5) / count) * side


def _taps(at: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The two pixels (T, 2) a coordinate lies between, and their weights.

    Up to one pixel outside, the border pixel counts; farther out, nothing does.
    """
    inside = ((at >= -1) & (at <= length)).float()
    at = at.clamp(0, length - 1)
    low = at.floor().to(torch.int64)
    high = (low + 1).clamp(max=length - 1)
    share = at - low
    weights = torch.stack([1 - share, share], dim=1) * inside[:, None]
    return torch.stack([low, high], dim=1), weights


def pool_regions(
    maps: Sequence[Tensor], boxes: Sequence[Tensor], output: int, first_level: int = 2
) -> Tensor:
    """RoIAlign each box on the pyramid level that suits its size.

    Args:
        maps: feature maps from `first_level` on, level l at stride 2^l.
        boxes: (K_b, 4) for each image.

    Returns:
        (K, C, output, output), image after image.
    """
    every = torch.cat(list(boxes))
    images = torch.repeat_interleave(
        torch.arange(len(boxes), device=every.device),
        torch.tensor([len(part) for part in boxes]).to(every.device, non_blocking=True),
        output_size=len(every),
    )
    level = pyramid_level(every, first_level, first_level + len(maps) - 1)
    pooled = maps[0].new_zeros(len(every), maps[0].shape[1], output, output)
    for number, features in enumerate(maps, start=first_level):
        rows = (level == number).nonzero()[:, 0]
        if len(rows):
            pooled[rows] = roi_align(features, every[rows], images[rows], output, 2.0**-number)
    return pooled
