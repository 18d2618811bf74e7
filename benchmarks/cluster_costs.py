"""Collects what a simulation of a cluster takes from measurements, into the package.

    python -m benchmarks.cluster_costs

Reads `benchmarks/results/` and writes `src/eventful/cluster/simulate/measured.json`.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from eventful import files

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
WRITTEN = ROOT / "src" / "eventful" / "cluster" / "simulate" / "measured.json"
# Name of the costs, the file, the model, and what the rows of a sweep vary.
SETS = (
    ("h200-vit-b-1024", "h200.csv", "vit-b-4096", ""),
    ("h200-vit-b-518", "sweep-h200.csv", "vit-b-1369", "batch"),
    ("cpu-vit-s-384", "sweep-cpu.csv", "vit-s-576", "batch"),
)
SCENES = "default/h200-bf16.json"


def collected() -> dict[str, Any]:
    """Everything the file holds."""
    scenes = json.loads((RESULTS / SCENES).read_text())
    return {
        "costs": {name: costs(*where) for name, *where in SETS},
        "shares": {clip["clip"]: round(clip["updated"], 4) for clip in scenes["clips"]},
        "shares_from": f"benchmarks/results/{SCENES}, {scenes['device_name']}, {scenes['commit']}",
    }


def costs(file: str, model: str, over: str) -> dict[str, Any]:
    """The newest row of each batch size under the preset `fast`."""
    newest: dict[int, dict[str, str]] = {}
    with (RESULTS / file).open() as opened:
        for row in csv.DictReader(opened):
            if (row["model"], row["preset"], row["over"]) == (model, "fast", over):
                newest[int(row["batch"])] = row
    first = newest[min(newest)]
    tokens = int(first["tokens"])
    steps, dense = [], []
    for streams, row in sorted(newest.items()):
        steps.append([streams, streams * int(row["r"]), float(row["ms"])])
        steps.append([streams, streams * tokens, float(row["flush_ms"])])
        dense.append([streams, float(row["dense_best_ms"])])
    return {
        "device": first["device_name"],
        "from": f"benchmarks/results/{file}, {model}, {first['dtype']}",
        "commits": sorted({row["commit"] for row in newest.values()}),
        "tokens": tokens,
        "state_bytes": max(int(row["state_bytes"]) // n for n, row in newest.items()),
        "steps": steps,
        "dense": dense,
    }


if __name__ == "__main__":
    files.write_json(WRITTEN, collected())
