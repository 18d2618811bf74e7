"""`eventful.read`: frames of every kind of source, lists of them, and decoders that are missing."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import itertools
import sys
import threading
import types
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

import eventful
import videos
from eventful.errors import (
    ConfigError,
    DamagedMediaError,
    MalformedDataError,
    MissingDependencyError,
    MissingFileError,
    PictureSizeError,
    SourceError,
    UnsupportedError,
)
from eventful.video.read import ReaderGroup, VideoReader
from eventful.video.source import VideoFile
from reading import clip, no_threads, pan, wait_for  # noqa: F401

pytest.importorskip("av")
pytest.importorskip("PIL")


# Sources


def test_a_file_gives_every_frame_in_order(clip):
    reader = eventful.read(str(clip))
    assert (len(reader), reader.rate, reader.live, reader.source) == (60, 25.0, False, str(clip))
    frames = list(reader)
    assert [frame.index for frame in frames] == list(range(60))
    assert [frame.time for frame in frames] == pytest.approx([t / 25 for t in range(60)])
    assert [t for t, frame in enumerate(frames) if frame.key] == [0, 10, 20, 30, 40, 50]
    assert all(type(frame) is eventful.Frame for frame in frames)
    assert {tuple(frame.shape) for frame in frames} == {(1, 3, *videos.SIZE)}
    assert (reader.frames_read, reader.dropped, reader.damaged) == (60, 0, 0)
    raw = torch.stack(list(VideoFile(clip))).float() / 255
    found = torch.cat(list(eventful.read(clip, normalize="none")))
    assert (found - raw).abs().max() < 1e-6


def test_iterating_again_starts_over(clip):
    reader = eventful.read(clip)
    first = next(iter(reader))
    assert [f.index for f in itertools.islice(reader, 3)] == [0, 1, 2]
    again = list(reader)
    assert len(again) == 60
    assert again[0].equal(first)
    assert reader.frames_read == 60


@pytest.mark.parametrize("how", ["folder", "pattern", "image", "scheme"])
def test_images(tmp_path, how):
    folder = videos.images(tmp_path / "in", 12)
    (folder / "notes.txt").write_text("not an image")
    source = {
        "folder": folder,
        "pattern": str(folder / "*.png"),
        "image": folder / "3.png",
        "scheme": f"file://{folder}",
    }[how]
    reader = eventful.read(source, normalize="none")
    frames = list(reader)
    greys = [30] if how == "image" else [10 * t for t in range(12)]  # 2 is before 10
    assert [round(f.mean().item() * 255) for f in frames] == greys
    assert len(reader) == len(greys)
    assert frames[0].shape == (1, 3, 40, 60)
    assert frames[-1].time == pytest.approx((len(greys) - 1) / 25)


def test_damaged_images_are_skipped_and_counted(tmp_path):
    folder = videos.images(tmp_path / "in", 4)
    (folder / "2.png").write_bytes(b"no image")
    reader = eventful.read(folder)
    assert len(list(reader)) == 3
    assert reader.damaged == 1


def test_a_pattern_of_one_video(clip):
    assert eventful.read(str(clip.parent / "cl*.mp4")).source == str(clip)


def test_what_is_no_source(tmp_path, clip):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.mp4").write_bytes(b"no video" * 50)
    (tmp_path / "zero.mp4").write_bytes(b"")
    for source, kind, words in [
        (tmp_path / "gone.mp4", MissingFileError, "gone.mp4 is not there"),
        (tmp_path / "empty", MissingFileError, "holds no images"),
        (str(tmp_path / "*.jpg"), MissingFileError, "No file matches"),
        (str(tmp_path / "*.mp4"), ConfigError, r"2 files that are not all images.*\.streams"),
        (tmp_path / "text.mp4", DamagedMediaError, "does not decode as a video"),
        (tmp_path / "zero.mp4", DamagedMediaError, "does not decode as a video"),
        ("ftp://host/a.mp4", ConfigError, "'ftp' is not supported.*rtsp://"),
        ("pipe:0", ConfigError, "'pipe' is not supported"),
        ("camera:", ConfigError, "camera:0"),
        ("camera:973", SourceError, "camera:973 cannot be read"),
        ("rtsp:///path", ConfigError, "names no host"),
        (7, ConfigError, "a str or a Path, not int"),
        (tmp_path / "gone.streams", MissingFileError, "gone.streams is not there"),
    ]:
        with pytest.raises(kind, match=words):
            eventful.read(source)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 0}, "size=0"),
        ({"size": (1, 2, 3)}, "height, width"),
        ({"fit": "zoom"}, "'pad', 'crop' or 'stretch'"),
        ({"multiple_of": 0}, "multiple_of=0"),
        ({"normalize": "clip"}, "'clip' is not known"),
        ({"normalize": ((0.5, 0.5), 1.0)}, "three numbers"),
        ({"normalize": (1, 2, 3)}, "pair"),
        ({"normalize": object()}, "does not say how"),
        ({"timeout": 0}, "timeout=0"),
        ({"ahead": 0}, "ahead=0"),
    ],
)
def test_options_that_make_no_sense(clip, options, words):
    with pytest.raises(ConfigError, match=words):
        eventful.read(clip, **options)


def test_http(tmp_path):
    videos.pan(tmp_path / "a.mp4", 12, options={"movflags": "faststart"})

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        reader = eventful.read(f"{address}/a.mp4", timeout=60)
        assert not reader.live
        assert len(list(reader)) == 12
        with pytest.raises(SourceError, match=r"gone.mp4 cannot be read"):
            eventful.read(f"{address}/gone.mp4", timeout=60)
    finally:
        server.shutdown()
        server.server_close()


# Lists of sources


def test_a_list_of_sources(tmp_path, clip, pan):
    videos.images(tmp_path / "in", 3)
    path = tmp_path / "all.streams"
    path.write_text(
        f"# cameras\n\ngate = {pan}  # at the front\n{clip}\nyard=in\n", encoding="utf-8-sig"
    )
    with eventful.read(path, 32) as group:
        assert isinstance(group, ReaderGroup)
        assert list(group.readers) == ["gate", str(clip), "yard"]
        rounds = list(group)
        assert len(rounds) == 60
        assert list(rounds[0]) == ["gate", str(clip), "yard"]
        assert [sum(name in r for r in rounds) for name in group.readers] == [12, 60, 3]
        assert all(frame.index == t for t, r in enumerate(rounds) for frame in r.values())
        assert eventful.stack(rounds[0].values()).shape == (3, 3, 32, 32)
        assert isinstance(group["gate"], VideoReader)
    wait_for(no_threads)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# nothing\n", "names no source"),
        ("a = gone.mp4\n", r"line 1: .*gone\.mp4 is not there"),
        ("\nother.streams\n", "line 2: .*another"),
        ("a = {pan}\na = {pan}\n", "line 2: a second source is named 'a'"),
        ("udp://host:5\n", "line 1: .*'udp' is not supported"),
    ],
)
def test_lists_that_cannot_be_used(tmp_path, pan, text, words):
    path = tmp_path / "all.streams"
    path.write_text(text.format(pan=pan))
    with pytest.raises(MalformedDataError, match=words):
        eventful.read(path)


def test_one_source_of_a_list_fails(tmp_path, pan, clip, caplog):
    broken = clip.with_name("later.mp4")
    broken.write_bytes(clip.read_bytes())
    path = tmp_path / "all.streams"
    path.write_text(f"good = {pan}\nbad = {broken}\n")
    group = eventful.read(path)

    def fail():
        raise SourceError("bad sent nothing")
        yield

    group["bad"]._decoder.pictures = fail
    assert [list(frames) for frames in group] == [["good"]] * 12
    assert "bad sent nothing" in str(group.failed["bad"])
    assert "bad stopped: bad sent nothing" in caplog.text


# Decoders that are not installed


def without(monkeypatch, *names):
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def test_no_decoder(monkeypatch, pan):
    without(monkeypatch, "av", "cv2")
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[video\]"):
        eventful.read(pan)


class FakeCapture:
    """What `cv2.VideoCapture` does, on made-up pictures."""

    def __init__(self, name):
        self.name, self.left = name, 0 if name == 9 or str(name).endswith("bad.mp4") else 5

    def isOpened(self):
        return self.left > 0

    def get(self, what):
        return {"rate": 50.0, "count": 5, "height": 40, "width": 60}[what]

    def read(self):
        if self.left == 0:
            return False, None
        self.left -= 1
        pixels = np.zeros((40, 60, 3), np.uint8)
        pixels[..., 0] = 255  # blue, in OpenCV's order
        return True, pixels

    def release(self):
        self.left = 0


def test_opencv_in_place_of_pyav(monkeypatch, tmp_path, pan):
    fake = types.ModuleType("cv2")
    fake.VideoCapture, fake.CAP_PROP_FPS, fake.CAP_PROP_FRAME_COUNT = FakeCapture, "rate", "count"
    fake.CAP_PROP_FRAME_HEIGHT, fake.CAP_PROP_FRAME_WIDTH = "height", "width"
    without(monkeypatch, "av")
    monkeypatch.setitem(sys.modules, "cv2", fake)
    reader = eventful.read(pan, (20, 30), normalize="none")
    frames = list(reader)
    assert (len(reader), len(frames), reader.rate) == (5, 5, 50.0)
    assert frames[0].mean((0, 2, 3)).tolist() == [0, 0, 1]
    assert [f.time for f in frames] == [0, 0.02, 0.04, 0.06, 0.08]
    monkeypatch.setenv("EVENTFUL_MAX_PIXELS", "2399")
    with pytest.raises(PictureSizeError, match="60 x 40 pixels"):
        eventful.read(pan)
    monkeypatch.delenv("EVENTFUL_MAX_PIXELS")
    camera = eventful.read("camera:0")
    assert camera.live
    assert camera._decoder._capture.name == 0
    assert len(list(camera)) + camera.dropped == 5
    with pytest.raises(UnsupportedError, match=r"motion vectors need PyAV.*\[video\]"):
        eventful.read(pan, motion=True)
    with pytest.raises(UnsupportedError, match="network sources need PyAV"):
        eventful.read("rtsp://host/a")
    with pytest.raises(SourceError, match="camera:9 cannot be opened"):
        eventful.read("camera:9")
    (tmp_path / "bad.mp4").write_bytes(b"x")
    with pytest.raises(DamagedMediaError, match=r"bad\.mp4 does not decode"):
        eventful.read(tmp_path / "bad.mp4")
    (tmp_path / "a.mp4").write_text("#EXTM3U\nb.ts\n")
    with pytest.raises(UnsupportedError, match="is a playlist"):
        eventful.read(tmp_path / "a.mp4")
