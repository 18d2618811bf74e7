"""Which parts of a video equal the last frame: what the codec says, and what the pixels say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from eventful.video.read import read

CELL = 16  # pixels of a block of the codec
PATCH = 14
CHROMA = 4  # more source pixels that a scaled one reads: half of the chroma, interpolated
P_PICTURE, B_PICTURE = 2, 3  # AVPictureType of FFmpeg

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Encoding:
    """How a clip is encoded again, as a camera does it: at once, without B-frames."""

    name: str
    codec: str
    options: dict[str, str]


_X264 = {"preset": "veryfast", "tune": "zerolatency", "g": "50"}
_X265 = {"preset": "veryfast", "tune": "zerolatency", "g": "50", "x265-params": "log-level=none"}
ENCODINGS = (
    Encoding("H.264, crf 18", "libx264", {**_X264, "crf": "18"}),
    Encoding("H.264, crf 28", "libx264", {**_X264, "crf": "28"}),
    Encoding("H.264, crf 35", "libx264", {**_X264, "crf": "35"}),
    Encoding("HEVC, crf 28", "libx265", {**_X265, "crf": "28"}),
    Encoding(
        "VP9, crf 37", "libvpx-vp9",
        {"crf": "37", "b": "0", "deadline": "realtime", "cpu-used": "6", "g": "50"},
    ),
)  # fmt: skip


def encode(source: Path, target: Path, how: Encoding, frames: int) -> None:
    """Encode the first frames of a video again, at its own size and rate."""
    with av.open(str(source)) as video, av.open(str(target), "w") as made:
        given: Any = video.streams.video[0]
        stream: Any = made.add_stream(how.codec, rate=given.average_rate, options=how.options)
        stream.width, stream.height, stream.pix_fmt = given.width, given.height, "yuv420p"
        for number, frame in enumerate(islice(video.decode(given), frames)):
            frame.pts, frame.pict_type = number, av.video.frame.PictureType.NONE
            frame.time_base = 1 / given.average_rate
            made.mux(stream.encode(frame))
        made.mux(stream.encode(None))


def describe(path: Path, size: tuple[int, int], frames: int) -> dict[str, float | str | None]:
    """Shares of a video that are equal to the last frame, means over its frames.

    Returns:
        `blocks`: of 16 x 16 blocks, all pixels of the decoded planes equal. `tokens_source`: of
        tokens, all decoded pixels that scaling reads for them equal. `tokens`: of tokens, all
        pixels that the model sees equal. `wrong`: tokens in the former and not in the latter.
        `still_vectors`: of blocks of P-frames, all vectors zero. `still_and_equal`: of those,
        equal pixels. None if there are no vectors.
    """
    shares: dict[str, list[float]] = {"blocks": [], "tokens_source": [], "tokens": []}
    still: list[float] = []
    equal: list[float] = []
    wrong = 0
    sources, seen = _source_changes(path, frames), _token_changes(path, size, frames)
    for (changed, vectors), tokens in zip(sources, seen, strict=True):
        blocks, reached = _cells(changed), _reached(changed, size)
        shares["blocks"].append(1 - blocks.mean())
        shares["tokens_source"].append(1 - reached.mean())
        shares["tokens"].append(1 - tokens.mean())
        wrong += int((tokens & ~reached).sum())
        if vectors is not None:
            still.append(vectors.mean())
            if vectors.any():
                equal.append((~blocks)[vectors].mean())
    with av.open(str(path)) as video:
        name = video.streams.video[0].codec_context.name
    bits = path.stat().st_size * 8 / _seconds(path)
    return {
        "codec": name,
        "kbit_s": bits / 1000,
        **{key: fmean(values) for key, values in shares.items()},
        "wrong": wrong,
        "still_vectors": fmean(still) if still else None,
        "still_and_equal": fmean(equal) if equal else None,
    }


def _seconds(path: Path) -> float:
    with av.open(str(path)) as video:
        stream: Any = video.streams.video[0]
        return float(sum(packet.duration or 0 for packet in video.demux(stream)) * stream.time_base)


def _source_changes(path: Path, frames: int) -> Iterator[tuple[Mask, Mask | None]]:
    """From the second frame on: (H, W) decoded pixels that changed; blocks without motion."""
    last: list[NDArray[np.uint8]] | None = None
    before = 0
    with av.open(str(path)) as video:
        stream: Any = video.streams.video[0]
        stream.codec_context.options = {"flags2": "+export_mvs"}
        for frame in islice(video.decode(stream), frames):
            planes = [_plane(plane) for plane in frame.planes]
            if last is not None:
                luma, *chroma = (now != then for now, then in zip(planes, last, strict=True))
                for plane in chroma:
                    luma |= plane.repeat(2, 0).repeat(2, 1)[: luma.shape[0], : luma.shape[1]]
                yield luma, None if before == B_PICTURE else _still_blocks(frame)
            last, before = planes, frame.pict_type


def _plane(plane: Any) -> NDArray[np.uint8]:
    rows = np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)
    return rows[:, : plane.width].copy()


def _still_blocks(frame: Any) -> Mask | None:
    """Blocks of a P-frame all of whose vectors are zero; None where there are no vectors."""
    exported = frame.side_data.get("MOTION_VECTORS") if frame.pict_type == P_PICTURE else None
    if exported is None:
        return None
    vectors = exported.to_ndarray()
    rows, columns = -(-frame.height // CELL), -(-frame.width // CELL)
    covered, moving = np.zeros((2, rows, columns), np.int64)
    place = vectors["dst_y"].astype(int) // CELL, vectors["dst_x"].astype(int) // CELL
    inside = (place[0] >= 0) & (place[0] < rows) & (place[1] >= 0) & (place[1] < columns)
    place = place[0][inside], place[1][inside]
    np.add.at(covered, place, (vectors["w"].astype(int) * vectors["h"])[inside])
    moved = (vectors["motion_x"] != 0) | (vectors["motion_y"] != 0)
    np.add.at(moving, place, moved[inside])
    return (covered >= CELL * CELL) & (moving == 0)


def _cells(changed: Mask) -> Mask:
    """Blocks of CELL x CELL pixels with a changed pixel."""
    height, width = changed.shape
    padded = np.pad(changed, ((0, -height % CELL), (0, -width % CELL)))
    return padded.reshape(-(-height // CELL), CELL, -1, CELL).any(axis=(1, 3))


def _reached(changed: Mask, size: tuple[int, int]) -> Mask:
    """Tokens for which scaling to `size` reads a changed pixel, by the reach of its filter."""
    total = np.pad(changed, ((1, 0), (1, 0))).astype(np.int64).cumsum(0).cumsum(1)
    (top, bottom), (left, right) = (
        _spans(edge, scaled) for edge, scaled in zip(changed.shape, size, strict=True)
    )
    below, above = total[bottom], total[top]
    count = below[:, right] - below[:, left] - above[:, right] + above[:, left]
    return count > 0


def _spans(edge: int, scaled: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and last source pixel of each token along an edge.

    A bilinear filter reads one pixel to each side, and as many as it averages when it shrinks.
    """
    scale = edge / scaled
    reach = math.ceil(max(scale, 1.0)) + CHROMA
    start = np.arange(scaled // PATCH) * PATCH * scale
    first = np.floor(start).astype(np.int64) - reach
    last = np.ceil(start + PATCH * scale).astype(np.int64) + reach
    return first.clip(0, edge), last.clip(0, edge)


def _token_changes(path: Path, size: tuple[int, int], frames: int) -> Iterator[Mask]:
    """From the second frame on: (h, w) tokens some of whose pixels changed, as the model sees."""
    last = None
    with read(path, size, fit="stretch") as reader:
        for frame in islice(reader, frames):
            pixels = frame.numpy()[0]
            if last is not None:
                grid = (pixels != last).reshape(3, size[0] // PATCH, PATCH, size[1] // PATCH, PATCH)
                yield grid.any(axis=(0, 2, 4))
            last = pixels
