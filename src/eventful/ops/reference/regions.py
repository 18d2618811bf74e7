"""Boxes (x1, y1, x2, y2) on a device: their overlap, NMS, and the features inside them.

Shapes do not depend on values, so that kernels which serve these operations need no answer from
the host. The code here waits for it: it is the oracle, and what runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_MOST_PAIRS = 1 << 25  # IoUs computed at once for several sets
_CACHED_PAIRS = 1 << 16  # of one set on a CPU: as many as its cache holds
_MOST_BYTES = 1 << 30  # of the matrices of several sets that are kept until NMS has settled
_CHUNK = 256  # boxes that `keep_apart` compares with one another


def area(boxes: Tensor) -> Tensor:
    """Areas (...) of boxes (..., 4)."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def intersection(a: Tensor, b: Tensor) -> Tensor:
    """Common areas; one axis after the other, so that no intermediate has two numbers a pair."""
    width, height = (
        (
            torch.minimum(a[..., i + 2], b[..., i + 2]) - torch.maximum(a[..., i], b[..., i])
        ).clamp_min(0)
        for i in (0, 1)
    )
    return width * height


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union (..., N, M) of boxes (..., N, 4) and (..., M, 4).

    It is 0 where one of the two is empty.
    """
    inter = intersection(a[..., :, None, :], b[..., None, :, :])
    union = area(a)[..., :, None] + area(b)[..., None, :] - inter
    return torch.where(inter > 0, inter / union, inter.new_zeros(()))


def suppress(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """Mask (G, N) of the boxes of each set that NMS keeps.

    A box is kept if no better box of its set that is kept overlaps it by more than `threshold`.

    Args:
        boxes: (G, N, 4), finite; in each set the best first.
        valid: (G, N) mask of the boxes that count.
    """
    dtype = torch.bfloat16 if boxes.is_cuda else torch.float32
    pairs = max(1, boxes.shape[1] ** 2)
    sets = max(1, _MOST_BYTES // (pairs * dtype.itemsize))
    parts = zip(torch.split(boxes, sets), torch.split(valid, sets), strict=True)
    with torch.autocast(boxes.device.type, enabled=False):
        return torch.cat([_settle(*part, threshold, dtype) for part in parts])


def _settle(boxes: Tensor, valid: Tensor, threshold: float, dtype: torch.dtype) -> Tensor:
    """`suppress` of a few sets: rounds until nothing changes, all sets together.

    Sums of ones are above 0 in any precision, as is needed.
    """
    suppresses = _suppresses(boxes, threshold, dtype)
    stays = valid
    while True:
        hits = torch.bmm(stays.to(dtype)[:, None], suppresses)[:, 0]
        settled = (hits == 0) & valid
        if torch.equal(settled, stays):
            return settled
        stays = settled


def _suppresses(boxes: Tensor, threshold: float, dtype: torch.dtype) -> Tensor:
    """(G, N, N): 1 where the first box is better than the second and overlaps it too much."""
    sets, count = boxes.shape[:2]
    found = boxes.new_empty((sets, count, count), dtype=dtype)
    pairs = _CACHED_PAIRS if boxes.device.type == "cpu" else _MOST_PAIRS // max(1, sets)
    step = max(1, pairs // max(1, count))
    columns = boxes.transpose(1, 2).contiguous().transpose(1, 2)  # each corner in a row of its own
    for start in range(0, count, step):
        some = slice(start, start + step)
        found[:, some] = iou(columns[:, some], columns) > threshold
    return found.triu_(1)


def keep_apart(
    boxes: Tensor, groups: Tensor, count: Tensor, threshold: float, limit: int
) -> tuple[Tensor, Tensor]:
    """The first boxes of each image that NMS within groups keeps, at most `limit`.

    Args:
        boxes: (B, N, 4), the best first.
        groups: (B, N), at least 0; boxes of different groups do not suppress each other.
        count: (B,) boxes of each image that count.

    Returns:
        Their places (B, limit), the best first, 0 where there is none; and how many there are.
    """
    index = torch.zeros(len(boxes), limit, dtype=torch.int64, device=boxes.device)
    found = torch.zeros(len(boxes), dtype=torch.int64, device=boxes.device)
    for image, number in enumerate(count.tolist()):
        kept = _first_apart(boxes[image, :number], groups[image, :number], threshold, limit)
        index[image, : len(kept)] = kept
        found[image] = len(kept)
    return index, found


def _first_apart(boxes: Tensor, groups: Tensor, threshold: float, limit: int) -> Tensor:
    """`keep_apart` of one image, some boxes at a time until enough are kept."""
    kept = torch.zeros(0, dtype=torch.int64, device=boxes.device)
    for start in range(0, len(boxes), _CHUNK):
        some = slice(start, start + _CHUNK)
        before = _too_near((boxes[kept], groups[kept]), (boxes[some], groups[some]), threshold)
        free = ~before.any(dim=0)
        near = _too_near((boxes[some], groups[some]), (boxes[some], groups[some]), threshold)
        near, stays = near.triu(1), free
        while True:
            settled = free & ~(near & stays[:, None]).any(dim=0)
            if torch.equal(settled, stays):
                break
            stays = settled
        kept = torch.cat([kept, start + stays.nonzero()[:, 0]])
        if len(kept) >= limit:
            break
    return kept[:limit]


def _too_near(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], threshold: float) -> Tensor:
    """Pairs (N, M) of boxes of the same group that overlap by more than `threshold`."""
    return (iou(a[0], b[0]) > threshold) & (a[1][:, None] == b[1][None])


def align_regions(
    maps: tuple[Tensor, ...],
    scales: tuple[float, ...],
    boxes: Tensor,
    level: Tensor,
    output: int,
) -> Tensor:
    """RoIAlign of each box on one of several maps.

    Each bin averages ceil(bin side) samples along each axis, half-pixel aligned: detectron2's
    ROIAlignV2 with sampling ratio 0.

    Args:
        maps: (B, h, w, C) each; images may lie apart, each one is contiguous.
        scales: pixels of each map per pixel of the image.
        boxes: (B, K, 4), no larger than an image or so: the work grows with their area.
        level: (B, K) which map a box reads; -1 for none, which gives zeros.

    Returns:
        (B * K, output, output, C), image after image.
    """
    return by_level(maps, scales, boxes, level, output, roi_align)


def by_level(
    maps: Sequence[Tensor],
    scales: Sequence[float],
    boxes: Tensor,
    level: Tensor,
    output: int,
    align: Callable[[Tensor, Tensor, Tensor, int, float], Tensor],
) -> Tensor:
    """`align_regions` by a function that reads one map, called as `roi_align`."""
    images, places = level.shape
    image = torch.arange(images, device=boxes.device).repeat_interleave(places)
    every, own = boxes.flatten(0, 1), level.flatten()
    pooled = maps[0].new_zeros(len(every), output, output, maps[0].shape[-1])
    for number, (features, scale) in enumerate(zip(maps, scales, strict=True)):
        rows = (own == number).nonzero()[:, 0]
        if len(rows):
            part = align(features.permute(0, 3, 1, 2), every[rows], image[rows], output, scale)
            pooled[rows] = part.permute(0, 2, 3, 1)
    return pooled


def roi_align(features: Tensor, boxes: Tensor, images: Tensor, output: int, scale: float) -> Tensor:
    """Features (K, C, output, output) inside boxes: every bin is a weighted sum of pixels.

    The bags of pixels differ in size with the boxes; `embedding_bag` sums them without gathering.
    Boxes that are not finite have empty ones, hence zeros.

    Args:
        features: (B, C, h, w).
        boxes: (K, 4) in pixels of the image.
        images: (K,) which of the B images each box is in.
        scale: feature pixels per image pixel.
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
