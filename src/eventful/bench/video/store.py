"""Rows as files: JSON with the numbers of every frame, CSV without them."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from eventful import files
from eventful.bench.results import ORIGIN
from eventful.bench.video.rows import VideoRow

JSON, CSV = "results.json", "results.csv"
COLUMNS = (*(f.name for f in fields(VideoRow) if f.name != "by_frame"), *ORIGIN)


def as_data(row: VideoRow, where: Mapping[str, str]) -> dict[str, Any]:
    """A row with its origin as plain data; None where a number is not finite."""
    made: dict[str, Any] = _finite(asdict(row))
    return {**made, **where}


def write(folder: Path, rows: Sequence[VideoRow], where: Mapping[str, str]) -> None:
    """Write all rows to `results.json` and `results.csv`."""
    made = [as_data(row, where) for row in rows]
    files.write_json(folder / JSON, {"origin": dict(where), "rows": made})
    with (
        files.replacing(folder / CSV) as partial,
        partial.open("w", newline="") as file,
    ):
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _short(value) for key, value in row.items()} for row in made)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return f"{value:.5g}" if isinstance(value, float) else value
