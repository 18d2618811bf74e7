"""Snapshots of streams in a folder, so that a worker that was started again can go on from them.

They are an optimisation: without one, or with one that is too old, a stream begins with a frame
that is computed as a whole.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from eventful import files

RECENT = 250  # frames between a snapshot and the frame that goes on from it


class Snapshots:
    """The snapshots of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, stream: str, frame: int, content: bytes) -> None:
        """Keep what was remembered after a frame; a full disk keeps the one before."""
        with suppress(OSError):
            head = f"{frame}\n".encode()
            files.write_bytes(self._path(stream), head + content)

    def read(self, stream: str, after: int) -> bytes | None:
        """What was remembered at most `RECENT` frames before `after`, and not behind it."""
        try:
            head, _, content = self._path(stream).read_bytes().partition(b"\n")
            frame = int(head)
        except (OSError, ValueError):
            return None
        return content if 0 <= after - frame <= RECENT else None

    def delete(self, stream: str) -> None:
        """Forget a stream."""
        with suppress(OSError):
            self._path(stream).unlink(missing_ok=True)

    def _path(self, stream: str) -> Path:
        plain = re.sub(r"[^\w.-]+", "-", stream).strip(".") or "stream"
        return self._folder / f"{plain}-{files.digest([stream])[:8]}.snapshot"
