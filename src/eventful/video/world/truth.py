"""Ground truth of frames: boxes around what is seen of each object, and how much that is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eventful.video.world import figures
from eventful.video.world.rendering import Shot

LEAST_SIDE, LEAST_SEEN = 12, 0.25  # below these an object is to be ignored


@dataclass(frozen=True)
class Truth:
    """What is in one frame: m objects of which something is seen.

    Attributes:
        boxes: (m, 4) left, top, right, bottom of the seen part, in pixels.
        labels: (m,) which of `CLASSES`.
        tracks: (m,) the same number for the same object in every frame.
        visibility: (m,) share of the object that is seen; the rest is hidden or outside.
        ignore: (m,) too small or too hidden to be asked for.
        masks: (m, H, W) its pixels.
        depth: (H, W) metres along the view; infinity in the sky.
    """

    boxes: Tensor
    labels: Tensor
    tracks: Tensor
    visibility: Tensor
    ignore: Tensor
    masks: Tensor
    depth: Tensor


@dataclass(frozen=True)
class Boxes:
    """The same of B frames at once, without masks: (B, n, 4), (B, n) each.

    Attributes:
        seen: whether anything is seen of it; else its row means nothing.
    """

    boxes: Tensor
    labels: Tensor
    tracks: Tensor
    visibility: Tensor
    ignore: Tensor
    seen: Tensor


def boxes_of(shot: Shot) -> Boxes:
    """The boxes of all frames, without asking the device."""
    count = shot.actors.x.shape[1]
    rows, columns, pixels = [], [], []
    for column in range(count):
        mine = shot.owner == column
        rows.append(mine.any(dim=2))
        columns.append(mine.any(dim=1))
        pixels.append(mine.sum(dim=(1, 2)))
    top, bottom = _ends(torch.stack(rows, dim=1))
    left, right = _ends(torch.stack(columns, dim=1))
    counted = torch.stack(pixels, dim=1)
    boxes = torch.stack([left, top, right, bottom], dim=-1).float()
    seen = (counted > 0) & (shot.actors.kind < len(figures.KINDS))
    visibility = (counted / shot.area.clamp_min(1.0)).clamp(0, 1)
    small = torch.minimum(right - left, bottom - top) < LEAST_SIDE
    ignore = small | (visibility < LEAST_SEEN)
    return Boxes(boxes, shot.actors.kind.long(), shot.actors.track.long(), visibility, ignore, seen)


def _ends(line: Tensor) -> tuple[Tensor, Tensor]:
    """First and past-the-last place (B, n) that is true along the last dimension."""
    length = line.shape[-1]
    first = line.int().argmax(dim=-1)
    last = length - line.flip(-1).int().argmax(dim=-1)
    return first, last


def truth_of(shot: Shot, index: int = 0, found: Boxes | None = None) -> Truth:
    """The ground truth of one frame of a shot."""
    found = found or boxes_of(shot)
    kept = found.seen[index].nonzero()[:, 0]
    masks = shot.owner[index][None] == kept[:, None, None]
    return Truth(
        found.boxes[index, kept], found.labels[index, kept], found.tracks[index, kept],
        found.visibility[index, kept], found.ignore[index, kept], masks, shot.depth[index],
    )  # fmt: skip
