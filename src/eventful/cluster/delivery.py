"""Where results go: JSON lines, Parquet files, or a function. Each of them arrives once.

A delivery has a place: how far it got, as a number that the ledger writes down with the results
that are done. What lies behind the place after a crash is looked at again by `open`.
"""

from __future__ import annotations

import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from eventful import files
from eventful.cluster.store import Row
from eventful.errors import ConfigError
from eventful.pipeline.results import LINES, ResultWriter, end_of, last_frames, open_results
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

    def open(self, place: int | None) -> None:
        """See `Delivery`."""
        self.delivered = last_frames(self._folder, self._form, place or 0)
        self.place = end_of(self._folder, self._form)

    def write(self, rows: Sequence[Row]) -> None:
        """See `Delivery`."""
        try:
            if self._writer is None:
                self._writer = open_results(self._folder, self._form)
            for row in rows:
                self._writer.write(row, {})
            if self._form == "parquet":
                self._writer.close()  # nothing of a batch is held in memory
            _sync(self._writer.path)
        except OSError:
            self._roll_back()
            raise
        self.place = end_of(self._folder, self._form)

    def close(self) -> None:
        """See `Delivery`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _roll_back(self) -> None:
        """Half of a chunk is taken back."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):
                writer.close()
        lines = self._folder / LINES
        if self._form == "jsonl" and lines.is_file():
            os.truncate(lines, self.place)


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
        except Exception as error:  # of the user's code: tell it, and try again
            self._write_note(self.place, {}, returned=True)
            raise DeliveryError(f"{self._spec} raised {type(error).__name__}: {error}") from error
        self._write_note(number, frames, returned=True)
        self.place = number

    def _write_note(self, number: int, frames: dict[str, list[int]], *, returned: bool) -> None:
        note = {"number": number, "frames": frames, "returned": returned}
        files.write_json(self._note, note, indent=None, durable=True)


def _sync(path: Path) -> None:
    """Wait until a file, or a folder and its newest file, is on the disk."""
    newest = sorted(path.glob("part-*"))[-1:] if path.is_dir() else []
    for each in (*newest, path):
        number = os.open(each, os.O_RDONLY)
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
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{spec}: {error}. Write module.path:function.") from None
    if not callable(found):
        raise ConfigError(f"{spec} is no function. Write module.path:function.")
    return found


def open_delivery(to: str, folder: Path, state: Path) -> Delivery:
    """The destination that a user named: jsonl, parquet, or module.path:function."""
    if ":" in to:
        return CallDelivery(to, state)
    if to not in ("jsonl", "parquet"):
        raise ConfigError(f"Results go to jsonl, parquet or module.path:function, not {to!r}.")
    return FileDelivery(folder, "jsonl" if to == "jsonl" else "parquet")
