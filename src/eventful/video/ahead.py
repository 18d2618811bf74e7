"""Frames decoded ahead, in a thread, and no more of them than may be held."""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from eventful.errors import DamagedMediaError
from eventful.video.decoders import Decoder, Picture
from eventful.video.fitting import Fitting
from eventful.video.frame import Frame
from eventful.video.motion import fitted_motion

_JUMP = 10.0  # seconds between two frames of a file that are a jump of its clock, not a pause
_PATIENCE = 1.0  # seconds to wait for a thread that was asked to stop


class Ahead:
    """Frames between the thread that decodes them and the one that uses them.

    Args:
        room: the most frames held.
        latest: whether a new frame replaces one that nobody took; else the thread waits.

    Attributes:
        taken: frames delivered.
        dropped: frames that were replaced.
    """

    def __init__(self, room: int, *, latest: bool) -> None:
        self.room, self.latest = room, latest
        self.taken, self.dropped = 0, 0
        self.stopped = False
        self._ended = False
        self._error: BaseException | None = None
        self._frames: deque[Frame] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self, decoder: Decoder, fitting: Fitting, source: str, *, paced: bool) -> None:
        """Decode in a thread from now on.

        Args:
            source: as frames name it.
            paced: whether to wait for the time of each frame, as if it came from a camera.
        """
        # The thread knows this object and not the reader, so that a forgotten reader is collected.
        work = (self, decoder, fitting, source, paced)
        self._thread = threading.Thread(target=_work, args=work, name="eventful.read", daemon=True)
        _RUNNING.add(self)
        self._thread.start()

    def wait_for_room(self) -> bool:
        """Wait until one more frame may be held; False if no more are wanted."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.stopped or self.latest or len(self._frames) < self.room
            )
            return not self.stopped

    def wait_until(self, moment: float) -> bool:
        """Wait for a moment of the monotonic clock; False if no more frames are wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopped, max(0.0, moment - time.monotonic()))
            return not self.stopped

    def put(self, frame: Frame) -> None:
        """Hand over one frame; it is not kept if no more are wanted."""
        with self._changed:
            if self.stopped:
                return
            if self.latest and self._frames:
                self.dropped += len(self._frames)
                if any(dropped.resumed for dropped in self._frames):
                    frame.infos = (replace(frame.info, resumed=True),)
                self._frames.clear()
                frame.motion = None  # it is relative to a frame that nobody saw
            self._frames.append(frame)
            self._changed.notify_all()

    @property
    def ready(self) -> bool:
        """Whether the next frame, the end or an error is there, so that nobody has to wait."""
        with self._changed:
            return bool(self._frames) or self._ended or self.stopped

    def end(self, error: BaseException | None) -> None:
        """No frame follows; the error, if any, is raised after the last frame."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Frame]:
        return self

    def __next__(self) -> Frame:
        """The next frame. Errors of the thread are raised here, after the last frame."""
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._ended or self.stopped)
            if self._frames:
                self.taken += 1
                self._changed.notify_all()
                return self._frames.popleft()
            error, self._error = self._error, None
        if error is not None and not self.stopped:
            raise error
        raise StopIteration

    def stop(self) -> None:
        """Ask the thread to stop, and let go of the frames."""
        with self._changed:
            self.stopped = True
            self._frames.clear()
            self._changed.notify_all()

    def join(self) -> None:
        """Wait a moment for the thread. One that waits for the network ends by its time-out."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)


_RUNNING: weakref.WeakSet[Ahead] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Before Python ends: a thread must not be inside FFmpeg then."""
    running = list(_RUNNING)
    for ahead in running:
        ahead.stop()
    for ahead in running:
        ahead.join()


def _work(ahead: Ahead, decoder: Decoder, fitting: Fitting, source: str, paced: bool) -> None:
    """What the thread does: decode, scale, normalise and hand over."""
    error: BaseException | None = None
    try:
        count = 0
        for frame in _prepared(ahead, decoder, fitting, source, paced):
            ahead.put(frame)
            count += 1
            del frame  # the queue holds it, and nothing else
        if count == 0 and not ahead.stopped:
            raise DamagedMediaError(
                f"{source}: no frame decodes ({decoder.damaged} are damaged). Fetch it again, or "
                "convert it."
            )
    except BaseException as raised:
        error = raised
    finally:
        decoder.close()
        ahead.end(error)


def _prepared(
    ahead: Ahead, decoder: Decoder, fitting: Fitting, source: str, paced: bool
) -> Iterator[Frame]:
    """Frames in turn, each when there is room for it, until no more are wanted."""
    start, pace = time.monotonic(), Pace()
    for index, picture in enumerate(decoder.pictures()):
        if picture.time is None:
            picture.time = time.monotonic() - start
        if paced and not ahead.wait_until(pace.moment(picture.time)):
            return
        if not ahead.wait_for_room():
            return
        yield _prepare(picture, fitting, index, source)


class Pace:
    """When frames of a file are due, as if they came from a camera."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._last = 0.0

    def moment(self, stamp: float) -> float:
        """The moment of the monotonic clock for a time of the file, which may jump either way."""
        if not 0 <= stamp - self._last <= _JUMP:
            self._start = time.monotonic() - stamp  # go on from here, without a pause
        self._last = stamp
        return self._start + stamp

    def resume(self) -> None:
        """After a pause: the next frame is due at once, and the others follow in their time."""
        self._last = math.inf


def _prepare(picture: Picture, fitting: Fitting, index: int, source: str) -> Frame:
    layout = fitting.layout(picture.height, picture.width)
    pixels = fitting.pixels(layout, picture.draw(*layout.scaled))
    motion = None
    if picture.vectors is not None:
        motion = fitted_motion(picture.vectors, layout, picture.height, picture.width)
    return Frame(
        pixels,
        motion=motion,
        index=index,
        time=picture.time or 0.0,
        source=source,
        original_size=(picture.height, picture.width),
        region=layout.region,
        key=picture.key,
        resumed=picture.resumed,
    )
