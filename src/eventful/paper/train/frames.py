"""Frames to train a detector on: selection, augmentation, pixels and targets."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.errors import ConfigError, DamagedMediaError, MissingFileError
from eventful.models.vitdet import Placement, Target, prepare
from eventful.models.vitdet.boxes import clip, nonempty
from eventful.paper.data import Box, Frame, Video, VideoSet
from eventful.paper.data.problems import OnProblem, stop
from eventful.paper.train.samples import chance


@dataclass(frozen=True)
class Augment:
    """Augmentation of training frames.

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
        targets = tuple(target.to(device) for target in self.targets)
        return Batch(self.pixels.to(device, non_blocking=True), targets, self.placements)

    def pin_memory(self) -> Batch:
        """With pixels that can be copied to a GPU in the background; DataLoader calls this."""
        return replace(self, pixels=self.pixels.pin_memory())


Example = tuple[Tensor, Target, Placement]


class FrameExamples:
    """Frames of videos, padded to a square, with the objects in them.

    Args:
        frames: (video, position) of each.
        short: length of a frame's short edge, as in `eventful.models.vitdet.prepare`.
        on_problem: called for a frame that cannot be read. If it does not raise, the next frame
            of the list is used instead.
    """

    def __init__(
        self,
        frames: Sequence[tuple[Video, int]],
        size: int,
        short: int,
        augment: Augment | None = None,
        seed: int = 0,
        on_problem: OnProblem = stop,
    ) -> None:
        self.frames, self.size, self.short, self.on_problem = frames, size, short, on_problem
        self.augment, self.seed, self.epoch = augment or Augment(), seed, 0

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> Example:
        frame = self._readable(index)
        boxes, labels, ignored = _arrays(frame.boxes)
        draw = chance(self.seed, self.epoch, index)
        mirrored, size = torch.rand(2, generator=draw).tolist()
        pixels = frame.pixels
        if mirrored < self.augment.flip:
            width = pixels.shape[-1]
            pixels = pixels.flip(-1)
            boxes, ignored = flipped(boxes, width), flipped(ignored, width)
        low, high = self.augment.scale
        factor = low + (high - low) * size
        side = max(1, round(self.size * factor))
        image, placement = prepare(pixels, side, max(1, round(self.short * factor)))
        padded = F.pad(image[0], (0, self.size - side, 0, self.size - side))
        moved, spared = (clip(placement.into(b), placement.content) for b in (boxes, ignored))
        seen = nonempty(moved)
        target = Target(moved[seen], labels[seen], spared[nonempty(spared)])
        return padded, target, placement

    def _readable(self, index: int) -> Frame:
        """A frame, or the first after it that can be read."""
        for offset in range(len(self.frames)):
            video, position = self.frames[(index + offset) % len(self.frames)]
            try:
                return video.frame(position)
            except (DamagedMediaError, MissingFileError) as error:
                self.on_problem(error)
                warnings.warn(f"{error}; another frame is taken instead.", stacklevel=2)
        raise DamagedMediaError("None of the frames to train on can be read.")


def flipped(boxes: Tensor, width: int) -> Tensor:
    """The boxes (n, 4) of a mirrored frame."""
    x1, y1, x2, y2 = boxes.unbind(dim=1)
    return torch.stack([width - x2, y1, width - x1, y2], dim=1)


def _arrays(boxes: Iterable[Box]) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes (n, 4) and labels (n,) of the objects, and the boxes (k, 4) to be ignored."""
    every = list(boxes)
    corners = torch.tensor([(b.x1, b.y1, b.x2, b.y2) for b in every], dtype=torch.float32)
    labels = torch.tensor([b.label for b in every], dtype=torch.int64)
    spared = torch.tensor([b.ignore for b in every], dtype=torch.bool)
    corners = corners.reshape(-1, 4)
    return corners[~spared], labels[~spared], corners[spared]


def collate(examples: Sequence[Example]) -> Batch:
    """Examples of one size as a batch."""
    pixels, targets, placements = zip(*examples, strict=True)
    return Batch(torch.stack(pixels), targets, placements)


def spread_frames(videos: VideoSet, limit: int | None) -> list[tuple[Video, int]]:
    """At most `limit` frames of every video, evenly; None takes all."""
    chosen = []
    for video in videos:
        count = min(len(video), limit or len(video))
        chosen += [(video, k * len(video) // count) for k in range(count)]
    return chosen


def at_most_per_class(videos: VideoSet, limit: int) -> VideoSet:
    """The videos, in order, that show a class of which fewer than `limit` came before.

    Reads the annotations of every first frame.
    """
    seen: Counter[int] = Counter()
    kept = []
    for video in videos:
        shown = video.boxes[0] if video.boxes is not None else ()
        labels = {box.label for box in shown if not box.ignore}
        if any(seen[label] < limit for label in labels):
            seen.update(labels)
            kept.append(video)
    return replace(videos, videos=tuple(kept))
