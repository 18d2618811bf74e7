"""The common form of all datasets: videos with frames, and boxes or a label."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
        pixels = self.frames.read([index])[0]
        return Frame(index, pixels, self.boxes[index] if self.boxes is not None else ())


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
