"""`eventful.read(...).lasting(seconds)`: a live source that is lost is opened again."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import numpy as np
import pytest

import eventful
from eventful.errors import ConfigError, SourceError
from eventful.video import ahead, lasting, read
from eventful.video.decoders import Picture
from eventful.video.fitting import resized
from reading import no_threads, wait_for

pytestmark = pytest.mark.real_clock


class Camera:
    """A decoder that gives `count` pictures, then fails, or ends.

    Args:
        gates: what to wait for before the picture of a number.
    """

    rate, length, live = 25.0, None, True

    def __init__(
        self,
        count: int,
        error: Exception | None,
        damaged: int = 0,
        gates: dict[int, threading.Event] | None = None,
    ) -> None:
        self.count, self.error, self.damaged = count, error, damaged
        self.gates = gates or {}
        self.closed = 0

    def pictures(self):
        pixels = np.zeros((8, 8, 3), np.uint8)
        for number in range(self.count):
            if number in self.gates:
                assert self.gates[number].wait(60)
            yield Picture(8, 8, None, True, lambda h, w: resized(pixels, h, w))
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def script(monkeypatch):
    """What opening the source gives, one after the other; an exception is raised."""
    made: list[Camera | Exception] = []

    def open_decoder(*_, **__):
        found = made.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(read, "open_decoder", open_decoder)
    monkeypatch.setattr(lasting, "FIRST_WAIT", 0.01)
    return made


@pytest.fixture
def one_by_one(monkeypatch):
    """Each frame comes once the one before was taken, so that none is replaced by a later one."""
    put = ahead.Ahead.put

    def put_later(self, frame):
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or not self._frames)
        put(self, frame)

    monkeypatch.setattr(ahead.Ahead, "put", put_later)


LOST = SourceError("camera:0 sent nothing for 10 s.")


@pytest.mark.usefixtures("one_by_one")
def test_a_lost_camera_is_opened_again_and_its_next_frame_says_so(script):
    first, second, third = Camera(2, LOST, damaged=1), Camera(2, None, damaged=2), Camera(99, LOST)
    script += [first, LOST, LOST, second, third]
    with eventful.read("camera:0").lasting(60.0) as reader:
        frames = iter(reader)
        resumed = [next(frames).resumed for _ in range(7)]
        assert reader.lost == 2
        assert reader.damaged == 3
    assert resumed == [False, False, True, False, True, False, False]
    assert first.closed == second.closed == 1
    wait_for(lambda: third.closed)


def test_a_frame_that_replaces_the_first_one_after_the_loss_says_so_too(script):
    found, fourth = threading.Event(), threading.Event()
    script += [Camera(1, LOST), Camera(4, None, gates={0: found, 3: fourth})]
    with eventful.read("camera:0").lasting(60.0) as reader:
        frames = iter(reader)
        next(frames)
        found.set()
        wait_for(lambda: reader.dropped == 2)
        assert next(frames).resumed
        fourth.set()
        assert not next(frames).resumed


@pytest.mark.usefixtures("one_by_one")
def test_numbers_and_times_go_on(script):
    script += [Camera(2, LOST), Camera(2, LOST)]
    with eventful.read("camera:0").lasting(60.0) as reader:
        frames = iter(reader)
        some = [next(frames) for _ in range(4)]
    assert [frame.index for frame in some] == [0, 1, 2, 3]
    times = [frame.time for frame in some]
    assert times == sorted(times)


def test_the_error_comes_after_all(script, caplog):
    script += [Camera(1, LOST), *[SourceError(f"no route {n}") for n in range(100)]]
    began = time.monotonic()
    with (
        eventful.read("camera:0").lasting(0.2) as reader,
        pytest.raises(SourceError, match="no route"),
    ):
        list(reader)
    assert time.monotonic() - began > 0.19
    waits = [record.args[2] for record in caplog.records]
    assert sum(waits) < 0.2 + 1e-6  # it waits no longer than asked, however slow opening is
    assert len(waits) == 100 - len(script)
    assert all(b == 2 * a for a, b in pairwise(waits[:-1]))  # the last one is what was left


def test_a_source_that_opens_and_gives_nothing_is_given_up_too(script):
    script += [Camera(1, LOST), *[Camera(0, None) for _ in range(1000)]]
    with (
        eventful.read("camera:0").lasting(0.15) as reader,
        pytest.raises(SourceError, match=r"ended|nothing"),
    ):
        list(reader)
    assert reader.lost == 1


def test_otherwise_the_error_comes_at_once(script):
    script += [Camera(1, LOST), Camera(5, None)]
    with eventful.read("camera:0") as reader, pytest.raises(SourceError, match="sent nothing"):
        list(reader)
    assert len(script) == 1


def test_closing_ends_the_wait(script, monkeypatch):
    monkeypatch.setattr(lasting, "FIRST_WAIT", 600.0)
    script += [Camera(1, LOST)]
    reader = eventful.read("camera:0").lasting(6000.0)
    next(iter(reader))
    wait_for(lambda: reader.lost)
    reader.close()
    wait_for(no_threads)  # sooner than in ten minutes


@pytest.mark.usefixtures("one_by_one")
def test_a_forgotten_reader_ends_its_thread(script):
    script += [Camera(10**6, None)]
    reader = eventful.read("camera:0").lasting(60.0)
    frames = iter(reader)
    next(frames)
    del reader, frames
    wait_for(no_threads)


def test_seconds_are_above_zero(script):
    script += [Camera(1, None)]
    with eventful.read("camera:0") as reader, pytest.raises(ConfigError, match=r"lasting\(0\)"):
        reader.lasting(0)


@pytest.mark.parametrize("jump", [3600.0, -5.0])
def test_a_jump_of_a_file_s_clock_is_no_pause(jump):
    pace = ahead.Pace()
    now = time.monotonic()
    stamps = [10.0, 10.04, 10.08]
    for stamp in stamps:
        pace.moment(stamp)
    moment = pace.moment(10.08 + jump)
    assert now <= moment <= time.monotonic()
    assert pace.moment(10.12 + jump) - moment == pytest.approx(0.04)
