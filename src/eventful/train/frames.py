"""Frames to train a detector on: which of a dataset, and how one becomes pixels and a target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.data import Box, Video, VideoSet
from eventful.errors import ConfigError
from eventful.models.vitdet import Placement, Target, prepare
from eventful.models.vitdet.boxes import clip, nonempty
from eventful.train.samples import chance


@dataclass(frozen=True)
class Augment:
    """What may happen to a frame in training.

    Attributes:
        flip: probability of mirroring it.
        scale: range of factors on its size, evenly drawn; the square it is padded to stays.
    """

    flip: float = 0.5
    scale: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", tuple(self.scale))
        low, high = self.scale
        if not 0 <= self.flip <= 1 or not 0 < low <= high <= 1:
            raise ConfigError("Augment needs flip in [0, 1] and 0 < low <= high <= 1 in scale.")


@dataclass(frozen=True)
class Batch:
    """Frames of one step, as `ViTDet.losses` takes them."""

    pixels: Tensor
    targets: tuple[Target, ...]
    placements: tuple[Placement, ...]

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        targets = tuple(Target(t.boxes.to(device), t.labels.to(device)) for t in self.targets)
        return Batch(self.pixels.to(device, non_blocking=True), targets, self.placements)


Example = tuple[Tensor, Target, Placement]


class FrameExamples:
    """Frames of videos, padded to a square, with the objects in them.

    A box to be ignored is left out: its place counts as background.

    Args:
        frames: (video, position) of each.
        short: length of a frame's short edge, as in `eventful.models.vitdet.prepare`.
    """

    def __init__(
        self,
        frames: Sequence[tuple[Video, int]],
        size: int,
        short: int,
        augment: Augment | None = None,
        seed: int = 0,
    ) -> None:
        self.frames, self.size, self.short = frames, size, short
        self.augment, self.seed, self.epoch = augment or Augment(), seed, 0

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> Example:
        video, position = self.frames[index]
        frame = video.frame(position)
        boxes, labels = _arrays(frame.boxes)
        draw = chance(self.seed, self.epoch, index)
        mirrored, size = torch.rand(2, generator=draw).tolist()
        pixels = frame.pixels
        if mirrored < self.augment.flip:
            pixels, boxes = flipped(pixels, boxes)
        low, high = self.augment.scale
        factor = low + (high - low) * size
        side = max(1, round(self.size * factor))
        image, placement = prepare(pixels, side, max(1, round(self.short * factor)))
        padded = F.pad(image[0], (0, self.size - side, 0, self.size - side))
        moved = clip(placement.into(boxes), placement.content)
        seen = nonempty(moved)
        return padded, Target(moved[seen], labels[seen]), placement


def flipped(pixels: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """A frame (3, H, W) and its boxes (n, 4), mirrored."""
    width = pixels.shape[-1]
    x1, y1, x2, y2 = boxes.unbind(dim=1)
    return pixels.flip(-1), torch.stack([width - x2, y1, width - x1, y2], dim=1)


def _arrays(boxes: Iterable[Box]) -> tuple[Tensor, Tensor]:
    kept = [box for box in boxes if not box.ignore]
    corners = torch.tensor([(b.x1, b.y1, b.x2, b.y2) for b in kept], dtype=torch.float32)
    return corners.reshape(-1, 4), torch.tensor([b.label for b in kept], dtype=torch.int64)


def collate(examples: Sequence[Example]) -> Batch:
    """Examples of one size as a batch."""
    pixels, targets, placements = zip(*examples, strict=True)
    return Batch(torch.stack(pixels), targets, placements)


def spread_frames(videos: VideoSet, most: int | None) -> list[tuple[Video, int]]:
    """At most `most` frames of every video, evenly; None takes all."""
    chosen = []
    for video in videos:
        count = min(len(video), most or len(video))
        chosen += [(video, k * len(video) // count) for k in range(count)]
    return chosen


def at_most_per_class(videos: VideoSet, most: int) -> VideoSet:
    """Videos, in their order, as long as one of their classes has been seen less than `most` times.

    Reads the annotations of every first frame.
    """
    seen: Counter[int] = Counter()
    kept = []
    for video in videos:
        labels = {box.label for box in video.boxes[0]} if video.boxes is not None else set()
        if any(seen[label] < most for label in labels):
            seen.update(labels)
            kept.append(video)
    return replace(videos, videos=tuple(kept))
