"""Clips by name: a video file, a folder of pictures, or a generated stress clip."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.errors import ConfigError, MissingFileError
from eventful.video.source import FrameSource, ImageFiles, VideoFile, read_image
from eventful.video.stress import StressClip

PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
STRESS = "stress:"
_SCENE = (288, 512)  # size of a generated scene where nothing else gives one
_BASE = 120  # frames of a video that a stress clip may use


@dataclass(frozen=True)
class Footage:
    """A clip that can be read from its start any number of times.

    Attributes:
        about: what is in it, in one line; "" for a user's file.
        size: height and width of its frames.
        read: the frames, uint8 RGB (3, H, W) each.
    """

    name: str
    about: str
    size: tuple[int, int]
    read: Callable[[], Iterator[Tensor]]

    def first(self, frames: int | None) -> Footage:
        """The same, cut after so many frames; None for all."""
        if frames is None:
            return self
        read = self.read
        return Footage(self.name, self.about, self.size, lambda: itertools.islice(read(), frames))


def open_footage(name: str, frames: int | None = None, size: str = "", seed: int = 0) -> Footage:
    """A clip by name.

    Args:
        name: a file, a folder of pictures, `stress:NAME`, or `stress:NAME:FILE` with a picture or
            video to make it of.
        frames: at most so many.
        size: as `fitted_size` takes it; generated scenes are made at it if it is HxW.
    """
    if name.startswith(STRESS):
        return _stress(name, frames or 100, size, seed)
    source = source_of(Path(name))
    return from_source(Path(name).stem, source).first(frames)


def from_source(name: str, source: FrameSource) -> Footage:
    """A clip of a source of frames."""
    example = next(iter(source))
    return Footage(name, "", (example.shape[1], example.shape[2]), lambda: iter(source))


def source_of(path: Path) -> FrameSource:
    """The frames of a file or folder. The one place that knows how videos are read."""
    if not path.exists():
        raise MissingFileError(
            f"{path} is not there. A clip is a video file, a folder of pictures, or stress:NAME."
        )
    if path.is_dir():
        found = sorted(p.name for p in path.iterdir() if p.suffix.lower() in PICTURES)
        if not found:
            raise MissingFileError(f"{path} holds no pictures ({', '.join(PICTURES)}).")
        return ImageFiles(path, tuple(found))
    if path.suffix.lower() in PICTURES:
        return ImageFiles(path.parent, (path.name,))
    return VideoFile(path)


def fitted_size(
    original: tuple[int, int], given: str, patch: tuple[int, int], longest: int
) -> tuple[int, int]:
    """Height and width for the model, in whole patches.

    Args:
        given: HxW; or one number, the longer side; or "" for `longest`. With one number the
            shape is that of the original.
    """
    numbers = _numbers(given)
    if len(numbers) == 2:
        height, width = numbers
        if height % patch[0] or width % patch[1]:
            near = [max(1, round(n / p)) * p for n, p in zip(numbers, patch, strict=True)]
            raise ConfigError(
                f"--size {given} is no whole number of patches of {patch[0]}x{patch[1]} pixels; "
                f"the nearest is {near[0]}x{near[1]}."
            )
        return height, width
    scale = (numbers[0] if numbers else longest) / max(original)
    height, width = (
        max(1, round(side * scale / own)) * own for side, own in zip(original, patch, strict=True)
    )
    return height, width


def resized(frame: Tensor, size: tuple[int, int]) -> Tensor:
    """A frame (3, H, W) of another size, still uint8."""
    if tuple(frame.shape[-2:]) == size:
        return frame
    made = F.interpolate(frame[None].float(), size, mode="bilinear", antialias=True)[0]
    return made.round().clamp(0, 255).to(torch.uint8)


def _numbers(given: str) -> list[int]:
    parts = given.lower().split("x") if given else []
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--size is HxW in pixels, e.g. 252x448, or one side; got {given!r}.")
    return [int(part) for part in parts]


def _stress(name: str, frames: int, size: str, seed: int) -> Footage:
    kind, _, path = name.removeprefix(STRESS).partition(":")
    base = _base(Path(path)) if path else None
    numbers = _numbers(size)
    shape = _SCENE if base is None else (base.shape[2], base.shape[3])
    if len(numbers) == 2:
        shape = numbers[0], numbers[1]
    clip = StressClip(kind, frames, shape, base, seed)
    label = f"stress-{kind}" + (f"-{Path(path).stem}" if path else "")
    return Footage(label, clip.about, shape, lambda: iter(clip))


def _base(path: Path) -> Tensor:
    """A picture, or the first frames of a video, (T, 3, H, W)."""
    if path.suffix.lower() in PICTURES:
        return read_image(path)[None]
    return torch.stack(list(itertools.islice(iter(source_of(path)), _BASE)))
