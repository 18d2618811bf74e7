"""`eventful.read`: frames decoded ahead in a thread, damage, and live sources."""

# ruff: noqa: F811  (fixtures come by import)
from __future__ import annotations

import gc
import itertools
import time
import weakref

import numpy as np
import pytest

import eventful
import videos
from eventful.errors import ConfigError, DamagedMediaError, StreamClosedError
from eventful.video import ahead, decoders
from reading import clip, no_threads, threads, wait_for  # noqa: F401

av = pytest.importorskip("av")
pytest.importorskip("PIL")


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
    wait_for(no_threads)  # it would wait for ever for room for the next of the 60 frames


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
    start = time.monotonic()
    reader = eventful.read(path, live=True, motion=True)
    frames = []
    for frame in reader:
        frames.append(frame)
        seen = reader.dropped
        wait_for(lambda: reader.dropped >= seen + 3 or reader._ahead._ended)  # noqa: B023
    indices = [frame.index for frame in frames]
    assert reader.live
    assert indices == sorted(set(indices))
    assert indices[-1] == 39  # the latest frame is delivered
    assert len(frames) <= 40 / 4 + 1
    assert reader.dropped == 40 - len(frames)
    assert time.monotonic() - start > 0.35  # as long as the video
    gaps = [b - a for a, b in itertools.pairwise(indices)]
    assert all(f.motion is None for f, gap in zip(frames[1:], gaps, strict=True) if gap > 1)
    with pytest.raises(ConfigError, match="live and can be iterated once"):
        iter(reader)
    with pytest.raises(TypeError, match="not known"):
        len(reader)
    assert reader
