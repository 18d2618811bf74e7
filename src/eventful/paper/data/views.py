"""Views of a video for action recognition: stretches of time, each cut into square crops.

The paper's ViViT averages 4 temporal by 3 spatial views of 32 frames (Section 5.2). Where a view
lies depends on the length and size of the video alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.errors import ConfigError
from eventful.video.source import FrameSource


@dataclass(frozen=True)
class View:
    """One view, cut out.

    Args:
        temporal: Which stretch of time.
        spatial: Which crop of it.
        frames: Positions in the video; the last is repeated where the video is too short.
        pixels: RGB in [0, 1], (T, 3, S, S).
    """

    temporal: int
    spatial: int
    frames: tuple[int, ...]
    pixels: Tensor


@dataclass(frozen=True)
class ViewPlan:
    """How many views, how long, how large.

    Args:
        frames: Frames per view.
        stride: Distance between them in the video.
        temporal: Stretches, spread evenly from the first frame to the last; one is centred.
        spatial: Crops, spread evenly along the longer side; one is centred.
        size: Side of a crop. The shorter side of the video is scaled to it.
    """

    frames: int = 32
    stride: int = 1
    temporal: int = 4
    spatial: int = 3
    size: int = 320

    def __post_init__(self) -> None:
        for field in ("frames", "stride", "temporal", "spatial", "size"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} of a view plan is {getattr(self, field)}: give 1 up")

    def __len__(self) -> int:
        return self.temporal * self.spatial

    def indices(self, length: int) -> tuple[tuple[int, ...], ...]:
        """Positions of the frames of each temporal view in a video of `length` frames."""
        if length < 1:
            raise ConfigError("a video without frames has no views: leave it out")
        span = self.frames * self.stride
        starts = _spread(max(length - span, 0), self.temporal)
        return tuple(
            tuple(min(start + i * self.stride, length - 1) for i in range(self.frames))
            for start in starts
        )

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """The size of a frame once its shorter side is the side of a crop."""
        scale = max(self.size / height, self.size / width)
        return round(height * scale), round(width * scale)

    def crops(self, height: int, width: int) -> tuple[tuple[int, int], ...]:
        """Top left corners of the spatial views in a frame of this size, already scaled."""
        down = _spread(height - self.size, self.spatial)
        right = _spread(width - self.size, self.spatial)
        return tuple(zip(down, right, strict=True))

    def cut(self, source: FrameSource) -> Iterator[View]:
        """Every view in turn, the crops of one stretch together; a stretch is decoded at once."""
        for temporal, frames in enumerate(self.indices(len(source))):
            kept = sorted(set(frames))
            pixels = source.read(kept).float() / 255  # (T, 3, H, W)
            size = self.scaled(*pixels.shape[-2:])
            if size != tuple(pixels.shape[-2:]):
                pixels = F.interpolate(
                    pixels, size, mode="bilinear", align_corners=False, antialias=True
                )
            order = torch.tensor([kept.index(frame) for frame in frames])
            for spatial, (top, left) in enumerate(self.crops(*size)):
                crop = pixels[..., top : top + self.size, left : left + self.size]
                yield View(temporal, spatial, frames, crop[order])

    def stack(self, source: FrameSource) -> Tensor:
        """All views of a video, (V, T, 3, S, S) in [0, 1]."""
        return torch.stack([view.pixels for view in self.cut(source)])


EPIC_VIEWS = ViewPlan(stride=1, size=320)  # of video at 30 frames a second
KINETICS_VIEWS = ViewPlan(stride=2, size=224)  # of video at 25 frames a second


def _spread(length: int, count: int) -> list[int]:
    """`count` whole positions from 0 to `length`, evenly; one lies in the middle."""
    if count == 1:
        return [length // 2]
    return [int(k * (length / (count - 1))) for k in range(count)]
