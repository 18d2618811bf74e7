"""The tables of docs/cluster.md, from the stored runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eventful import files

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cluster"
PAGE = ROOT / "docs" / "cluster.md"
BEGIN, END = "<!-- runs:begin -->", "<!-- runs:end -->"
_FAULTS = {
    "workers": "kill -9 of a worker, ten times",
    "registry": "kill -9 of the registry, three times",
    "readers": "kill -9 of the reader, three times",
    "driver": "kill -9 of the driver, then `--resume`, three times",
    "hang": "a worker that is stopped (SIGSTOP)",
    "disk": "a full disk for some seconds",
    "camera": "a camera that goes and comes back, and a new one",
    "rolling": "a rolling restart",
    "every": "files of which every frame is wanted; four kills",
}


def tables() -> str:
    """All tables."""
    parts = [
        _faults(),
        _soak(_read("soak")),
        _scaling(_read("scaling")),
        _counting(_read("counting")),
    ]
    return "\n\n".join(part for part in parts if part)


def write_page() -> None:
    """Bring the page up to date."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if mark:
        files.write_bytes(PAGE, f"{head}{BEGIN}\n\n{tables()}\n\n{END}{tail}".encode())


def _read(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _faults() -> str:
    lines = [
        "| fault | frames | counted | dropped | lost | disk full | counted twice, or not named | "
        "back after, s: median (longest) | load of the machine |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, about in _FAULTS.items():
        run = _read(name)
        if run is None:
            continue
        audit, missed = run["audit"], run["audit"]["missed"]
        seconds = sorted(run.get("seconds", ()))
        back = f"{seconds[len(seconds) // 2]:.1f} ({seconds[-1]:.1f})" if seconds else "-"
        wrong = audit["repeated"] + audit["unexplained"]
        numbers = (
            audit["frames"],
            audit["counted"],
            *(missed[reason] for reason in ("dropped", "lost", "disk full")),
            wrong,
        )
        load = " to ".join(f"{value:.0f}" for value in run["load_average"])
        lines.append(f"| {about} | {' | '.join(f'{n:,}' for n in numbers)} | {back} | {load} |")
    return "\n".join(lines)


def _soak(run: dict[str, Any] | None) -> str:
    if run is None:
        return ""
    samples = run["samples"]
    kinds = ("driver", "registry", "readers", "workers", "ray")
    chosen = [samples[round(i * (len(samples) - 1) / 5)] for i in range(6)]
    lines = [f"| seconds | frames | {' | '.join(kinds)} |", "|--:|--:|" + "--:|" * len(kinds)]
    lines += [
        f"| {each['seconds']} | {each['counted']:,} | "
        + " | ".join(f"{each[kind]} MB" for kind in kinds)
        + " |"
        for each in chosen
    ]
    return (
        f"{run['seconds']} seconds with {run['cameras']} cameras and {run['kills']} workers "
        f"killed; at its end the state folder had {run['state_kilobytes']:,} kB:\n\n"
        + "\n".join(lines)
    )


def _scaling(run: dict[str, Any] | None) -> str:
    if run is None:
        return ""
    lines = ["| workers | frames a second | ms a frame |", "|--:|--:|--:|"]
    lines += [f"| {r['workers']} | {r['fps']} | {r['cost_ms_median']:.1f} |" for r in run["rows"]]
    load = " to ".join(f"{value:.0f}" for value in run["load_average"])
    cores = run["origin"]["cores"]
    return (
        f"{run['streams']} files on one machine of {cores} cores, whose load was {load}:\n\n"
        + "\n".join(lines)
    )


def _counting(run: dict[str, Any] | None) -> str:
    if run is None:
        return ""
    return (
        f"One registry counted, wrote and delivered {run['per_second']:,} results of five "
        f"detections a second, of {run['workers']} workers with {run['streams']} streams in all."
    )
