"""Frames of a video, from a folder of images or a file, decoded on access."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from eventful.errors import DamagedMediaError, DataError, MalformedDataError, MissingFileError
from eventful.surgery.libraries import load
from eventful.video.limits import check_pixels, too_large
from eventful.video.protocols import PLAYLIST, file_address, is_playlist, open_options

# From a gap of this many frames on, seeking is cheaper than decoding.
_JUMP = 64
_INSTANT = 1e-6  # seconds; timestamps of a container are rounded to its time base


class FrameSource(Protocol):
    """A source of video frames. Holds no open file, so it can be pickled."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> Tensor:
        """The frames at these positions, in this order, as uint8 RGB (T, 3, H, W)."""
        ...

    def __iter__(self) -> Iterator[Tensor]:
        """Every frame in turn, (3, H, W)."""
        ...


@dataclass(frozen=True)
class ImageFiles:
    """One image file per frame.

    Args:
        folder: Where they lie.
        names: Their paths inside it, in order of time.
    """

    folder: Path
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(len(self)):
            yield self.image(index)

    def path(self, index: int) -> Path:
        """The file of one frame."""
        return self.folder / self.names[index]

    def image(self, index: int) -> Tensor:
        """One frame, (3, H, W) uint8 RGB."""
        return read_image(self.path(index))

    def read(self, indices: Sequence[int]) -> Tensor:
        """The frames at these positions, (T, 3, H, W) uint8 RGB."""
        unique = {index: self.image(index) for index in dict.fromkeys(indices)}
        return _stacked([unique[index] for index in indices], self.folder)

    def missing(self) -> list[Path]:
        """Files that are not there; each folder is listed once."""
        wanted: dict[Path, list[str]] = {}
        for index in range(len(self)):
            path = self.path(index)
            wanted.setdefault(path.parent, []).append(path.name)
        absent = []
        for folder, names in wanted.items():
            there = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
            absent += [folder / name for name in names if name not in there]
        return absent


@dataclass(frozen=True)
class VideoFile:
    """A stretch of a video file, at its own frame rate or resampled.

    Args:
        start: Seconds from the first frame of the file.
        stop: Seconds, exclusive; None for the end of the file.
        fps: Rate to resample to, by the nearest frame in time; None for every frame.
    """

    path: Path
    start: float = 0.0
    stop: float | None = None
    fps: float | None = None

    def __len__(self) -> int:
        return len(self._stamps)

    def __iter__(self) -> Iterator[Tensor]:
        stamps, place = self._stamps, 0
        with _opened(self.path) as (container, stream):
            stream.thread_type = "AUTO"
            container.seek(stamps[0], stream=stream, backward=True)
            for frame in container.decode(stream):
                if frame.pts is None or frame.pts < stamps[place]:
                    continue
                if frame.pts > stamps[place]:
                    break  # the frame before it is missing
                pixels = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
                while place < len(stamps) and frame.pts == stamps[place]:
                    yield pixels.clone(memory_format=torch.contiguous_format)
                    place += 1
                if place == len(stamps):
                    return
        raise DamagedMediaError(
            f"{self.path}: frame {place} of {len(stamps)} does not decode. Fetch the file again, "
            "or skip it."
        )

    def read(self, indices: Sequence[int]) -> Tensor:
        """The frames at these positions, (T, 3, H, W) uint8 RGB."""
        stamps = [self._stamps[index] for index in indices]
        with _opened(self.path) as (container, stream):
            found: dict[int, Tensor] = {}
            for run in _runs(sorted(set(stamps)), self._step):
                _decode(container, stream, run, found)
        absent = sum(stamp not in found for stamp in set(stamps))
        if absent:
            raise DamagedMediaError(
                f"{self.path}: {absent} of {len(set(stamps))} requested frames do not decode. "
                "Fetch the file again, or skip it."
            )
        return _stacked([found[stamp] for stamp in stamps], self.path)

    @cached_property
    def rate(self) -> float:
        """Frames per second after resampling; 25 if the file does not state a rate."""
        if self.fps is not None:
            return self.fps
        with _opened(self.path) as (_, stream):
            return float(stream.average_rate or stream.guessed_rate or 25)

    @property
    def _step(self) -> int:
        """Typical distance between frames, in ticks of the stream."""
        stamps = sorted(set(self._stamps))
        return max(1, (stamps[-1] - stamps[0]) // max(1, len(stamps) - 1))

    @cached_property
    def _stamps(self) -> tuple[int, ...]:
        """Presentation stamp of each frame, from the packets' headers: nothing is decoded."""
        with _opened(self.path) as (container, stream):
            tick, origin = float(stream.time_base), stream.start_time or 0
            if self.start > 0:
                container.seek(origin + int(self.start / tick), stream=stream, backward=True)
            stamps = []
            for packet in container.demux(stream):
                if packet.pts is None or packet.is_discard:
                    continue
                stamps.append(packet.pts)
                # No later packet can be shown before its decoding stamp.
                decoded = packet.pts if packet.dts is None else packet.dts
                if self.stop is not None and (decoded - origin) * tick >= self.stop:
                    break
            rate = float(stream.average_rate or stream.guessed_rate or 0)
        times = {stamp: (stamp - origin) * tick for stamp in sorted(stamps)}
        end = float("inf") if self.stop is None else self.stop
        inside = [s for s, t in times.items() if self.start - _INSTANT <= t < end - _INSTANT]
        if not inside:
            last = max(times.values(), default=0.0)
            raise DamagedMediaError(
                f"{self.path}: no frame from {self.start:.3f} s to "
                f"{'the end' if self.stop is None else f'{self.stop:.3f} s'}; the last frame read "
                f"is at {last:.3f} s. Fetch the file again, or correct the times."
            )
        if self.fps is None:
            return tuple(inside)
        if self.stop is None:
            end = times[inside[-1]] + (1 / rate if rate else 0.0)
        return tuple(_resample(inside, [times[s] for s in inside], self.start, end, self.fps))


def _stacked(frames: list[Tensor], where: Path) -> Tensor:
    """Frames (3, H, W) as one, which takes that they are of one size."""
    sizes = {tuple(frame.shape[1:]) for frame in frames}
    if len(sizes) > 1:
        raise MalformedDataError(
            f"{where}: expected frames of one size, found {sorted(sizes)} (height, width). Read "
            "them one at a time, or resize them."
        )
    return torch.stack(frames)


def read_image(path: Path) -> Tensor:
    """An image file as uint8 RGB, (3, H, W).

    Raises:
        MissingFileError: There is no such file.
        DamagedMediaError: It does not decode.
        PictureSizeError: It has more pixels than `limits.most_pixels`.
    """
    with opened_image(path) as image:
        width, height = image.size
        try:
            if image.mode.startswith("I"):  # 16 bits: Pillow would cut them off at 255
                grey = (np.array(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
                pixels = np.repeat(grey[..., None], 3, axis=2)
            else:
                pixels = np.array(image.convert("RGB"))
            return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
        except MemoryError:
            raise too_large(path, height, width) from None


_UNLIMITED = threading.Lock()


def _opened_unlimited(pillow: Any, path: Path) -> Any:
    """Read the header without Pillow's limit, which raises an error that does not say the size.

    The limit is a global of Pillow's and may be the user's own: it is put back at once.
    """
    with _UNLIMITED:
        limit, pillow.MAX_IMAGE_PIXELS = pillow.MAX_IMAGE_PIXELS, None
        try:
            return pillow.open(path)
        finally:
            pillow.MAX_IMAGE_PIXELS = limit


@contextmanager
def opened_image(path: Path) -> Iterator[Any]:
    """A Pillow image, of which only the header is read, within the limit of pixels."""
    pillow = load("PIL.Image")
    if not path.is_file():
        raise MissingFileError(f"{path} is not there. Check the dataset with: eventful data check")
    try:
        with _opened_unlimited(pillow, path) as image:
            check_pixels(path, image.height, image.width)
            yield image
    except DataError:
        raise
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise DamagedMediaError(
            f"{path} does not decode as an image ({error}). Fetch it again, or skip its video."
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """The container and its first video stream; errors of FFmpeg are raised as ours."""
    av = load("av")
    if not path.is_file():
        raise MissingFileError(f"{path} is not there. Check the dataset with: eventful data check")
    try:
        with av.open(file_address(path), options=open_options(av, "file")) as container:
            if not container.streams.video:
                raise DamagedMediaError(f"{path} has no video stream. Fetch it again, or skip it.")
            stream = container.streams.video[0]
            check_pixels(path, stream.height or 0, stream.width or 0)
            yield container, stream
    except av.error.FFmpegError as error:
        if is_playlist(path):
            raise DamagedMediaError(f"{path} {PLAYLIST}") from error
        raise DamagedMediaError(
            f"{path} does not decode as a video ({error}). Fetch it again, or skip it."
        ) from error


def _runs(stamps: list[int], step: int) -> Iterator[list[int]]:
    """Split sorted stamps where seeking is cheaper than decoding the frames between."""
    run = stamps[:1]
    for stamp in stamps[1:]:
        if stamp - run[-1] > _JUMP * step:
            yield run
            run = []
        run.append(stamp)
    yield run


def _decode(container: Any, stream: Any, run: list[int], found: dict[int, Tensor]) -> None:
    """Decode from the key frame before a run up to its end, keeping what belongs to it."""
    wanted = set(run)
    container.seek(run[0], stream=stream, backward=True)
    for frame in container.decode(stream):
        if frame.pts in wanted:
            pixels = torch.from_numpy(frame.to_ndarray(format="rgb24"))
            found[frame.pts] = pixels.permute(2, 0, 1)
        if frame.pts is not None and frame.pts >= run[-1]:
            break


def _resample(
    stamps: list[int], times: list[float], start: float, stop: float, fps: float
) -> Iterator[int]:
    """The stamp nearest in time to each tick of a clock of `fps`; the earlier one of a tie."""
    for tick in range(max(1, round((stop - start) * fps))):
        time = start + tick / fps
        after = min(bisect_left(times, time), len(times) - 1)
        before = max(after - 1, 0)
        closer = times[after] - time < time - times[before] - _INSTANT
        yield stamps[after] if closer else stamps[before]
