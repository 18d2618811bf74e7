"""Results as files: one CSV row per measurement, with its origin."""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from eventful import __version__, files
from eventful.bench.rows import Row

ORIGIN = ("date", "device_name", "threads", "torch", "cuda", "timm", "python", "eventful", "commit")
COLUMNS = ("over", *(f.name for f in fields(Row)), *ORIGIN)

Record = dict[str, str]  # one row as text, by column; "" where an older file has no such column


def origin(device: str) -> Record:
    """Device, versions and commit of a measurement made now."""
    place = torch.device(device)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else _cpu_name()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device_name": name,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "timm": _version("timm"),
        "python": platform.python_version(),
        "eventful": __version__,
        "commit": _commit(),
    }


def append(path: Path, rows: Sequence[Row], where: Mapping[str, str], over: str = "") -> None:
    """Add rows to a CSV file, creating it if needed.

    A file from before a column was added gets it, empty in the old rows.

    Args:
        where: their `origin`.
        over: what a sweep varied.
    """
    kept = read(path) if path.exists() else []
    known = [name for record in kept[:1] for name in record]
    columns = [*COLUMNS, *(name for name in known if name not in COLUMNS)]
    made = [{"over": over, **_as_text(row), **where} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as partial, partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *made])


def read(path: Path) -> list[Record]:
    """All rows of a results file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_all(folder: Path) -> tuple[list[Record], list[Record]]:
    """The rows of all files of a folder, each measurement's latest: of runs, and of sweeps."""
    records = [record for path in sorted(folder.glob("*.csv")) for record in read(path)]
    latest: dict[tuple[str, ...], Record] = {}
    for record in sorted(records, key=lambda record: record.get("date", "")):
        latest[tuple(record.get(name, "") for name in _SAME)] = record
    runs = [record for record in latest.values() if not record.get("over")]
    return runs, [record for record in latest.values() if record.get("over")]


def read_runtimes(folder: Path) -> list[dict[str, Any]]:
    """The reports of `bench runtime --out FOLDER/runtime/NAME`."""
    paths = sorted((folder / "runtime").glob("*/results.json"))
    return [json.loads(path.read_text()) for path in paths]


def read_defaults(folder: Path) -> list[dict[str, Any]]:
    """The records of `benchmarks/default.py --out FOLDER/default/NAME.json`."""
    paths = sorted((folder / "default").glob("*.json"))
    return [json.loads(path.read_text()) for path in paths]


def read_backbones(folder: Path) -> list[dict[str, Any]]:
    """The records of `benchmarks/backbone.py --out FOLDER/backbone/NAME.json`."""
    paths = sorted((folder / "backbone").glob("*.json"))
    return [json.loads(path.read_text()) for path in paths]


# Two rows alike in these measure the same thing: the later one counts.
_SAME = (
    "over",
    "model",
    "preset",
    "r",
    "tokens",
    "depth",
    "batch",
    "device",
    "dtype",
    "device_name",
    "threads",
)


def _as_text(row: Row) -> Record:
    return {name: _short(value) for name, value in asdict(row).items()}


def _short(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return " ".join(f"{name}={_short(entry)}" for name, entry in value.items())
    if isinstance(value, tuple | list):
        return "; ".join(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Commit of the working tree eventful runs from, with + if it has changes; '' if unknown.

    EVENTFUL_COMMIT overrides it, for a copy without its repository.
    """
    if given := os.environ.get("EVENTFUL_COMMIT"):
        return given
    here = Path(__file__).resolve().parent.parent
    try:
        head = _git(here, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(where: Path, *arguments: str) -> str:
    command = ["git", "-C", str(where), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()
