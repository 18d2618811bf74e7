"""A live source that is opened again when it is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from eventful.errors import DamagedMediaError, SourceError
from eventful.video.decoders import Decoder, Picture

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds; each wait is twice the one before

_log = logging.getLogger("eventful.read")


class LastingDecoder:
    """A decoder of a live source, and another one of the same source whenever it ends or fails.

    The first picture after that is marked as `resumed`. See `decoders.Decoder`.

    Args:
        shown: the source as messages name it.
        reopen: opens the source once more.
        retry: seconds without a picture after which the error is raised after all.

    Attributes:
        wait: waits until a moment of the monotonic clock; False if no more pictures are wanted.
            May be assigned.
        lost: how often the source was lost.
    """

    live = True
    length: int | None = None

    def __init__(
        self, decoder: Decoder, shown: str, reopen: Callable[[], Decoder], retry: float
    ) -> None:
        self.shown, self.reopen, self.retry = shown, reopen, retry
        self.wait: Callable[[float], bool] = _sleep
        self.rate, self.lost = decoder.rate, 0
        self._decoder, self._open, self._damaged = decoder, True, 0

    @property
    def damaged(self) -> int:
        """Pictures skipped so far because they do not decode."""
        return self._damaged + self._decoder.damaged

    def pictures(self) -> Iterator[Picture]:
        """Every picture, until no more are wanted or the source stays away."""
        last = time.monotonic()
        resumed = False
        while True:
            error: Exception = SourceError(f"{self.shown} ended. Check the camera and the network.")
            try:
                for picture in self._decoder.pictures():
                    picture.resumed = resumed
                    resumed = False
                    yield picture
                    last = time.monotonic()
            except (SourceError, DamagedMediaError) as raised:
                error = raised
            self.close()
            self.lost += not resumed  # not twice, if it opened and gave nothing
            if not self._reopened(last, error):
                return
            resumed = True

    def close(self) -> None:
        """Close the source."""
        if self._open:
            self._decoder.close()
        self._open = False

    def _reopened(self, last: float, error: Exception) -> bool:
        """Open the source again; False if no more pictures are wanted."""
        pause = FIRST_WAIT
        while True:
            left = last + self.retry - time.monotonic()
            if left <= 0:
                raise error
            pause = min(pause, left)
            _log.warning("%s is lost (%s); trying again in %.1f s", self.shown, error, pause)
            if not self.wait(time.monotonic() + pause):
                return False
            pause = min(2 * pause, LONGEST_WAIT)
            try:
                found = self.reopen()
            except (SourceError, DamagedMediaError) as raised:
                error = raised
                continue
            self._damaged += self._decoder.damaged
            self._decoder, self._open = found, True
            return True


def _sleep(moment: float) -> bool:
    time.sleep(max(0.0, moment - time.monotonic()))
    return True
