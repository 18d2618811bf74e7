"""Small video files made for tests of reading."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SIZE = (96, 128)  # height, width


def texture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A smooth random picture, (height, width, 3)."""
    rng = np.random.default_rng(seed)
    shape = (-(-height // 8) + 1, -(-width // 8) + 1)
    # Colours that differ little: a video file has half as many pixels of colour as of brightness.
    coarse = rng.uniform(30, 210, (*shape, 1)) + rng.uniform(0, 30, (*shape, 3))
    rows, columns = np.arange(height) / 8, np.arange(width) / 8
    r, c = rows.astype(int), columns.astype(int)
    dr, dc = (rows - r)[:, None, None], (columns - c)[None, :, None]
    upper = coarse[r][:, c] * (1 - dc) + coarse[r][:, c + 1] * dc
    lower = coarse[r + 1][:, c] * (1 - dc) + coarse[r + 1][:, c + 1] * dc
    return (upper * (1 - dr) + lower * dr).astype(np.uint8)


def pan(
    path: Path,
    frames: int = 12,
    *,
    size: tuple[int, int] = SIZE,
    step: tuple[int, int] = (0, 0),
    rate: int = 25,
    key: int = 100,
    between: int = 0,
    options: dict[str, str] | None = None,
) -> Path:
    """A video of a window that moves over a picture by `step` (down, across) in each frame.

    Args:
        key: frames from one key frame to the next.
        between: the most B-frames in a row.
    """
    import av

    height, width = size
    ground = texture(height + frames * step[0], width + frames * step[1])
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec, rate=rate, options={"preset": "fast", "crf": "10"})
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.codec_context.gop_size, stream.codec_context.max_b_frames = key, between
        stream.bit_rate = 2_000_000
        for t in range(frames):
            top, left = step[0] * t, step[1] * t
            pixels = np.ascontiguousarray(ground[top : top + height, left : left + width])
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = t
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def images(folder: Path, frames: int, size: tuple[int, int] = (40, 60)) -> Path:
    """A folder of PNG files 0.png, 1.png, ..., each of one grey."""
    from PIL import Image

    folder.mkdir(exist_ok=True)
    for t in range(frames):
        Image.fromarray(np.full((*size, 3), 10 * t, np.uint8)).save(folder / f"{t}.png")
    return folder


def damage(path: Path, start: float, count: int) -> Path:
    """A copy of a file with zeros from a fraction of its length on."""
    content = bytearray(path.read_bytes())
    first = int(len(content) * start)
    content[first : first + count] = bytes(count)
    copy = path.with_name(f"damaged{path.suffix}")
    copy.write_bytes(content)
    return copy
