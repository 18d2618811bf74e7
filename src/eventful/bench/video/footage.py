"""Clips by name: a video file, a folder of pictures, or a generated stress clip.

Files are read by `eventful.read`, as a user reads them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eventful.errors import ConfigError, DamagedMediaError, MissingFileError
from eventful.modelspec.size import Longest, parse_size, whole_patches
from eventful.video.address import without_credentials
from eventful.video.fitting import Fit, Fitting, resized
from eventful.video.normalization import choose_normalization
from eventful.video.read import ReaderGroup, VideoReader, read
from eventful.video.stress import StressClip

STRESS = "stress:"
FIT: Fit = "stretch"  # boxes and labels of the clip are scaled by side, without padding
_SCENE = (288, 512)  # size of a generated scene where nothing else gives one
_BASE = 120  # frames of a video that a stress clip may use


@dataclass(frozen=True)
class Footage:
    """A clip that can be read from its start any number of times.

    Attributes:
        about: what is in it, in one line; "" for a user's file.
        size: height and width of its frames as stored.
        read: the frames, (1, 3, H, W) float32 each, given height and width (None for those
            stored) and `normalize`, as `eventful.read` takes them.
    """

    name: str
    about: str
    size: tuple[int, int]
    read: Callable[[tuple[int, int] | None, Any], Iterator[Tensor]]

    def first(self, frames: int | None) -> Footage:
        """The same, cut after so many frames; None for all."""
        if frames is None:
            return self
        read = self.read

        def cut(size: tuple[int, int] | None, normalize: Any) -> Iterator[Tensor]:
            return itertools.islice(read(size, normalize), frames)

        return Footage(self.name, self.about, self.size, cut)

    def pictures(self, size: tuple[int, int] | None = None) -> Iterator[Tensor]:
        """The frames as uint8 RGB (3, H, W), which take a quarter of the memory."""
        for frame in self.read(size, "none"):
            yield (frame[0] * 255).round().to(torch.uint8)


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
    return footage_of(Path(name).stem, _existing(name)).first(frames)


def footage_of(name: str, source: Path) -> Footage:
    """A clip of a file, a folder of pictures, or a pattern, under a name."""
    with _opened(source) as reader:
        size = next(iter(reader)).original_size
    return Footage(name, "", size, partial(_frames, source))


def _existing(name: str | Path) -> Path:
    path = Path(name)
    if not path.is_file() and not path.is_dir():
        raise MissingFileError(
            f"{without_credentials(str(name))} is not there. A clip is a video file, a folder of "
            "pictures, or stress:NAME."
        )
    return path


def _opened(
    source: Path, size: tuple[int, int] | None = None, normalize: Any = "none"
) -> VideoReader:
    reader = read(source, size, fit=FIT, normalize=normalize)
    if isinstance(reader, ReaderGroup):
        reader.close()
        raise ConfigError(f"{source} lists several sources. Name each of them as a clip.")
    return reader


def _frames(source: Path, size: tuple[int, int] | None, normalize: Any) -> Iterator[Tensor]:
    """Every frame. One that does not decode is an error: those after it would have its labels."""
    with _opened(source, size, normalize) as reader:
        for frame in reader:
            _refuse_damage(reader)
            yield frame
        _refuse_damage(reader)


def _refuse_damage(reader: VideoReader) -> None:
    if reader.damaged:
        raise DamagedMediaError(
            f"{reader.source} has frames that do not decode. Fetch it again, or convert it."
        )


def fitted_size(
    original: tuple[int, int], given: str, patch: tuple[int, int], longest: int
) -> tuple[int, int]:
    """Height and width for the model, in whole patches.

    Args:
        given: see `parse_size`; "" for the shape of the original.
        longest: its longer side then.
    """
    return whole_patches(parse_size(given) or Longest(longest), original, patch)


def _stress(name: str, frames: int, size: str, seed: int) -> Footage:
    kind, _, path = name.removeprefix(STRESS).partition(":")
    base = _base(Path(path)) if path else None
    shape = _SCENE if base is None else (base.shape[2], base.shape[3])
    if isinstance(given := parse_size(size), tuple):
        shape = given
    clip = StressClip(kind, frames, shape, base, seed)
    label = f"stress-{kind}" + (f"-{Path(path).stem}" if path else "")
    return Footage(label, clip.about, shape, partial(_generated, clip))


def _generated(clip: StressClip, size: tuple[int, int] | None, normalize: Any) -> Iterator[Tensor]:
    """The frames of a stress clip, fitted as `eventful.read` fits pictures."""
    fitting = Fitting(size, FIT, 1, choose_normalization(normalize))
    layout = fitting.layout(*clip.size)
    for frame in clip:
        planes = resized(frame.permute(1, 2, 0).numpy(), *layout.scaled)
        yield fitting.pixels(layout, planes)


def _base(path: Path) -> Tensor:
    """A picture, or the first frames of a video, (T, 3, H, W)."""
    return torch.stack(list(footage_of("", _existing(path)).first(_BASE).pictures()))
