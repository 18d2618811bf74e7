"""What happened in a run, as JSON lines, and the last of it in memory."""

from __future__ import annotations

import json
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

_KEPT = 50
_MOST = 20 << 20  # bytes of the file; then it is begun anew, and one older file is kept


class Events:
    """Notes events. A disk that is full does not stop the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last: deque[dict[str, Any]] = deque(maxlen=_KEPT)

    def note(self, what: str, **about: Any) -> None:
        """One more event; nothing in it may hold credentials."""
        event = {"time": round(time.time(), 3), "event": what, **about}
        self.last.append(event)
        with suppress(OSError):
            if self._path.is_file() and self._path.stat().st_size > _MOST:
                self._path.replace(self._path.with_suffix(".old.jsonl"))
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
