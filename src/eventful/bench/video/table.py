"""Stored rows as a table of a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eventful.bench.tables import machine
from eventful.bench.video.store import JSON

EMPTY = "*Nothing is measured yet: `eventful bench video --out benchmarks/results/video/NAME`.*"
_HEAD = (
    "| clip | contender | tokens updated | operations | time | with reading "
    "| error, median / worst | cosine, median / worst | mAP50 |",
    "|---|---|--:|--:|--:|--:|--:|--:|--:|",
)


def read_videos(folder: Path) -> list[list[dict[str, Any]]]:
    """The rows of each `bench video --out FOLDER/video/NAME`."""
    paths = sorted((folder / "video").glob(f"*/{JSON}"))
    return [json.loads(path.read_text())["rows"] for path in paths]


def videos(runs: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Every contender on every clip, run by run. Shares of time and operations are of dense."""
    parts: list[str] = []
    for rows in runs:
        first = rows[0]
        place = machine({**first, "device": first["device"].partition(":")[0]})
        parts += [f"### {place}, {first['model']}, {first['precision']}", "", *_HEAD]
        parts += [_line(row, new=row["contender"] == "dense") for row in rows]
        parts += ["", f"*torch {first['torch']}, commit {first['commit']}*", ""]
    return "\n".join(parts) or EMPTY


def _line(row: dict[str, Any], new: bool) -> str:
    clip = f"{row['clip']}, {row['size']}, {row['frames']} frames" if new else ""
    cells = (
        clip,
        row["contender"],
        _share(row["updated"]),
        _share(row["operations"]),
        _share(row["time"]),
        _share(row["time_read"]),
        f"{row['error']:.3f} / {row['error_worst']:.3f}",
        f"{row['cosine']:.3f} / {row['cosine_worst']:.3f}",
        _share(row["map50"]),
    )
    return f"| {' | '.join(cells)} |"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
