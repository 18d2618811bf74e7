"""Results as files: one CSV row per measurement, with where it came from."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import eventful
from eventful.bench.measure import Row

ORIGIN = ("date", "device_name", "threads", "torch", "python", "eventful", "commit")
COLUMNS = (*(f.name for f in fields(Row)), *ORIGIN)


def origin(device: str) -> dict[str, str]:
    """Device, versions and commit of a measurement made now."""
    kind = torch.device(device)
    name = torch.cuda.get_device_name(kind) if kind.type == "cuda" else _cpu_name()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device_name": name,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "eventful": eventful.__version__,
        "commit": _commit(),
    }


def append(path: Path, rows: Sequence[Row], where: dict[str, str]) -> None:
    """Add rows to a CSV file, which is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({**{k: _short(v) for k, v in asdict(row).items()}, **where})


def read(path: Path) -> list[dict[str, str]]:
    """All rows of a results file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Commit of the working tree eventful runs from, with + if it has changes; '' if unknown.

    EVENTFUL_COMMIT tells it where a copy without its repository is measured.
    """
    if told := os.environ.get("EVENTFUL_COMMIT"):
        return told
    here = Path(eventful.__file__).parent
    try:
        head = _git(here, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(where: Path, *arguments: str) -> str:
    command = ["git", "-C", str(where), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()
