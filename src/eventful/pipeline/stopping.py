"""Ends a run between two frames when the user or the system asks for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StopRequested(Exception):
    """The run is to end now, while it waits for a frame."""


class Stop:
    """A request to end a run.

    The frame at work is finished first. Only a wait for the next frame is cut short, since a camera
    may be silent for long.
    """

    def __init__(self) -> None:
        self.requested = False
        self._waiting = False

    def request(self) -> None:
        """Ask to end. A second request while a frame is at work ends it at once."""
        if self.requested and not self._waiting:
            raise KeyboardInterrupt
        self.requested = True
        if self._waiting:
            raise StopRequested

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait that may be cut short, by `StopRequested`."""
        if self.requested:
            raise StopRequested
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Inside, SIGINT (ctrl-C) and SIGTERM request the end; in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: Any) -> None:
            self.request()

        before = {
            number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
