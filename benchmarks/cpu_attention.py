"""Attention on a CPU: the fused kernel of torch beside products of oneDNN, on this machine.

    python -m benchmarks.cpu_attention

Times both in turn, for numbers of queries and keys that steps have. Stores
benchmarks/results/cpu-attention.json; --table writes the table of docs/performance.md from it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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
        result = {"rounds": ROUNDS - FIRST, "rows": rows, "rates": rates(), "growth": growth()}
        where = {**origin("cpu"), "threads": torch.get_num_threads()}
        files.write_json(RESULTS, {**result, "origin": where})
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

    os.environ[products.VARIABLE] = "products"
    if not products.serves(q, k):
        raise SystemExit(f"{name}, {kind}: products do not serve here (threads, size or type).")
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


@torch.inference_mode()
def rates() -> dict[str, float]:
    """Billions of multiplications a second in a product of 1,764 rows, by library and type."""
    found = {}
    for kind in (torch.float32, torch.bfloat16):
        rows, weight = torch.randn(1764, 768, dtype=kind), torch.randn(3072, 768, dtype=kind)
        ways: dict[str, Callable[[], Any]] = {
            "torch": lambda a=rows, b=weight: torch.mm(a, b.T),
            "oneDNN": lambda a=rows, b=weight: products._product(a, b),
        }
        for name, way in ways.items():
            spent = []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                way()
                spent.append(time.perf_counter() - began)
            label = f"{name} {str(kind).removeprefix('torch.')}"
            found[label] = round(1764 * 768 * 3072 / statistics.median(spent) / 1e9, 1)
    return found


@torch.inference_mode()
def growth() -> dict[str, float]:
    """MB that the process grows by in steps with other numbers of queries and keys in each."""
    os.environ[products.VARIABLE] = "products"
    draw, held = random.Random(0), []
    for step in range(1200):
        count, keys = draw.randrange(96, 700), draw.randrange(200, 700)
        sizes = (count, 1369, 1369), (1369, keys, keys)
        for tokens in sizes:
            q, k, v = (
                torch.randn(1, n, 12 * WIDTH).unflatten(-1, (12, -1)).transpose(1, 2)
                for n in tokens
            )
            ops.attend(q, k, v, WIDTH**-0.5)
        if step in (100, 1199):
            held.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20)
    return {"steps": 1200, "first": 100, "mb": round(held[1] - held[0], 1)}


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
        f"{where['torch']}, commit {where['commit']}: "
        "[benchmarks/results/cpu-attention.json](../benchmarks/results/cpu-attention.json).*"
    )
    return "\n".join([*lines, "", about])


if __name__ == "__main__":
    main()
