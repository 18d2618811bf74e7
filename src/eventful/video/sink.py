"""Writes frames to a video file."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eventful.errors import FrameError
from eventful.surgery.libraries import load


class VideoSink:
    """Writes H.264 in an MP4 file; use it in a `with` block, or the file is not finished.

    Args:
        fps: frames a second.
        crf: quality; lower is better and larger.
        preset: of x264; a faster one makes larger files.
        fragmented: write in pieces of some seconds. What was written can then be played even if
            the program is killed, and memory does not grow with the length.
    """

    def __init__(
        self,
        path: str | Path,
        fps: float = 25.0,
        crf: int = 18,
        *,
        preset: str = "medium",
        fragmented: bool = False,
    ) -> None:
        self.path = Path(path)
        self._fps = Fraction(fps).limit_denominator(1001)
        self._crf, self._preset = crf, preset
        self._movflags = "frag_keyframe+empty_moov+default_base_moof" if fragmented else ""
        self._container: Any = None
        self._stream: Any = None
        self._frames = 0

    def __enter__(self) -> VideoSink:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        options = {"movflags": self._movflags} if self._movflags else {}
        self._container = load("av").open(str(self.path), "w", format="mp4", options=options)
        return self

    def __exit__(self, cause: object, error: BaseException | None, trace: object) -> None:
        if self._stream is not None and error is None:
            self._container.mux(self._stream.encode())
        self._container.close()

    def write(self, picture: Tensor) -> None:
        """Add a picture (3, H, W), in [0, 1] or uint8.

        An odd side gets a pixel more, as H.264 requires.
        """
        if picture.dim() != 3 or picture.shape[0] != 3:
            raise FrameError(f"A picture is (3, height, width), got {tuple(picture.shape)}.")
        if picture.dtype != torch.uint8:
            picture = (picture.clamp(0, 1) * 255).round().to(torch.uint8)
        for dim in (1, 2):
            if picture.shape[dim] % 2:
                picture = torch.cat([picture, picture.narrow(dim, -1, 1)], dim=dim)
        pixels = picture.permute(1, 2, 0).contiguous()
        if self._stream is None:
            self._begin(pixels.shape[0], pixels.shape[1])
        if pixels.shape[:2] != (self._stream.height, self._stream.width):
            raise FrameError(
                f"The video is {self._stream.height} x {self._stream.width}, this picture "
                f"{pixels.shape[0]} x {pixels.shape[1]}; resize it first."
            )
        frame = load("av").VideoFrame.from_ndarray(pixels.cpu().numpy(), format="rgb24")
        frame.pts = self._frames
        self._frames += 1
        self._container.mux(self._stream.encode(frame))

    def _begin(self, height: int, width: int) -> None:
        options = {"crf": str(self._crf), "preset": self._preset}
        self._stream = self._container.add_stream("libx264", rate=self._fps, options=options)
        self._stream.height, self._stream.width = height, width
        self._stream.pix_fmt = "yuv420p"
        self._stream.codec_context.time_base = 1 / self._fps
