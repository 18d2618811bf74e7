"""Where results go: JSON lines, Parquet files, or a function. Each of them arrives once.

A delivery has a place: how far it got, as a number that the ledger writes down with the results
that are done. What lies behind the place after a crash is looked at again by `open`.
"""

from __future__ import annotations

import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from eventful import files
from eventful.cluster.messages import scrubbed
from eventful.cluster.store import Row
from eventful.errors import ConfigError
from eventful.pipeline.results import (
    LINES,
    PARTS,
    ResultWriter,
    check_format,
    end_of,
    last_frames,
    open_results,
)
from eventful.pipeline.settings import Format

CALLING = "calling.json"


class DeliveryError(OSError):
    """Results could not be delivered now; they wait and are tried again."""


class Delivery(ABC):
    """One destination.

    Attributes:
        place: how far it got.
        delivered: last frame of each source that arrived behind the place given to `open`.
        uncertain: frames that a crash left in doubt: first and last by source.
        batch: results that it takes at a time; fewer wait `patience` seconds for more.
    """

    place: int = 0
    batch, patience = 512, 0.0

    def __init__(self) -> None:
        self.delivered: dict[str, int] = {}
        self.uncertain: dict[str, tuple[int, int]] = {}

    @abstractmethod
    def open(self, place: int | None) -> None:
        """Go on from a place; None for the first time."""

    @abstractmethod
    def write(self, rows: Sequence[Row]) -> None:
        """Deliver all of these, or raise `OSError` and be as if nothing was asked."""

    def close(self) -> None:
        """Give everything back."""
        return


class FileDelivery(Delivery):
    """`results.jsonl` or a folder of Parquet files, as `eventful run` writes them."""

    def __init__(self, folder: Path, form: Format) -> None:
        super().__init__()
        self._folder, self._form = folder, form
        if form == "parquet":
            self.batch, self.patience = 4096, 60.0  # each batch is a file
        self._writer: ResultWriter | None = None
        self._inode = 0

    def open(self, place: int | None) -> None:
        """See `Delivery`."""
        behind, self.place = place or 0, end_of(self._folder, self._form)
        # Shorter than the place: somebody emptied it, or moved it away, and all in it is new.
        behind = behind if behind <= self.place else 0
        self.delivered = last_frames(self._folder, self._form, behind)
        self.place = end_of(self._folder, self._form)  # half a line was cut off

    def write(self, rows: Sequence[Row]) -> None:
        """See `Delivery`."""
        self._follow()
        self._take_back()  # of an attempt that could not be taken back then
        try:
            if self._writer is None:
                self._writer = open_results(self._folder, self._form)
                self._inode = _inode(self._writer.path)
            for row in rows:
                self._writer.write(row, {})
            if self._form == "parquet":
                self._writer.close()  # nothing of a batch is held in memory
            _sync([*self._parts(), self._writer.path])
        except Exception:
            self._give_up()
            raise
        self.place = end_of(self._folder, self._form)

    def close(self) -> None:
        """See `Delivery`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _follow(self) -> None:
        """Begin a new file where the old one was moved away, as by logrotate, or emptied."""
        writer = self._writer if self._form == "jsonl" else None
        if writer is not None and _inode(writer.path) != self._inode:
            self.close()
            self.place = end_of(self._folder, self._form)
        self.place = min(self.place, end_of(self._folder, self._form))

    def _give_up(self) -> None:
        """Forget half of a chunk."""
        writer, self._writer = self._writer, None
        with suppress(OSError):
            # A writer of Parquet has rows in memory, which it would write when it is closed.
            if writer is not None and self._form == "jsonl":
                writer.close()
        with suppress(OSError):
            self._take_back()

    def _take_back(self) -> None:
        """Delete what lies behind the place."""
        for part in self._parts():
            part.unlink()
        lines = self._folder / LINES
        if self._form == "jsonl" and lines.is_file() and lines.stat().st_size > self.place:
            os.truncate(lines, self.place)

    def _parts(self) -> list[Path]:
        """Files of Parquet behind the place."""
        if self._form != "parquet":
            return []
        found = (self._folder / PARTS["parquet"]).glob("part-*.parquet")
        return [path for path in found if _number(path) > self.place]


class CallDelivery(Delivery):
    """A function of the user, called with a list of rows; no row is given to it twice.

    If it raises, it has taken none of them, and is called with them again. If the process dies
    while it runs, nobody knows what it took: those rows are not given again, but told as uncertain.

    Args:
        spec: `module.path:function`.
        folder: for a note of what is being given.
    """

    def __init__(self, spec: str, folder: Path) -> None:
        super().__init__()
        self._call = find_function(spec)
        self._spec, self._note = spec, folder / CALLING

    def open(self, place: int | None) -> None:
        """See `Delivery`."""
        self.place = place or 0
        if not self._note.is_file():
            return
        note = json.loads(self._note.read_text(encoding="utf-8"))
        if note["number"] == self.place + 1:  # the ledger does not know of it
            self.place += 1
            self.delivered = {name: ends[1] for name, ends in note["frames"].items()}
            if not note["returned"]:
                self.uncertain = {name: (a, b) for name, (a, b) in note["frames"].items()}

    def write(self, rows: Sequence[Row]) -> None:
        """See `Delivery`."""
        frames: dict[str, list[int]] = {}
        for row in rows:
            ends = frames.setdefault(row["source"], [row["frame"], row["frame"]])
            ends[1] = row["frame"]
        number = self.place + 1
        self._write_note(number, frames, returned=False)
        try:
            self._call(list(rows))
        except Exception as error:  # of the user's code: report it, and try again
            with suppress(OSError):
                self._write_note(self.place, {}, returned=True)
            what = scrubbed(f"{self._spec} raised {type(error).__name__}: {error}")
            raise DeliveryError(what) from error
        # From here on the rows are not given again, also where the note cannot be written. A crash
        # then finds the first note, and calls them uncertain.
        self.place = number
        with suppress(OSError):
            self._write_note(number, frames, returned=True)

    def _write_note(self, number: int, frames: dict[str, list[int]], *, returned: bool) -> None:
        note = {"number": number, "frames": frames, "returned": returned}
        files.write_json(self._note, note, indent=None, durable=True)


def _number(part: Path) -> int:
    return int(part.stem.partition("-")[2])


def _inode(path: Path) -> int:
    """What tells a file from another one of its name; 0 if it is not there."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


def _sync(paths: Iterable[Path]) -> None:
    """Wait until files and folders are on the disk."""
    for path in paths:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def find_function(spec: str) -> Callable[[list[Row]], Any]:
    """A function by name.

    Raises:
        ConfigError: There is none.
    """
    module, mark, name = spec.partition(":")
    try:
        found = getattr(importlib.import_module(module), name) if mark and module else None
    except Exception as error:  # whatever the module does when it is imported
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{spec}: {what}. Write module.path:function.") from None
    if not callable(found):
        raise ConfigError(f"{spec} is no function. Write module.path:function.")
    return found


def open_delivery(to: str, folder: Path, state: Path) -> Delivery:
    """The destination that a user named: jsonl, parquet, or module.path:function."""
    if ":" in to:
        return CallDelivery(to, state)
    if to not in ("jsonl", "parquet"):
        raise ConfigError(f"Results go to jsonl, parquet or module.path:function, not {to!r}.")
    check_format("jsonl" if to == "jsonl" else "parquet", None)
    return FileDelivery(folder, "jsonl" if to == "jsonl" else "parquet")
