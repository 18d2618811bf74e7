"""One thread at a time in a stream."""

from __future__ import annotations

import threading
from typing import Any

import torch

from eventful.errors import ConcurrentUseError


class Exclusive:
    """Holds a stream's lock, and leaves inference mode, for the length of a block."""

    __slots__ = ("_lock", "_mode")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._mode: Any = None

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ConcurrentUseError(
                "This stream is being stepped by another thread. A stream is one video in order: "
                "give each thread its own Stream (they can share the model), or use a StreamBatch."
            )
        if torch.is_inference_mode_enabled():  # or the state could only ever be written inside it
            self._mode = torch.inference_mode(False)
            self._mode.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*raised)
        self._lock.release()
