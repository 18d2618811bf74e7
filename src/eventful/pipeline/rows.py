"""`frames.csv`, one row for each frame, and what it comes to: sums and a bounded history."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from eventful import files
from eventful.errors import RunError
from eventful.pipeline.history import FrameRow, Totals

COLUMNS = tuple(f.name for f in fields(FrameRow))
KEPT = 20_000  # rows in memory, whatever the length of the run


@dataclass
class History:
    """Sums over all rows, and every so many-th row of each source: a run may last for weeks.

    Attributes:
        rows: some of the rows, of each source evenly spread.
        last: number of the last frame of each source; `counts` how many rows it has.
    """

    rows: list[FrameRow] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    count: int = 0
    _step: int = 1
    _sums: dict[str, dict[str, float]] = field(default_factory=dict)  # by source and column
    _known: dict[str, int] = field(default_factory=dict)

    def add(self, row: FrameRow) -> None:
        """One more row."""
        place = self.counts.get(row.source, 0)
        if place % self._step == 0:
            self.rows.append(row)
            if len(self.rows) > KEPT:
                self.rows = _every_other(self.rows)
                self._step *= 2
        self.count += 1
        self.last[row.source] = row.index
        self.counts[row.source] = place + 1
        sums = self._sums.setdefault(row.source, {})
        for name in COLUMNS:
            value = getattr(row, name)
            if isinstance(value, bool | int | float):
                sums[name] = sums.get(name, 0.0) + value
                self._known[name] = self._known.get(name, 0) + 1

    def total(self, name: str, source: str | None = None) -> float:
        """The sum of a column, of one source or of all."""
        if source is not None:
            return self._sums.get(source, {}).get(name, 0.0)
        return sum(sums.get(name, 0.0) for sums in self._sums.values())

    def totals(self, step_frames: int = 1) -> dict[str, Totals]:
        """Sums by source, and of all of them under `""`, for the report.

        Args:
            step_frames: frames of one row.
        """
        return {
            "": self._totals(None, self.count, step_frames),
            **{name: self._totals(name, n, step_frames) for name, n in self.counts.items()},
        }

    def _totals(self, source: str | None, steps: int, step_frames: int) -> Totals:
        done, tokens = self.total("operations", source), self.total("tokens", source)
        return Totals(
            steps,
            steps * step_frames,
            int(self.total("flushed", source)),
            int(self.total("stale", source)),
            self.total("dense_operations", source) / done if done else None,
            self.total("updated", source) / tokens if tokens else None,
        )

    def mean(self, name: str) -> float | None:
        """The mean of a column over the rows that have it; None where none has."""
        count = self._known.get(name, 0)
        return self.total(name) / count if count else None

    def median(self, name: str) -> float | None:
        """The median of a column over the rows that are kept."""
        values = [value for row in self.rows if (value := getattr(row, name)) is not None]
        return median(values) if values else None

    def summary(self) -> dict[str, Any]:
        """What the rows come to; None where it is not known."""
        tokens, dense = self.total("tokens"), self.total("dense_operations")
        ms, dense_ms = self.median("ms"), self.median("dense_ms")
        return {
            "frames": self.count,
            "updated": self.total("updated") / tokens if tokens else None,
            "operations": self.total("operations") / dense if dense else None,
            "ms": ms,
            "dense_ms": dense_ms,
            "speedup": dense_ms / ms if ms and dense_ms else None,
            "error": self.mean("error"),
            "estimate": self.mean("estimate"),
            "flushed": int(self.total("flushed")),
            "stale": int(self.total("stale")),
            "found": int(self.total("found")) if "found" in self._known else None,
        }


def _every_other(rows: list[FrameRow]) -> list[FrameRow]:
    """Every other row of each source: rows of sources that take turns alternate."""
    kept, seen = [], dict[str, int]()
    for row in rows:
        place = seen.get(row.source, 0)
        seen[row.source] = place + 1
        if place % 2 == 0:
            kept.append(row)
    return kept


class RowFile:
    """Adds rows to `frames.csv`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        new = not path.is_file() or not path.stat().st_size
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")
        if new:
            self._writer.writerow(COLUMNS)

    def write(self, row: FrameRow) -> None:
        """Add one row, on its way to the disk before the next frame."""
        self._writer.writerow([_text(getattr(row, name)) for name in COLUMNS])
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def trim(path: Path, last: Mapping[str, int]) -> History:
    """Leave out rows behind the last frame of each source, and read the others.

    The row of a frame is written before its result, so there may be one without a result.

    Args:
        last: number of the last frame of each source that has a result.

    Raises:
        RunError: The file is not a `frames.csv` of this version.
    """
    history = History()
    if not path.is_file():
        return history
    with (
        path.open(newline="", encoding="utf-8") as file,
        files.replacing(path) as partial,
        partial.open("w", newline="", encoding="utf-8") as kept,
    ):
        writer = csv.writer(kept, lineterminator="\n")
        reader = csv.reader(file)
        if tuple(next(reader, ())) != COLUMNS:
            raise RunError(f"{path} has other columns than this version writes. Use --overwrite.")
        writer.writerow(COLUMNS)
        for values in reader:
            if len(values) != len(COLUMNS):
                continue  # the end of a run that was killed
            row = _row(dict(zip(COLUMNS, values, strict=True)))
            if row.index <= last.get(row.source, -1):
                writer.writerow(values)
                history.add(row)
    return history


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _row(values: dict[str, str]) -> FrameRow:
    """A row from its texts."""

    def number(name: str) -> float | None:
        return float(values[name]) if values[name] else None

    return FrameRow(
        source=values["source"],
        index=int(values["index"]),
        seconds=number("seconds"),
        ms=number("ms") or 0.0,
        tokens=int(values["tokens"]),
        updated=number("updated") or 0.0,
        operations=number("operations") or 0.0,
        dense_operations=number("dense_operations") or 0.0,
        dense_ms=number("dense_ms"),
        error=number("error"),
        estimate=number("estimate"),
        stale=values["stale"] == "1",
        flushed=values["flushed"] == "1",
        found=int(values["found"]) if values["found"] else None,
    )
