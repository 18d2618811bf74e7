"""One video frame: pixels that any model takes, with the frame's time, place and motion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eventful.errors import FrameError


class Region(NamedTuple):
    """Where the whole picture lies in a frame, in pixels of the frame.

    A cropped picture is larger than its frame: `top` or `left` is then negative.
    """

    top: float
    left: float
    height: float
    width: float


@dataclass(frozen=True)
class FrameInfo:
    """What is known of one frame besides its pixels.

    Attributes:
        index: number of the frame in its source, from 0. Dropped frames are counted,
            damaged ones are not.
        time: seconds from the start of the video; of a live source, seconds since it was opened.
        source: the file or address, without credentials.
        original_size: height and width before scaling.
        region: where the picture lies in the frame.
        key: whether it is a key frame of the video file.
        resumed: whether the source was lost before it and found again: what a stream remembers is
            out of date, so flush it.
    """

    index: int
    time: float
    source: str
    original_size: tuple[int, int]
    region: Region
    key: bool
    resumed: bool = False


class Frame(torch.Tensor):
    """Pixels of a frame, (B, 3, H, W), with attributes. Any model takes it as a tensor.

    Operations on a frame return plain tensors. `to`, `cuda`, `cpu`, `float`, `half`, `bfloat16`,
    `double` and `pin_memory` return a frame with the same attributes.

    Attributes:
        motion: as given, in float32.
        infos: one `FrameInfo`, or one for each frame of a `stack`.
    """

    motion: Tensor | None
    infos: tuple[FrameInfo, ...]

    # As for torch.nn.Parameter: operations see a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(
        cls,
        pixels: Tensor,
        *,
        motion: Tensor | None = None,
        index: int = 0,
        time: float = 0.0,
        source: str = "",
        original_size: tuple[int, int] | None = None,
        region: Region | None = None,
        key: bool = False,
        resumed: bool = False,
    ) -> Frame:
        """Make a frame of your own; for arguments that are not listed see `FrameInfo`.

        Args:
            pixels: (B, 3, H, W), normalised; shared, not copied.
            motion: (B, 2, h, w): for each cell of a grid over the frame, the way from the cell to
                where its content was in the frame delivered before: (down, across), as fractions
                of the frame's height and width. NaN where it is unknown; None if it is unknown
                everywhere.
        """
        # Not in `__init__`: the tensor itself is made here.
        if not isinstance(pixels, Tensor) or pixels.dim() != 4:
            raise FrameError(
                f"A Frame takes a tensor (B, 3, height, width), not {_describe(pixels)}."
            )
        height, width = pixels.shape[-2:]
        info = FrameInfo(
            index=index,
            time=time,
            source=source,
            original_size=(height, width) if original_size is None else original_size,
            region=Region(0.0, 0.0, height, width) if region is None else region,
            key=key,
            resumed=resumed,
        )
        return _rebuild(pixels, motion, (info,), cls)

    @property
    def info(self) -> FrameInfo:
        """The frame's `FrameInfo`; a stack of several frames has none, but `infos`."""
        if len(self.infos) != 1:
            raise FrameError(
                f"This is a stack of {len(self.infos)} frames: take frame.infos[i] of one of them."
            )
        return self.infos[0]

    @property
    def index(self) -> int:  # type: ignore[override]
        """Number of the frame in its source, from 0."""
        return self.info.index

    @property
    def time(self) -> float:
        """Seconds from the start of the video, or since a live source was opened."""
        return self.info.time

    @property
    def source(self) -> str:
        """The file or address, without credentials."""
        return self.info.source

    @property
    def original_size(self) -> tuple[int, int]:
        """Height and width before scaling."""
        return self.info.original_size

    @property
    def region(self) -> Region:
        """Where the picture lies in the frame."""
        return self.info.region

    @property
    def key(self) -> bool:
        """Whether it is a key frame of the video file."""
        return self.info.key

    @property
    def resumed(self) -> bool:
        """Whether the source was lost before it and found again; see `FrameInfo`."""
        return self.info.resumed

    def to_original(self, boxes: Tensor) -> Tensor:
        """Boxes in pixels of this frame as boxes in pixels of the picture before scaling.

        Args:
            boxes: (..., 4), as left, top, right, bottom.

        Returns:
            The same shape, in floats, cut off at the borders of the picture.
        """
        if boxes.shape[-1:] != (4,):
            raise FrameError(f"Boxes are (..., 4), not {tuple(boxes.shape)}.")
        (height, width), region = self.original_size, self.region
        values = boxes if boxes.is_floating_point() else boxes.float()
        start = values.new_tensor([region.left, region.top] * 2)
        scale = values.new_tensor([width / region.width, height / region.height] * 2)
        end = values.new_tensor([width, height] * 2)
        return ((values - start) * scale).clamp(min=torch.zeros_like(end), max=end)

    def to(self, *args: Any, **kwargs: Any) -> Frame:
        """As `Tensor.to`; the attributes stay, and the motion goes along to another device."""
        return self._with(super().to(*args, **kwargs))

    def cuda(self, *args: Any, **kwargs: Any) -> Frame:
        """As `Tensor.cuda`; the attributes stay."""
        return self._with(super().cuda(*args, **kwargs))

    def cpu(self, *args: Any, **kwargs: Any) -> Frame:
        """As `Tensor.cpu`; the attributes stay."""
        return self._with(super().cpu(*args, **kwargs))

    def float(self, *args: Any, **kwargs: Any) -> Frame:
        """As `Tensor.float`; the attributes stay."""
        return self._with(super().float(*args, **kwargs))

    def double(self, *args: Any, **kwargs: Any) -> Frame:
        """As `Tensor.double`; the attributes stay."""
        return self._with(super().double(*args, **kwargs))

    def half(self, *args: Any, **kwargs: Any) -> Frame:
        """As `Tensor.half`; the attributes stay."""
        return self._with(super().half(*args, **kwargs))

    def bfloat16(self, *args: Any, **kwargs: Any) -> Frame:
        """As `Tensor.bfloat16`; the attributes stay."""
        return self._with(super().bfloat16(*args, **kwargs))

    def pin_memory(self, *args: Any, **kwargs: Any) -> Frame:
        """As `Tensor.pin_memory`; the attributes stay."""
        return self._with(super().pin_memory(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Frame:
        motion = None if self.motion is None else self.motion.clone()
        copied = _rebuild(_plain(self).clone(), motion, self.infos, type(self))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (_plain(self), self.motion, self.infos, type(self))

    def _with(self, pixels: Tensor) -> Frame:
        """The same frame with other pixels."""
        if pixels is self:
            return self
        motion = self.motion
        if motion is not None and motion.device != pixels.device:
            motion = motion.to(pixels.device)
        return _rebuild(pixels, motion, self.infos, type(self))


def stack(frames: Iterable[Frame | Tensor]) -> Frame:
    """Frames of several streams as one, (B, 3, H, W), for `StreamBatch`.

    Args:
        frames: of one size, dtype and device. Motion of a frame that has none is NaN; grids of
            motion are brought to the size of the largest.

    Returns:
        A frame whose `infos` are those of the given ones, in this order. `motion` is None if no
        frame has any.
    """
    listed = [frame if isinstance(frame, Frame) else Frame(frame) for frame in frames]
    if not listed:
        raise FrameError("No frames to stack: pass at least one.")
    kinds = {(tuple(frame.shape[1:]), frame.dtype, frame.device) for frame in listed}
    if len(kinds) > 1:
        shown = sorted(f"{shape} {dtype} on {device}" for shape, dtype, device in kinds)
        raise FrameError(
            f"Frames of one stack are alike, these are {'; '.join(shown)}. Give eventful.read the "
            "same `size` for every source."
        )
    infos = tuple(info for frame in listed for info in frame.infos)
    return _rebuild(torch.cat([_plain(f) for f in listed]), _stacked_motion(listed), infos, Frame)


def _stacked_motion(frames: list[Frame]) -> Tensor | None:
    """Motion of all frames in one tensor, NaN for those without; None if no frame has any."""
    known = [frame.motion for frame in frames if frame.motion is not None]
    if not known:
        return None
    grid = (max(m.shape[-2] for m in known), max(m.shape[-1] for m in known))
    rows = []
    for frame in frames:
        motion = frame.motion
        if motion is None:
            motion = known[0].new_full((len(frame), 2, *grid), torch.nan)
        elif tuple(motion.shape[-2:]) != grid:
            motion = F.interpolate(motion, grid, mode="nearest")
        rows.append(motion)
    return torch.cat(rows)


def _rebuild(
    pixels: Tensor, motion: Tensor | None, infos: tuple[FrameInfo, ...], kind: type[Frame]
) -> Frame:
    """A frame from its parts."""
    if motion is not None:
        wanted = (pixels.shape[0], 2)
        if motion.dim() != 4 or tuple(motion.shape[:2]) != wanted:
            raise FrameError(
                f"Motion of {pixels.shape[0]} frames is ({wanted[0]}, 2, h, w), not "
                f"{tuple(motion.shape)}."
            )
        motion = motion.float()
    frame = pixels.as_subclass(kind)
    frame.motion, frame.infos = motion, infos
    return frame


def _plain(pixels: Tensor) -> Tensor:
    """The same memory as a plain tensor."""
    return pixels.as_subclass(Tensor)


def _describe(value: object) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
