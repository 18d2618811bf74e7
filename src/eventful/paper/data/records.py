"""The common form of all datasets: videos with frames, and boxes or a label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

from torch import Tensor

from eventful.video.source import FrameSource

Task = Literal["detection", "action"]


@dataclass(frozen=True, slots=True)
class Box:
    """One annotated object in one frame.

    Args:
        x1: Left edge in pixels of the frame as stored.
        y1: Top edge.
        x2: Right edge.
        y2: Bottom edge.
        label: Index into the classes of the set.
        track: The same number in every frame that shows the same object, where the data has it.
        ignore: A detection of it counts as neither right nor wrong.
    """

    x1: float
    y1: float
    x2: float
    y2: float
    label: int
    track: int | None = None
    ignore: bool = False


class Annotations(Protocol):
    """Boxes by position of the frame; files may be read on access."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Box, ...]: ...


@dataclass(frozen=True)
class Frame:
    """One decoded frame.

    Args:
        pixels: uint8 RGB, (3, H, W).
    """

    index: int
    pixels: Tensor
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Video:
    """One video, undecoded.

    Args:
        name: Unique within its set.
        boxes: Of every frame, for detection; None where the task has none.
        label: Index of the action, for recognition; None where the task has none.
    """

    name: str
    frames: FrameSource
    boxes: Annotations | None = None
    label: int | None = None

    def __len__(self) -> int:
        return len(self.frames)

    def __iter__(self) -> Iterator[Frame]:
        """Decode frame after frame."""
        for index, pixels in enumerate(self.frames):
            yield Frame(index, pixels, self.boxes[index] if self.boxes is not None else ())

    def frame(self, index: int) -> Frame:
        """Decode one frame."""
        boxes = self.boxes[index] if self.boxes is not None else ()
        return Frame(index, self.frames.read([index])[0], boxes)


@dataclass(frozen=True)
class VideoSet:
    """The videos of one split, in an order that depends on the data alone.

    Every format opens as one of these, so evaluation and training do not depend on the format. It
    is a map-style dataset to `torch.utils.data`.

    Args:
        format: Name of the format it was read from.
        classes: Names of the labels, in their order.
    """

    format: str
    split: str
    task: Task
    classes: tuple[str, ...]
    videos: tuple[Video, ...]

    @property
    def layout(self) -> str:
        """Old name of `format`."""
        return self.format

    def __len__(self) -> int:
        return len(self.videos)

    def __getitem__(self, index: int) -> Video:
        return self.videos[index]

    def __iter__(self) -> Iterator[Video]:
        return iter(self.videos)


def pieces(name: str, frames: Sequence[int]) -> Iterator[tuple[str, slice]]:
    """The parts of a video between gaps, with their names.

    A gap is a distance between frames larger than the smallest one: a stream must not carry its
    state across it. A video without gaps keeps its name; otherwise each part is called by the name
    and its first frame.

    Args:
        frames: Numbers of its frames, rising.
    """
    steps = [after - before for before, after in pairwise(frames)]
    least = min(steps, default=0)
    cuts = [0, *(i for i, step in enumerate(steps, start=1) if step > least), len(frames)]
    for start, end in pairwise(cuts):
        yield name if len(cuts) == 2 else f"{name}@{frames[start]}", slice(start, end)
