"""Frames and boxes, at the size the model takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.mot15.settings import PATCH, Options
from eventful.paper.data import Box, Video, open_dataset
from eventful.tokens.layout import TokenLayout
from eventful.video.source import read_image


@dataclass(frozen=True)
class Clip:
    """One sequence, decoded and resized.

    Attributes:
        frames: uint8 (T, 3, H, W), H and W whole numbers of patches.
        truth: boxes of each frame, in its pixels.
    """

    name: str
    frames: Tensor
    truth: list[list[Box]]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.frames.shape[2], self.frames.shape[3]

    @property
    def layout(self) -> TokenLayout:
        """The class token, and a grid of patches."""
        return TokenLayout((self.size[0] // PATCH, self.size[1] // PATCH), prefix=1)

    @property
    def tokens(self) -> int:
        """Patches and the class token."""
        return self.layout.tokens


def model_size(size: tuple[int, int], width: int) -> tuple[int, int]:
    """The size nearest to `width` pixels wide at the same shape, in whole patches."""
    columns = round(width / PATCH)
    rows = max(1, round(size[0] * columns / size[1]))
    return rows * PATCH, columns * PATCH


def fit(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Frames (T, 3, H, W) of another size, still uint8."""
    if tuple(pixels.shape[-2:]) == size:
        return pixels
    resized = F.interpolate(pixels.float(), size, mode="bilinear", antialias=True)
    return resized.round().clamp(0, 255).to(torch.uint8)


def scaled(boxes: Sequence[Box], x: float, y: float) -> list[Box]:
    return [replace(b, x1=b.x1 * x, x2=b.x2 * x, y1=b.y1 * y, y2=b.y2 * y) for b in boxes]


def load_clip(video: Video, width: int, indices: Sequence[int]) -> Clip:
    frames, truth = [], []
    assert video.boxes is not None
    for index in indices:
        pixels = read_image(video.frames.path(index))  # type: ignore[attr-defined]
        original = (pixels.shape[1], pixels.shape[2])
        size = model_size(original, width)
        frames.append(fit(pixels[None], size)[0])
        truth.append(scaled(video.boxes[index], size[1] / original[1], size[0] / original[0]))
    return Clip(video.name, torch.stack(frames), truth)


def load_clips(data: Path, split: str, options: Options) -> list[Clip]:
    """Training frames are taken evenly from each sequence, validation ones from its start."""
    clips = []
    for video in open_dataset(data, split):
        if options.sequences and split == "val" and video.name not in options.sequences:
            continue
        limit = options.train_frames if split == "train" else options.val_frames
        count = min(limit or len(video), len(video))
        if split == "train":
            indices = [k * len(video) // count for k in range(count)]
        else:
            indices = list(range(count))
        clips.append(load_clip(video, options.width, indices))
    return clips
