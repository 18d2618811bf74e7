"""Pictures of any size into frames of one size: scaled, padded or cropped, and normalised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from eventful.errors import ConfigError
from eventful.video.frame import Region
from eventful.video.normalization import Normalization

Fit = Literal["pad", "crop", "stretch"]
# Red, green and blue, each (H, W), uint8 or float32 from 0 to 255.
Planes = tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]


@dataclass(frozen=True)
class Layout:
    """Where a picture goes in a frame.

    Attributes:
        frame: height and width of the frame.
        scaled: height and width of the picture after scaling.
        top, left: of the scaled picture in the frame; negative where it is cropped.
    """

    frame: tuple[int, int]
    scaled: tuple[int, int]
    top: int
    left: int

    @property
    def region(self) -> Region:
        """The same as floats, for `Frame`."""
        return Region(float(self.top), float(self.left), *map(float, self.scaled))


@dataclass(frozen=True)
class Fitting:
    """How pictures become pixels of a frame.

    Args:
        size: height and width of frames; None for the picture's own.
        fit: "pad" keeps the aspect ratio and fills the rest with zeros (after normalisation),
            "crop" keeps it and cuts off what is too much, "stretch" does not keep it.
        multiple_of: the size is rounded to the nearest multiple of this.
    """

    size: tuple[int, int] | None
    fit: Fit
    multiple_of: int
    normalization: Normalization

    def __post_init__(self) -> None:
        if self.fit not in get_args(Fit):
            raise ConfigError(f"fit={self.fit!r}: choose 'pad', 'crop' or 'stretch'.")
        if not isinstance(self.multiple_of, int) or self.multiple_of < 1:
            raise ConfigError(f"multiple_of={self.multiple_of!r}: choose a whole number from 1.")

    def layout(self, height: int, width: int) -> Layout:
        """Where a picture of this size goes."""
        wanted = (height, width) if self.size is None else self.size
        frame = (self._rounded(wanted[0]), self._rounded(wanted[1]))
        ratios = frame[0] / height, frame[1] / width
        if self.fit == "stretch":
            return Layout(frame, frame, 0, 0)
        ratio = min(ratios) if self.fit == "pad" else max(ratios)
        scaled = (max(1, round(height * ratio)), max(1, round(width * ratio)))
        top, left = (frame[0] - scaled[0]) // 2, (frame[1] - scaled[1]) // 2
        return Layout(frame, scaled, top, left)

    def pixels(self, layout: Layout, planes: Planes) -> Tensor:
        """A scaled picture as pixels of a frame, (1, 3, H, W).

        Computed by numpy: in a thread of its own, torch would start another set of threads.
        """
        whole = layout.scaled == layout.frame
        frame = (np.empty if whole else np.zeros)((1, 3, *layout.frame), np.float32)
        rows, from_rows = _overlap(layout.top, layout.scaled[0], layout.frame[0])
        columns, from_columns = _overlap(layout.left, layout.scaled[1], layout.frame[1])
        for channel, plane in enumerate(planes):
            mean, std = self.normalization.mean[channel], self.normalization.std[channel]
            part = frame[0, channel, rows, columns]
            np.copyto(part, plane[from_rows, from_columns])
            np.multiply(part, np.float32(1 / (255 * std)), out=part)
            if mean:
                np.subtract(part, np.float32(mean / std), out=part)
        return torch.from_numpy(frame)

    def _rounded(self, edge: int) -> int:
        return max(1, round(edge / self.multiple_of)) * self.multiple_of


def frame_size(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """The `size` of `eventful.read` as height and width."""
    if size is None:
        return None
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(isinstance(edge, int) and edge > 0 for edge in pair):
        raise ConfigError(f"size={size!r}: give one edge, or (height, width), in pixels.")
    return pair[0], pair[1]


def resized(picture: NDArray[np.uint8], height: int, width: int) -> Planes:
    """A picture (H, W, 3) scaled with antialiasing, as planes."""
    if picture.shape[:2] == (height, width):
        return picture[..., 0], picture[..., 1], picture[..., 2]
    # In bytes, channels last: seven times as fast as in floats, and at most one level apart.
    pixels = torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1)[None]
    scaled = F.interpolate(pixels, (height, width), mode="bilinear", antialias=True)[0].numpy()
    return scaled[0], scaled[1], scaled[2]


def _overlap(start: int, length: int, edge: int) -> tuple[slice, slice]:
    """What a scaled picture covers of a frame along one edge, and which part of it that is."""
    first, last = max(start, 0), min(start + length, edge)
    return slice(first, last), slice(first - start, last - start)
