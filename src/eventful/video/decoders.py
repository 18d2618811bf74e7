"""Decoders of every kind of source: PyAV, OpenCV where PyAV is missing, and Pillow for images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from eventful.errors import (
    DamagedMediaError,
    MissingDependencyError,
    SourceError,
    UnsupportedError,
)
from eventful.surgery.libraries import load
from eventful.video.address import Source
from eventful.video.fitting import Planes, resized
from eventful.video.protocols import PLAYLIST, is_playlist
from eventful.video.source import read_image

ASSUMED_RATE = 25.0  # frames per second, where a source does not state its own


@dataclass
class Picture:
    """One decoded picture, before it is scaled.

    Attributes:
        height: in pixels, as `width`.
        time: seconds from the start; None for the moment of its arrival.
        key: whether it is a key frame.
        draw: gives the picture scaled to a height and width.
        vectors: displacements for each cell of 16 x 16 pixels (see `motion.vector_grid`).
        resumed: whether the source was lost before it and found again.
    """

    height: int
    width: int
    time: float | None
    key: bool
    draw: Callable[[int, int], Planes]
    vectors: NDArray[np.float32] | None = None
    resumed: bool = False


class Decoder(Protocol):
    """An open source.

    Attributes:
        rate: frames per second.
        length: number of frames as the source states it; None if it does not.
        live: whether pictures arrive by themselves, whether they are read or not.
        damaged: pictures skipped so far because they do not decode.
    """

    rate: float
    length: int | None
    live: bool

    @property
    def damaged(self) -> int:
        """See above."""
        ...

    def pictures(self) -> Iterator[Picture]:
        """Every picture in turn, once."""
        ...

    def close(self) -> None:
        """Close the source; `pictures` is not used any more."""
        ...


def open_decoder(source: Source, *, timeout: float, motion: bool, live: bool | None) -> Decoder:
    """Open a source with the decoder that is installed.

    Args:
        timeout: seconds to wait for the network, to open and for each read.
        motion: whether to export motion vectors.
        live: what the caller said; None to find out.

    Raises:
        MissingDependencyError: No decoder is installed; the message is the command to run.
        DamagedMediaError: The file is not a video.
        SourceError: A camera or address does not answer.
    """
    if source.kind == "images":
        return ImageDecoder(source)
    try:
        load("av")
    except MissingDependencyError as error:
        return _open_cv(source, motion, error)
    from eventful.video.pyav import AvDecoder

    return AvDecoder(source, timeout=timeout, motion=motion, live=live)


def _open_cv(source: Source, motion: bool, missing: MissingDependencyError) -> Decoder:
    """OpenCV in place of PyAV, for what it can do safely."""
    try:
        load("cv2")
    except MissingDependencyError:
        raise missing from None
    if source.remote or motion:
        what = "motion vectors" if motion else "network sources"
        raise UnsupportedError(
            f"{source.shown}: {what} need PyAV, and only OpenCV is installed. {missing}"
        )
    return CvDecoder(source)


class ImageDecoder:
    """A folder of images, one for each frame, at 25 frames a second."""

    def __init__(self, source: Source) -> None:
        load("PIL.Image")
        self.rate, self.live, self.damaged = ASSUMED_RATE, False, 0
        self.length: int | None = len(source.images)
        self._paths = source.images

    def pictures(self) -> Iterator[Picture]:
        """Every image that decodes."""
        for index, path in enumerate(self._paths):
            try:
                pixels = read_image(path).permute(1, 2, 0).numpy()
            except DamagedMediaError:
                self.damaged += 1
                continue
            yield _array_picture(pixels, index / self.rate, key=True)

    def close(self) -> None:
        """Nothing is held open."""


class CvDecoder:
    """A file or camera through OpenCV. It does not report damage: a damaged file ends early."""

    def __init__(self, source: Source) -> None:
        cv2 = load("cv2")
        camera = source.kind == "camera"
        if not camera and is_playlist(source.address):  # OpenCV would follow it
            raise UnsupportedError(f"{source.shown} {PLAYLIST}")
        name = source.address
        self._capture = cv2.VideoCapture(int(name) if camera and name.isdigit() else name)
        if not self._capture.isOpened():
            self._capture.release()
            if camera:
                raise SourceError(f"{source.shown} cannot be opened. Check the number and rights.")
            raise DamagedMediaError(
                f"{source.shown} does not decode as a video. Fetch it again, or convert it."
            )
        self.rate = float(self._capture.get(cv2.CAP_PROP_FPS) or 0) or ASSUMED_RATE
        frames = int(self._capture.get(cv2.CAP_PROP_FRAME_COUNT))
        self.length = frames if frames > 0 and not camera else None
        self.live, self.damaged = camera, 0

    def pictures(self) -> Iterator[Picture]:
        """Every picture up to the first that cannot be read."""
        index = 0
        while True:
            good, pixels = self._capture.read()
            if not good:
                return
            time = None if self.live else index / self.rate
            yield _array_picture(pixels[..., ::-1], time, key=False)  # OpenCV gives BGR
            index += 1

    def close(self) -> None:
        """Release the file or camera."""
        self._capture.release()


def _array_picture(pixels: NDArray[np.uint8], time: float | None, *, key: bool) -> Picture:
    """A picture from an array (H, W, 3) in RGB."""
    height, width = pixels.shape[:2]
    return Picture(height, width, time, key, lambda rows, columns: resized(pixels, rows, columns))


def explain_damage(source: Source, text: str) -> Exception:
    """The error for a source that FFmpeg cannot read, without its address's credentials."""
    if source.kind == "file":
        return DamagedMediaError(
            f"{source.shown} does not decode as a video ({text}). Fetch it again, or convert it."
        )
    if source.kind == "camera":
        return SourceError(
            f"{source.shown} cannot be read ({text}). Check that it is plugged in, that no other "
            "program uses it and that you may open it."
        )
    return SourceError(
        f"{source.shown} cannot be read ({text}). Check the address, the user name and password "
        "in it, and the network."
    )
