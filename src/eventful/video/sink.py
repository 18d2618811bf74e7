"""Writes frames to a video file."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.errors import FrameError
from eventful.surgery.libraries import load


class VideoSink:
    """Writes H.264 in an MP4 file; use it in a `with` block, or the file is not finished.

    Args:
        fps: frames a second.
        crf: quality; lower is better and larger.
    """

    def __init__(self, path: str | Path, fps: float = 25.0, crf: int = 18) -> None:
        self.path = Path(path)
        self._fps = Fraction(fps).limit_denominator(1001)
        self._crf = crf
        self._container: Any = None
        self._stream: Any = None
        self._frames = 0

    def __enter__(self) -> VideoSink:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._container = load("av").open(str(self.path), "w", format="mp4")
        return self

    def __exit__(self, cause: object, error: BaseException | None, trace: object) -> None:
        if self._stream is not None and error is None:
            self._container.mux(self._stream.encode())
        self._container.close()

    def write(self, picture: Tensor) -> None:
        """Add a picture (3, H, W) in [0, 1]; an odd side gets a pixel more, as H.264 requires."""
        if picture.dim() != 3 or picture.shape[0] != 3:
            raise FrameError(f"A picture is (3, height, width), got {tuple(picture.shape)}.")
        padding = (0, picture.shape[2] % 2, 0, picture.shape[1] % 2)
        even = F.pad(picture[None], padding, mode="replicate")[0]
        pixels = (even.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
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
        options = {"crf": str(self._crf), "preset": "medium"}
        self._stream = self._container.add_stream("libx264", rate=self._fps, options=options)
        self._stream.height, self._stream.width = height, width
        self._stream.pix_fmt = "yuv420p"
        self._stream.codec_context.time_base = 1 / self._fps
