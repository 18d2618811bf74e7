"""Where a stream is slower than the dense model: small models and small frames, on this machine.

    python -m benchmarks.small_models

Times each model on a generated street, alone and in streams, on each frame in turn. Stores
benchmarks/results/small-models.json; --table writes the table of docs/limits.md from that file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import eventful
from eventful import Stream, convert, files
from eventful.bench.results import origin
from eventful.bench.tables import put
from eventful.bench.timing import in_turn
from eventful.pipeline.subject import open_subject
from eventful.video.world import World

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "small-models.json", ROOT / "docs" / "limits.md"
SEED, FRAMES, FIRST = 7, 20, 4  # the first frames are not timed
CASES = (
    ("vit_tiny_patch16_224", (64, 64)),
    ("vit_tiny_patch16_224", (96, 160)),
    ("vit_tiny_patch16_224", (128, 224)),
    ("vit_tiny_patch16_224", (288, 512)),
    ("vit_small_patch16_224", (128, 224)),
    ("vit_small_patch16_224", (288, 512)),
    ("vit_base_patch16_224", (288, 512)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="measure nothing")
    if not parser.parse_args().table:
        torch.set_num_threads(1)
        rows = [measure(model, size) for model, size in CASES]
        where = {**origin("cpu"), "threads": torch.get_num_threads()}
        files.write_json(RESULTS, {"seed": SEED, "frames": FRAMES, "rows": rows, "origin": where})
    put(PAGE, table(json.loads(RESULTS.read_text())), "small")


def measure(model: str, size: tuple[int, int]) -> dict[str, Any]:
    """Median times of a frame: the model alone, a stream, and a stream that computes everything.

    Times are those of the processor, so that other work on the machine does not count.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # weights are random: times do not depend on them
        ready = open_subject(f"timm:{model}", size=size).at(*size)
    streams = {
        "stream": Stream(convert(ready.model)),
        "whole": Stream(convert(ready.model, eventful.Config.fast(eventful.Always()))),
    }
    calls = {"dense": ready.model, **streams}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for t, picture in enumerate(World(seed=SEED, frames=FRAMES, size=size)):
        (frame,) = ready.prepare([picture]).args
        for name in in_turn(list(calls), t):
            began = time.process_time()
            with torch.no_grad():
                calls[name](frame)
            if t >= FIRST:
                times[name].append((time.process_time() - began) * 1e3)
    last = streams["stream"].last
    assert last is not None
    summary = streams["stream"].summary()
    return {
        "model": model,
        "size": "x".join(map(str, size)),
        "tokens": sum(layout.tokens for layout in last.layouts.values()),
        "updated": round(summary.tokens, 3),
        "operations": round(summary.operations / summary.dense_operations, 3),
        "dense_steps": summary.fallbacks,
        **{f"{name}_ms": round(statistics.median(values), 2) for name, values in times.items()},
    }


def table(result: dict[str, Any]) -> str:
    """The rows as a table of the documentation."""
    lines = [
        "| model | frames | tokens | operations | dense model | stream | speed-up | stream that "
        "computes everything |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| `{row['model']}` | {row['size']} | {row['tokens']} | {row['operations']:.0%} | "
        f"{row['dense_ms']:.1f} ms | {row['stream_ms']:.1f} ms | "
        f"{row['dense_ms'] / row['stream_ms']:.2f}x | {row['whole_ms']:.1f} ms |"
        for row in result["rows"]
    ]
    where = result["origin"]
    about = (
        f"*A generated street (`world:{SEED}`), {result['frames']} frames, medians of the "
        f"processor's time, each model on each frame in turn; the default, and dense eager, "
        f"fp32. {where['device_name']}, "
        f"{where['threads']} thread, torch {where['torch']}, commit {where['commit'][:7]}: "
        "[benchmarks/results/small-models.json](../benchmarks/results/small-models.json).*"
    )
    return "\n".join([*lines, "", about])


if __name__ == "__main__":
    main()
