"""One source of the page: a thread that reads it and keeps its latest frame."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Literal

from torch import Tensor

from eventful.errors import EventfulError
from eventful.paper.data import world as worlds
from eventful.pipeline.sources import Footage, SourceName, Taken, open_source
from eventful.video.ahead import Pace
from eventful.video.world import RATE

Status = Literal["opening", "running", "stalled", "ended", "dead"]

STALLED = 3.0  # seconds without a frame after which a source counts as stalled
_SHORTEST = 0.04  # seconds of one repetition, at least: a picture is a video of one frame


@dataclass(frozen=True)
class Arrived:
    """One frame as it came.

    Attributes:
        picture: (3, H, W) uint8 RGB.
        moment: of the monotonic clock, when it was there.
        resumed: it does not follow on the frame before.
        index: its number; repetitions of a file are counted on.
        seconds: its time in the source.
    """

    picture: Tensor
    moment: float
    resumed: bool
    index: int = 0
    seconds: float | None = None


class Feed:
    """Reads a source at its own pace; a new frame replaces one that nobody took.

    Args:
        loop: begin again at the end of a file.
        every: wait until a frame is taken, and do not pace a file.
        after: begin behind this number; where a source cannot, its first frame has the next one.
        rate: frames a second of a file, in place of its own.
        notify: called, in the thread, when there is a frame or the source has ended.
        open_footage: opens the source.

    Attributes:
        index: number of the last frame that was read.
        arrived: frames read so far; `dropped` those replaced before they were taken.
        message: why the source is dead.
        last: moment of the monotonic clock at which the last frame came, or reading began.
    """

    def __init__(
        self,
        source: SourceName,
        *,
        loop: bool = False,
        every: bool = False,
        after: int = -1,
        rate: float | None = None,
        notify: Callable[[], None] = lambda: None,
        open_footage: Callable[[SourceName], Footage] | None = None,
    ) -> None:
        self.source, self.loop, self.every = source, loop, every
        self.index = after
        self.arrived, self.message = 0, ""
        self.rate, self._wanted_rate = 0.0, rate
        self.last = time.monotonic()
        self._notify, self._open = notify, open_footage or open_live
        self._status: Status = "opening"
        self._slot: Arrived | None = None
        self._replaced = 0
        self._before: tuple[int, ...] = (
            0,
            0,
            0,
        )  # dropped, damaged and lost in earlier repetitions
        self._footage: Footage | None = None
        self._changed = threading.Condition()
        self._stopped = self._paused = False
        self._thread = threading.Thread(target=self._run, name="eventful.live.feed", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    @property
    def status(self) -> Status:
        """What the source does; one that is open and sends nothing is stalled."""
        late = not self._paused and self.staleness > STALLED
        return "stalled" if late and self._status in ("opening", "running") else self._status

    @property
    def staleness(self) -> float:
        """Seconds since the last frame came."""
        return time.monotonic() - self.last

    @property
    def dropped(self) -> int:
        """Frames that were replaced by newer ones before the model took them."""
        return self._replaced + self._count(0)

    @property
    def damaged(self) -> int:
        """Frames that did not decode."""
        return self._count(1)

    @property
    def lost(self) -> int:
        """How often a camera or address was lost and opened again."""
        return self._count(2)

    @property
    def waiting(self) -> bool:
        """Whether there is a frame to take."""
        return self._slot is not None

    def take(self) -> Arrived | None:
        """The latest frame, once; None if there is none."""
        with self._changed:
            found, self._slot = self._slot, None
            self._changed.notify_all()
            return found

    def pause(self, paused: bool) -> None:
        """Hold a file where it is. A camera goes on, and its frames are discarded."""
        with self._changed:
            if self._paused and not paused:
                self.last = time.monotonic()
            self._paused = paused
            if paused:
                self._slot = None
            self._changed.notify_all()

    def close(self) -> None:
        """Stop reading. A thread that waits for the network ends by its time limit."""
        with self._changed:
            self._stopped, self._slot = True, None
            self._changed.notify_all()
        footage = self._footage
        if footage is not None:
            with suppress(EventfulError):
                footage.close()

    def join(self, seconds: float) -> None:
        """Wait for the thread."""
        self._thread.join(seconds)

    def fail(self, message: str) -> None:
        """Give the source up: its frames cannot be used."""
        self._status, self.message = "dead", message
        self.close()

    def _run(self) -> None:
        try:
            again = False
            while not self._stopped:
                began = time.monotonic()
                self._play(again)
                if not self.loop or self._stopped:
                    break
                again = True
                self._wait_until(began + _SHORTEST)
            if not self._stopped:
                self._status = "ended"
        except EventfulError as error:
            self._die(str(error))
        except Exception as error:  # of a decoder: this source is dead, and the others go on
            self._die(f"{type(error).__name__}: {error}")
        self._notify()

    def _die(self, message: str) -> None:
        if not self._stopped:
            self._status, self.message = "dead", message

    def _play(self, again: bool) -> None:
        """Read the source to its end once."""
        footage = self._footage = self._open(self.source)
        self.rate = self._wanted_rate or footage.rate
        pace = Pace()
        renumbered = again or self.loop or footage.live
        shift = self.index + 1 if renumbered else 0
        try:
            for taken in footage.frames(-1 if renumbered else self.index):
                if not self._due(taken, footage, pace):
                    return
                number = taken.index + shift
                self._put(
                    Arrived(
                        taken.picture,
                        time.monotonic(),
                        taken.resumed or again,
                        number,
                        taken.seconds,
                    )
                )
                again = False
        finally:
            footage.close()
            with self._changed:  # no count is seen twice
                self._before = tuple(self._count(which) for which in range(3))
                self._footage = None

    def _due(self, taken: Taken, footage: Footage, pace: Pace) -> bool:
        """Wait until a frame of a file is due; False if no more are wanted."""
        if footage.live or self.every:
            return not self._stopped
        with self._changed:
            if self._paused:
                self._changed.wait_for(lambda: self._stopped or not self._paused)
                pace.resume()
        stamp = taken.seconds
        if stamp is None or self._wanted_rate is not None:
            stamp = taken.index / self.rate
        return self._wait_until(pace.moment(stamp))

    def _wait_until(self, moment: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, max(0.0, moment - time.monotonic()))
            return not self._stopped

    def _put(self, frame: Arrived) -> None:
        with self._changed:
            if self.every:
                self._changed.wait_for(lambda: self._stopped or self._slot is None)
            if self._stopped:
                return
            self.arrived += 1
            self.index = frame.index
            self.last, self._status = frame.moment, "running"
            if self._paused:
                return
            if self._slot is not None:
                self._replaced += 1
                if self._slot.resumed:
                    frame = replace(frame, resumed=True)
            self._slot = frame
        self._notify()

    def _count(self, which: int) -> int:
        with self._changed:
            footage = self._footage
            now = (0, 0, 0)
            if footage is not None:
                now = footage.dropped, footage.damaged, footage.lost
            return self._before[which] + now[which]


def open_live(source: SourceName) -> Footage:
    """Open a source for a page; rendered frames of the generated world are kept for repetitions."""
    if worlds.names_seed(source.address):
        return _KeptWorld(source.address)
    return open_source(source)


class _KeptWorld(Footage):
    """A video of the generated world, whose frames are rendered once while there is room."""

    def __init__(self, address: str) -> None:
        world = worlds.open_seed(address)
        given = {field.name: getattr(world, field.name) for field in fields(world)}
        self._film = worlds.Film(**given)
        self.rate, self.length = float(RATE), len(world)

    def frames(self, after: int = -1) -> Iterator[Taken]:
        """See `Footage`."""
        for index in range(after + 1, len(self._film)):
            yield Taken(index, index / self.rate, self._film.read([index])[0])
