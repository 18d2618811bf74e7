"""Rendered frames kept in memory, so that a second pass over a video does not render again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

LIMIT = 2**30  # bytes of frames in one process


@dataclass
class _Entry:
    """The frames of one video, and what is known of each."""

    frames: dict[int, Tensor] = field(default_factory=dict)
    facts: dict[int, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(frame.nbytes for frame in self.frames.values())


class KeptFrames:
    """Frames by video and position. Over the limit, the video unused for longest is dropped.

    Args:
        limit: bytes of all frames. A video that is larger alone is not kept as a whole.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes = 0

    def __len__(self) -> int:
        return sum(len(entry.frames) for entry in self._entries.values())

    @property
    def bytes(self) -> int:
        """Of all frames kept."""
        return self._bytes

    def get(self, video: Hashable, index: int) -> tuple[Tensor | None, Any]:
        """A frame and its facts; None for what is not kept."""
        with self._lock:
            entry = self._entries.get(video)
            if entry is None:
                return None, None
            self._entries.move_to_end(video)
            return entry.frames.get(index), entry.facts.get(index)

    def put(
        self,
        video: Hashable,
        indices: Sequence[int],
        frames: Sequence[Tensor],
        facts: Mapping[int, Any],
    ) -> None:
        """Keep frames of a video, with facts of some of them."""
        with self._lock:
            entry = self._entries.setdefault(video, _Entry())
            self._entries.move_to_end(video)
            for index, frame in zip(indices, frames, strict=True):
                if index in entry.frames or self._bytes_of(video) + frame.nbytes > self.limit:
                    continue
                entry.frames[index] = frame.clone()  # a view would keep its whole batch
                self._bytes += frame.nbytes
                if index in facts:
                    entry.facts[index] = facts[index]
            while self._bytes > self.limit and len(self._entries) > 1:
                _, dropped = self._entries.popitem(last=False)
                self._bytes -= dropped.bytes

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def _bytes_of(self, video: Hashable) -> int:
        return self._entries[video].bytes


FRAMES = KeptFrames()  # of all generated videos of this process
