"""Attention on a CPU: the fused kernel of torch beside products of oneDNN, on this machine.

    python -m benchmarks.cpu_attention

Times both in turn, for numbers of queries and keys that steps have. Stores
benchmarks/results/cpu-attention.json; --table writes the table of docs/performance.md from it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eventful import files, ops
from eventful.bench.results import origin
from eventful.bench.tables import put
from eventful.bench.timing import in_turn
from eventful.ops import products

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu-attention.json"
PAGE = ROOT / "docs" / "performance.md"
WIDTH, ROUNDS, FIRST = 64, 24, 6  # the first are not timed: memory is still being paged in
# What it is, heads, queries, keys, and the grid of a relative position.
CASES: tuple[tuple[str, int, int, int, tuple[int, int] | None], ...] = (
    ("at the limit", 12, 160, 625, None),
    ("ViT-S, 518 px, r = 128", 6, 128, 1374, None),
    ("ViT-B, 518 px, r = 256", 12, 256, 1374, None),
    ("ViT-B, 518 px, every token", 12, 1374, 1374, None),
    ("ViTDet-B, 672 px, r = 256", 12, 271, 1764, (42, 42)),
    ("ViTDet-B, 672 px, every token", 12, 1764, 1764, (42, 42)),
    ("ViTDet-B, 1024 px, r = 512", 12, 512, 4096, (64, 64)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="measure nothing")
    if not parser.parse_args().table:
        kinds = (torch.float32, torch.bfloat16)
        rows = [measure(*case, kind) for case in CASES for kind in kinds]
        where = {**origin("cpu"), "threads": torch.get_num_threads()}
        files.write_json(RESULTS, {"rounds": ROUNDS - FIRST, "rows": rows, "origin": where})
    put(PAGE, table(json.loads(RESULTS.read_text())), "cpu-attention")


@torch.inference_mode()
def measure(
    name: str, heads: int, count: int, keys: int, grid: tuple[int, int] | None, kind: torch.dtype
) -> dict[str, Any]:
    """Milliseconds of a call both ways, and the median of their ratios round by round."""
    q, k, v = (
        torch.randn(1, tokens, heads * WIDTH, dtype=kind).unflatten(-1, (heads, -1)).transpose(1, 2)
        for tokens in (count, keys, keys)
    )
    relative = None
    if grid is not None:
        relative = tuple(torch.randn(1, count, heads, side, dtype=kind) for side in grid)

    def call(way: str) -> Callable[[], float]:
        def timed() -> float:
            os.environ[products.VARIABLE] = way
            began = time.perf_counter()
            ops.attend(q, k, v, WIDTH**-0.5, relative=relative)
            return (time.perf_counter() - began) * 1e3

        return timed

    times: dict[str, list[float]] = {"fused": [], "products": []}
    for turn in range(ROUNDS):
        for way in in_turn(list(times), turn):
            spent = call(way)()
            if turn >= FIRST:
                times[way].append(spent)
    pairs = zip(times["fused"], times["products"], strict=True)
    return {
        "case": name,
        "heads": heads,
        "queries": count,
        "keys": keys,
        "dtype": str(kind).removeprefix("torch."),
        **{f"{way}_ms": round(statistics.median(spent), 2) for way, spent in times.items()},
        "ratio": round(statistics.median(a / b for a, b in pairs), 2),
    }


def table(result: dict[str, Any]) -> str:
    """A row for each case, with the ratio of both types of numbers."""
    ratio = {(row["case"], row["dtype"]): row["ratio"] for row in result["rows"]}
    lines = [
        "| attention of | heads | queries | keys | fp32 | bf16 |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['case']} | {row['heads']} | {row['queries']} | {row['keys']} "
        f"| {row['ratio']:.2f}x | {ratio[row['case'], 'bfloat16']:.2f}x |"
        for row in result["rows"]
        if row["dtype"] == "float32"
    ]
    where = result["origin"]
    about = (
        f"*Time of the fused kernel divided by that of the products, called in turn, medians of "
        f"{result['rounds']} pairs. {where['device_name']}, {where['threads']} threads, torch "
        f"{where['torch']}, commit {where['commit'][:7]}: "
        "[benchmarks/results/cpu-attention.json](../benchmarks/results/cpu-attention.json).*"
    )
    return "\n".join([*lines, "", about])


if __name__ == "__main__":
    main()
