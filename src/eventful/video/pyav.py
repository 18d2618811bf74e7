"""Decoding through PyAV, which is FFmpeg: files, cameras and network sources.

What FFmpeg may open is limited to what was asked for: see `protocols`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from eventful.errors import DamagedMediaError, EventfulError, SourceError, UnsupportedError
from eventful.surgery.libraries import load
from eventful.video.address import Source
from eventful.video.decoders import ASSUMED_RATE, Picture, explain_damage
from eventful.video.fitting import Planes
from eventful.video.limits import check_pixels, most_pixels
from eventful.video.motion import vector_grid
from eventful.video.protocols import PLAYLIST, file_address, is_playlist, open_options
from eventful.video.relay import Relay

_MOST_FAILURES = 64  # reads that fail one after another before a file is taken to be at its end
_P_PICTURE, _B_PICTURE = 2, 3  # AVPictureType of FFmpeg


class AvDecoder:
    """An open file, camera or address. See `decoders.Decoder`.

    Args:
        timeout: seconds, to open and for each read; files have none.
        motion: whether to export motion vectors.
        live: whether the caller wants the latest frame at once; None if the source is live, as
            cameras, RTSP and HTTP without a known duration are.
    """

    def __init__(self, source: Source, *, timeout: float, motion: bool, live: bool | None) -> None:
        av = load("av")
        self._source, self._timeout, self._motion = source, timeout, motion
        self._errors = av.error
        self._relay: Relay | None = None
        if source.kind == "rtsp" and source.strict:
            self._relay = Relay(source, timeout)
        try:
            self._container = _open(av, source, timeout, self._relay)
        except BaseException:
            self._close_relay()
            raise
        if not self._container.streams.video:
            self.close()
            raise DamagedMediaError(f"{source.shown} has no video stream. Name a video.")
        self._stream = self._container.streams.video[0]
        try:
            check_pixels(source.shown, self._stream.height or 0, self._stream.width or 0)
        except EventfulError:
            self.close()
            raise
        self.live = source.kind in ("camera", "rtsp") or (
            source.kind == "http" and self._container.duration is None
        )
        # Threads over whole frames are faster, but hold back as many frames as there are threads.
        latest = self.live if live is None else live
        self._stream.thread_type = "SLICE" if latest else "AUTO"
        # The size of a stream may change in its middle: FFmpeg refuses such pictures by itself.
        options = {"max_pixels": str(most_pixels())}
        self._stream.codec_context.options = options | ({"flags2": "+export_mvs"} if motion else {})
        self.rate = float(self._stream.average_rate or self._stream.guessed_rate or ASSUMED_RATE)
        self.length = self._stream.frames or None
        self.damaged = 0
        self._reformatter = load("av.video.reformatter").VideoReformatter()

    def pictures(self) -> Iterator[Picture]:
        """Every picture that decodes."""
        origin, index = self._stream.start_time, 0
        last, damaged = 0, 0  # type of the picture before, and damage up to it
        for packet in self._packets():
            for frame in self._decoded(packet):
                if origin is None:
                    origin = frame.pts
                picture = self._picture(frame)
                if not self.live:
                    known = frame.pts is not None and origin is not None
                    tick = float(frame.time_base or self._stream.time_base)
                    picture.time = (frame.pts - origin) * tick if known else index / self.rate
                # A B-frame before it is not what the vectors of a P-frame refer to.
                if self._motion and last != _B_PICTURE and damaged == self.damaged:
                    picture.vectors = _vectors(frame)
                last, damaged, index = frame.pict_type, self.damaged, index + 1
                yield picture

    def close(self) -> None:
        """Close the file or connection."""
        self._container.close()
        self._close_relay()

    def _close_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()

    def _packets(self) -> Iterator[Any]:
        """Packets of the stream; what cannot be read is skipped and counted."""
        failures, began = 0, time.monotonic()
        while failures < _MOST_FAILURES:
            failure: Exception | None = None
            try:
                for packet in self._container.demux(self._stream):
                    failures = 0
                    yield packet
                    began = time.monotonic()
                return
            except self._errors.EOFError:
                return
            except self._errors.FFmpegError as error:
                waited = time.monotonic() - began
                if isinstance(error, self._errors.InvalidDataError) and waited < self._timeout:
                    self.damaged, failures = self.damaged + 1, failures + 1
                    continue
                failure = _explain(self._source, error, self._errors, self._timeout, waited)
                if not self._source.remote:
                    raise failure from error
            raise failure  # outside of `except`: the first error holds the address

    def _decoded(self, packet: Any) -> Iterator[Any]:
        """Sound frames of one packet."""
        try:
            frames = packet.decode()
        except self._errors.EOFError:
            return
        except self._errors.FFmpegError:
            self.damaged += 1
            return
        for frame in frames:
            if frame.is_corrupt:
                self.damaged += 1
            else:
                yield frame

    def _picture(self, frame: Any) -> Picture:
        turns = round(getattr(frame, "rotation", 0) / 90) % 4
        height, width = (frame.height, frame.width)[:: -1 if turns % 2 else 1]

        def draw(rows: int, columns: int) -> Planes:
            if turns % 2:
                rows, columns = columns, rows
            # Planes of green, blue and red: faster to write than packed RGB, and rounded better.
            scaled = self._reformatter.reformat(
                frame, columns, rows, format="gbrp", interpolation="BILINEAR"
            )
            green, blue, red = (_plane(plane, turns) for plane in scaled.planes)
            return red, green, blue

        return Picture(height, width, None, bool(frame.key_frame), draw)


def _open(av: Any, source: Source, timeout: float, relay: Relay | None) -> Any:
    """The open container."""
    address, form = source.address if relay is None else relay.address, None
    if source.kind == "camera":
        address, form = _camera(source)
    elif source.kind == "file":
        address = file_address(address)
    limits = None if source.kind == "file" else (timeout, timeout)
    began = time.monotonic()
    try:
        return av.open(
            address, format=form, timeout=limits,
            options=open_options(av, source.kind, strict=source.strict),
        )  # fmt: skip
    except av.error.FFmpegError as error:
        waited = time.monotonic() - began
        failure = _explain(source, error, av.error, timeout, waited)
        if relay is not None and relay.redirected:
            failure = UnsupportedError(
                f"{source.shown} redirects to another address, which is not followed. Name the "
                "address itself."
            )
        if not source.remote:
            raise failure from error
    except ValueError as error:
        # An unknown format of device.
        failure = UnsupportedError(f"{source.shown}: this PyAV cannot read it ({error}).")
    raise failure  # outside of `except`: the first error holds the address with its credentials


def _camera(source: Source) -> tuple[str, str]:
    """What FFmpeg calls a camera on this system, and the format to open it with."""
    name = source.address
    if sys.platform == "darwin":
        return name, "avfoundation"
    if sys.platform == "win32":
        return f"video={name}", "dshow"
    return f"/dev/video{name}" if name.isdigit() else name, "v4l2"


def _explain(source: Source, error: Any, errors: Any, timeout: float, waited: float) -> Exception:
    """FFmpeg's error as ours. Its own text may hold credentials; `strerror` does not."""
    late = source.kind != "file" and waited > 0.9 * timeout  # FFmpeg may call it invalid data
    if late or isinstance(error, errors.ExitError):
        return SourceError(
            f"{source.shown} sent nothing for {timeout:g} s. Check the address and the network, or "
            "pass a longer `timeout`."
        )
    # A format that is not allowed is an invalid argument, or not recognised at all.
    refused = isinstance(error, ValueError) and not isinstance(error, errors.InvalidDataError)
    if source.kind == "file" and (refused or is_playlist(source.address)):
        return UnsupportedError(f"{source.shown} {PLAYLIST}")
    return explain_damage(source, error.strerror or type(error).__name__)


def _plane(plane: Any, turns: int) -> Any:
    """One channel, (H, W), without a copy."""
    rows = np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)
    picture = rows[:, : plane.width]
    return np.rot90(picture, turns) if turns else picture


def _vectors(frame: Any) -> Any:
    """Displacements of a P-frame; None for any other, and for a picture that is shown rotated."""
    if frame.pict_type != _P_PICTURE or getattr(frame, "rotation", 0):
        return None
    try:
        vectors = frame.side_data.get("MOTION_VECTORS")
    except ValueError:  # side data that this PyAV does not know
        return None
    if vectors is None:
        return None
    return vector_grid(vectors.to_ndarray(), frame.height, frame.width)
