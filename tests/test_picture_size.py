"""A picture that claims a huge size is refused with a message, by the library and the command."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

import eventful
import miniatures
import videos
from commands import here
from eventful.errors import ConfigError, DamagedMediaError, PictureSizeError
from eventful.video.limits import MOST_PIXELS, VARIABLE, check_pixels, most_pixels
from eventful.video.source import ImageFiles, VideoFile, read_image

pillow = pytest.importorskip("PIL.Image")
pytest.importorskip("av")
__all__ = ["here"]  # a fixture


def claim(path: Path, width: int = 20_000, height: int = 12_000) -> Path:
    """A PNG of 70 bytes that says it is so large."""

    def chunk(name: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + check

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data)
    return path


@pytest.mark.filterwarnings("error")  # nor a warning of Pillow
@pytest.mark.parametrize("size", [(20_000, 12_000), (10_000, 10_000)])
def test_a_file_that_claims_a_huge_size_is_refused_before_it_is_decoded(tmp_path, size) -> None:
    path = claim(tmp_path / "a" / "huge.png", *size)
    before = pillow.MAX_IMAGE_PIXELS
    text = rf"huge.png has {size[0]:,} x {size[1]:,} pixels.*{VARIABLE}={size[0] * size[1]}"
    with pytest.raises(PictureSizeError, match=text):
        read_image(path)
    with pytest.raises(PictureSizeError, match=text):
        list(eventful.read(path.parent))  # raised in the thread that decodes
    assert before == pillow.MAX_IMAGE_PIXELS
    assert not isinstance(PictureSizeError(), OSError)


def test_the_limit_can_be_raised_and_lowered(tmp_path: Path, monkeypatch) -> None:
    path = claim(tmp_path / "huge.png")
    monkeypatch.setenv(VARIABLE, "240000000")
    with pytest.raises(DamagedMediaError, match="does not decode") as raised:
        read_image(path)
    assert not isinstance(raised.value, PictureSizeError)  # the size is allowed, the file is empty
    miniatures.write_image(tmp_path / "small.jpg", miniatures.picture(0))
    assert read_image(tmp_path / "small.jpg").shape == (3, 48, 64)
    monkeypatch.setenv(VARIABLE, str(48 * 64 - 1))
    with pytest.raises(PictureSizeError, match="64 x 48 pixels"):
        read_image(tmp_path / "small.jpg")
    monkeypatch.setenv(VARIABLE, "many")
    with pytest.raises(ConfigError, match="EVENTFUL_MAX_PIXELS='many'"):
        most_pixels()
    monkeypatch.delenv(VARIABLE)
    assert most_pixels() == MOST_PIXELS
    check_pixels("a picture of 8K", 4320, 7680)


def test_videos_have_the_same_limit(tmp_path: Path, monkeypatch) -> None:
    video = videos.pan(tmp_path / "v.mp4", 3)
    shape = next(iter(VideoFile(video))).shape
    monkeypatch.setenv(VARIABLE, str(shape[1] * shape[2] - 1))
    for reading in (lambda: list(eventful.read(video)), lambda: len(VideoFile(video))):
        with pytest.raises(PictureSizeError, match=r"v\.mp4 has"):
            reading()
    monkeypatch.setenv(VARIABLE, str(shape[1] * shape[2]))
    assert len(list(eventful.read(video))) == 3


def test_a_lack_of_memory_is_said(tmp_path: Path, monkeypatch) -> None:
    miniatures.write_image(tmp_path / "a.jpg", miniatures.picture(0))

    def array(image):
        raise MemoryError

    monkeypatch.setattr(np, "array", array)
    with pytest.raises(PictureSizeError, match="the memory does not suffice"):
        ImageFiles(tmp_path, ("a.jpg",)).image(0)


@pytest.mark.parametrize("command", ["visualize", "bench video", "data check", "calibrate"])
def test_no_command_ends_in_a_traceback(tmp_path: Path, command: str, here) -> None:
    sequence = miniatures.mot(tmp_path / "mot", frames=2)
    folder = sequence / "val" / "C-seq" / "img1"
    for picture in folder.iterdir():
        claim(picture)  # Pillow looks at the content, not at the name
    model = "vit_tiny_patch16_224"
    words = {
        "visualize": ["visualize", folder, "--model", f"timm:{model}", "--out", tmp_path / "out"],
        "bench video": ["bench", "video", folder, "--model", model],
        "data check": ["data", "check", sequence, "--split", "val"],
        "calibrate": ["calibrate", model, folder],
    }[command]
    done = here(*words)
    assert done.returncode == (0 if command == "data check" else 2)  # a report of what is wrong
    said = " ".join((done.stdout + done.stderr).split())
    assert VARIABLE in said
    assert "20,000 x 12,000" in said
    assert "Traceback" not in said
