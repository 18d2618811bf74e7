"""`eventful.read`: frames of every kind of source, decoded ahead in a thread."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import threading
import time
import types
import weakref
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import eventful
import videos
from eventful.errors import (
    ConfigError,
    DamagedMediaError,
    MalformedDataError,
    MissingDependencyError,
    MissingFileError,
    SourceError,
    StreamClosedError,
    UnsupportedError,
)
from eventful.video import ahead, decoders
from eventful.video.normalization import IMAGENET
from eventful.video.read import ReaderGroup, VideoReader
from eventful.video.source import VideoFile

av = pytest.importorskip("av")
pytest.importorskip("PIL")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """60 frames that move, 25 a second, with a key frame every 10."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    return videos.pan(path, 60, step=(1, 2), key=10)


@pytest.fixture(scope="module")
def pan(tmp_path_factory):
    """12 frames that move by 2 pixels down and 4 across, one key frame."""
    return videos.pan(tmp_path_factory.mktemp("pan") / "pan.mp4", 12, step=(2, 4))


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "eventful.read" and t.is_alive()]


def wait_for(what, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "took too long"
        time.sleep(0.005)


def no_threads() -> bool:
    gc.collect()
    return not threads()


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
        reader = eventful.read(f"{address}/a.mp4", timeout=5)
        assert not reader.live
        assert len(list(reader)) == 12
        with pytest.raises(SourceError, match=r"gone.mp4 cannot be read"):
            eventful.read(f"{address}/gone.mp4", timeout=5)
    finally:
        server.shutdown()
        server.server_close()


# Size and values


@pytest.mark.parametrize(
    ("fit", "region"),
    [
        ("pad", (8.0, 0.0, 48.0, 64.0)),
        ("crop", (0.0, -11.0, 64.0, 85.0)),
        ("stretch", (0.0, 0.0, 64.0, 64.0)),
    ],
)
def test_fits(pan, fit, region):
    frame = next(iter(eventful.read(pan, 64, fit=fit)))
    assert frame.shape == (1, 3, 64, 64)
    assert frame.original_size == videos.SIZE
    assert frame.region == region
    top, left, height, width = region
    whole = torch.tensor([left, top, left + width, top + height])
    assert frame.to_original(whole).tolist() == [0, 0, 128, 96]
    assert ((frame == 0).all(1)[0, 0].all()) == (fit == "pad")
    raw = next(iter(VideoFile(pan)))[None].float()
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in IMAGENET)
    expected = F.interpolate(raw, (int(height), int(width)), mode="bilinear", antialias=True)
    expected = (expected / 255 - mean) / std
    if fit == "crop":
        expected, shown = expected[..., 11:75], frame
    else:
        shown = frame[..., int(top) : int(top + height), :]
    apart = (shown - expected).abs() * std * 255  # in levels from 0 to 255
    assert apart.mean() < 1.5
    assert apart.max() < 12


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (96, 128)),
        ({"multiple_of": 14}, (98, 126)),
        ({"size": (50, 70), "multiple_of": 16}, (48, 64)),
        ({"size": 5, "multiple_of": 14}, (14, 14)),
        ({"size": (200, 300)}, (200, 300)),
    ],
)
def test_sizes(pan, options, shape):
    assert tuple(next(iter(eventful.read(pan, **options))).shape[2:]) == shape


def test_images_are_scaled_alike(tmp_path):
    from PIL import Image

    pixels = videos.texture(96, 128)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    frame = next(iter(eventful.read(tmp_path, (48, 64), normalize="none")))
    raw = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
    expected = F.interpolate(raw, (48, 64), mode="bilinear", antialias=True)
    assert (frame - expected).abs().max() < 1.1 / 255


def processor(**more):
    return SimpleNamespace(
        image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.25, 0.2], do_normalize=True, **more
    )


def timm_model(**more):
    settings = {"mean": (0.5, 0.4, 0.3), "std": (0.5, 0.25, 0.2), "input_size": (3, 32, 48)}
    return SimpleNamespace(pretrained_cfg=settings, **more)


@pytest.mark.parametrize(
    "given",
    [
        ((0.5, 0.4, 0.3), (0.5, 0.25, 0.2)),
        timm_model(),
        SimpleNamespace(default_cfg=SimpleNamespace(mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2))),
        processor(),
        SimpleNamespace(config=processor()),
        SimpleNamespace(image_processor=processor()),
    ],
    ids=["pair", "timm", "timm object", "processor", "config", "whole processor"],
)
def test_normalization(pan, given):
    raw = next(iter(eventful.read(pan, normalize="none")))
    mean = torch.tensor([0.5, 0.4, 0.3]).view(1, 3, 1, 1)
    std = torch.tensor([0.5, 0.25, 0.2]).view(1, 3, 1, 1)
    found = next(iter(eventful.read(pan, normalize=given)))
    assert (found - (raw - mean) / std).abs().max() < 1e-5


def test_a_config_names_the_folder_of_its_processor(pan, tmp_path):
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_normalize": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    model = SimpleNamespace(config=SimpleNamespace(_name_or_path=str(tmp_path), image_size=32))
    frame = next(iter(eventful.read(pan, model=model, fit="stretch")))
    raw = next(iter(eventful.read(pan, 32, normalize="none", fit="stretch")))
    assert (frame - (raw - 0.5) / 0.5).abs().max() < 1e-5
    bare = SimpleNamespace(config=SimpleNamespace(_name_or_path="nobody/nothing", image_size=32))
    with pytest.raises(ConfigError, match="does not say how its pictures are normalised"):
        eventful.read(pan, model=bare)


def test_a_processor_that_does_not_normalize(pan):
    given = processor()
    given.do_normalize = False
    raw = next(iter(eventful.read(pan, normalize="none")))
    assert next(iter(eventful.read(pan, normalize=given))).equal(raw)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (timm_model(), (32, 48)),
        (timm_model(patch_embed=SimpleNamespace(img_size=(56, 42))), (56, 42)),
        (processor(size={"height": 24, "width": 40}), (24, 40)),
        (processor(size={"shortest_edge": 64}, crop_size={"height": 56, "width": 56}), (56, 56)),
        (processor(size={"shortest_edge": 64}), (64, 64)),
        (processor(), videos.SIZE),
    ],
)
def test_size_of_a_model(pan, model, shape):
    assert tuple(next(iter(eventful.read(pan, model=model))).shape[2:]) == shape
    assert tuple(next(iter(eventful.read(pan, 16, model=model))).shape[2:]) == (16, 16)


def test_a_picture_that_is_shown_rotated(pan, monkeypatch):
    from eventful.video import pyav

    upright = next(iter(eventful.read(pan, normalize="none")))
    inner = pyav.AvDecoder._picture

    class Turned:
        def __init__(self, frame):
            self.__dict__.update(
                real=frame, rotation=-90, height=frame.height, width=frame.width, key_frame=True
            )

    def picture(self, frame):
        reformat = self._reformatter.reformat
        self._reformatter = SimpleNamespace(reformat=lambda f, *a, **k: reformat(f.real, *a, **k))
        return inner(self, Turned(frame))

    monkeypatch.setattr(pyav.AvDecoder, "_picture", picture)
    turned = next(iter(eventful.read(pan, normalize="none")))
    assert turned.shape == (1, 3, 128, 96)
    assert turned.equal(upright.rot90(-1, (2, 3)))


# The thread


def test_no_more_frames_are_held_than_asked(clip, monkeypatch):
    made = []
    inner = ahead._prepare
    monkeypatch.setattr(ahead, "_prepare", lambda *a: made.append(1) or inner(*a))
    with eventful.read(clip, ahead=3) as reader:
        frames = iter(reader)
        wait_for(lambda: len(made) == 3)
        time.sleep(0.1)
        assert len(made) == 3
        next(frames)
        wait_for(lambda: len(made) == 4)
        time.sleep(0.05)
        assert len(made) == 4


def test_frames_are_let_go(clip, monkeypatch):
    made = []
    inner = ahead._prepare

    def prepare(*args):
        frame = inner(*args)
        made.append(weakref.ref(frame))
        return frame

    monkeypatch.setattr(ahead, "_prepare", prepare)
    with eventful.read(clip, ahead=2) as reader:
        frames = iter(reader)
        for taken in range(1, 6):
            next(frames)  # and forget it
            wait_for(lambda: len(made) == taken + 2)  # noqa: B023
            assert sum(ref() is not None for ref in made) == 2


@pytest.mark.parametrize("how", ["close", "with", "forgotten", "unused", "break"])
def test_stopping_early_ends_the_thread(clip, how):
    wait_for(no_threads)
    reader = eventful.read(clip)
    frames = iter(reader)
    if how != "unused":
        next(frames)
    assert len(threads()) == 1
    start = time.monotonic()
    if how == "close":
        reader.close()
        assert list(frames) == []
        with pytest.raises(StreamClosedError, match="closed"):
            iter(reader)
    elif how == "with":
        with reader:
            pass
    elif how in ("forgotten", "unused"):
        del reader, frames
    else:
        del frames
        for _ in reader:
            break
    wait_for(no_threads)
    assert time.monotonic() - start < 3.0


def test_a_reader_that_was_never_used_closes(clip):
    reader = eventful.read(clip)
    container = reader._decoder._container
    del reader
    gc.collect()
    with pytest.raises(AssertionError, match="not open"):
        next(container.demux())


def test_errors_of_the_thread_arrive_with_their_cause(clip, monkeypatch):
    inner = decoders.Picture

    def fail(self):
        yield inner(8, 8, 0.0, True, lambda h, w: tuple(np.zeros((3, h, w), np.uint8)))
        try:
            raise KeyError("first")
        except KeyError as error:
            raise RuntimeError("broken in the thread") from error

    monkeypatch.setattr("eventful.video.pyav.AvDecoder.pictures", fail)
    frames = iter(eventful.read(clip))
    next(frames)
    with pytest.raises(RuntimeError, match="broken in the thread") as caught:
        next(frames)
    assert isinstance(caught.value.__cause__, KeyError)
    wait_for(no_threads)


def test_damage_in_the_middle_is_skipped(clip):
    reader = eventful.read(videos.damage(clip, 0.5, 6000))
    frames = list(reader)
    assert reader.damaged > 0
    assert 20 < len(frames) < 60
    assert frames[-1].time == pytest.approx(59 / 25)  # it went on to the end
    assert len(frames) == reader.frames_read


def test_frames_that_the_decoder_marks_as_damaged(tmp_path):
    path = videos.pan(tmp_path / "a.ts", 60, step=(1, 2), key=10)
    path = videos.damage(path, 0.5, 8000)
    with av.open(str(path)) as container:
        container.streams.video[0].thread_type = "AUTO"
        marks = [frame.is_corrupt for frame in container.decode(video=0)]
    assert any(marks)
    reader = eventful.read(path)
    assert len(list(reader)) == marks.count(False)
    assert reader.damaged >= marks.count(True)


def test_a_file_without_any_good_frame(clip):
    content = clip.read_bytes()
    start = content.index(b"mdat") + 4
    end = content.index(b"moov") - 4 if content.index(b"moov") > start else len(content)
    path = clip.with_name("none.mp4")
    path.write_bytes(content[:start] + bytes(end - start) + content[end:])
    with pytest.raises(DamagedMediaError, match=r"none\.mp4"):
        list(eventful.read(path))


# Live sources


def test_live_drops_what_a_slow_user_does_not_take(tmp_path):
    path = videos.pan(tmp_path / "a.mp4", 40, step=(1, 1), rate=100)
    reader = eventful.read(path, live=True, motion=True)
    frames = []
    start = time.monotonic()
    for frame in reader:
        frames.append(frame)
        time.sleep(0.06)
    indices = [frame.index for frame in frames]
    assert reader.live
    assert indices == sorted(set(indices))
    assert indices[-1] == 39  # the latest frame is delivered
    assert len(frames) < 25
    assert reader.dropped == 40 - len(frames)
    assert time.monotonic() - start > 0.35  # as long as the video
    gaps = [b - a for a, b in itertools.pairwise(indices)]
    assert all(f.motion is None for f, gap in zip(frames[1:], gaps, strict=True) if gap > 1)
    with pytest.raises(ConfigError, match="live and can be iterated once"):
        iter(reader)
    with pytest.raises(TypeError, match="not known"):
        len(reader)
    assert reader


# Motion


@pytest.mark.parametrize(("size", "grid"), [(None, (6, 8)), ((48, 64), (6, 8)), (64, (8, 8))])
def test_motion_vectors_of_a_pan(pan, size, grid):
    frames = list(eventful.read(pan, size, motion=True))
    assert frames[0].motion is None
    for frame in frames[1:]:
        assert frame.motion.shape == (1, 2, *grid)
        scale = frame.region.height / 96
        down, across = frame.motion[0].flatten(1).nanmedian(1).values
        assert down.item() * frame.shape[2] == pytest.approx(2 * scale, abs=0.1)
        assert across.item() * frame.shape[3] == pytest.approx(4 * scale, abs=0.1)
    unknown = frames[1].motion.isnan().all(3).all(1)[0].tolist()
    assert unknown == (
        [True, False, False, False, False, False, False, True] if size == 64 else [False] * 6
    )


def test_motion_points_to_where_the_content_was(pan):
    frames = list(eventful.read(pan, motion=True, normalize="none"))
    now, before = frames[5], frames[4]
    down, across = (now.motion[0, :, 3, 4] * torch.tensor([96, 128])).round().int().tolist()
    here = now[..., 48:64, 64:80]
    there = before[..., 48 + down : 64 + down, 64 + across : 80 + across]
    assert (here - there).abs().mean() < (here - before[..., 48:64, 64:80]).abs().mean() / 4


def test_motion_is_not_given_after_a_b_frame(tmp_path):
    path = videos.pan(tmp_path / "b.mp4", 24, step=(2, 4), between=2)
    with av.open(str(path)) as container:
        kinds = [frame.pict_type.name for frame in map(named, container.decode(video=0))]
    assert "B" in kinds
    frames = list(eventful.read(path, motion=True))
    given = [frame.motion is not None for frame in frames]
    follows = [False, *(b == "P" and a != "B" for a, b in itertools.pairwise(kinds))]
    assert given == follows


def named(frame):
    return SimpleNamespace(pict_type=av.video.frame.PictureType(frame.pict_type))


def test_motion_is_off_unless_asked(pan):
    assert all(frame.motion is None for frame in eventful.read(pan))


def test_vectors_from_later_pictures_are_refused():
    from eventful.video.motion import vector_grid

    names = ["source", "w", "h", "dst_x", "dst_y", "motion_x", "motion_y", "motion_scale"]
    kind = np.dtype([(name, "i4") for name in names])
    past = (-1, 16, 16, 8, 8, 4, 8, 4)
    grid = vector_grid(np.array([past, (-1, 8, 8, 20, 4, 0, 4, 4)], kind), 32, 40)
    assert grid.shape == (2, 2, 3)
    assert grid[:, 0, 0].tolist() == [2.0, 1.0]
    assert grid[:, 0, 1].tolist() == [1.0, 0.0]
    assert np.isnan(grid[:, 1]).all()
    assert vector_grid(np.array([past, (1, 16, 16, 8, 8, 4, 8, 4)], kind), 32, 40) is None
    mixed = [(-1, 16, 8, 8, 4, 0, 0, 4), (-1, 8, 8, 4, 12, 12, 0, 4)]
    assert vector_grid(np.array(mixed, kind), 32, 40)[1, 0, 0] == 1.0  # by area: 2 to 1


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
        return {"rate": 50.0, "count": 5}[what]

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
    without(monkeypatch, "av")
    monkeypatch.setitem(sys.modules, "cv2", fake)
    reader = eventful.read(pan, (20, 30), normalize="none")
    frames = list(reader)
    assert (len(reader), len(frames), reader.rate) == (5, 5, 50.0)
    assert frames[0].mean((0, 2, 3)).tolist() == [0, 0, 1]
    assert [f.time for f in frames] == [0, 0.02, 0.04, 0.06, 0.08]
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
