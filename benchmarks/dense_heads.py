"""Depth Anything Small in a stream whose heads keep their maps, and in one whose heads are dense.

    python -m benchmarks.dense_heads

A square of tokens changes in every frame, the rest stands still. Stores
benchmarks/results/dense-heads.json; --table writes the table of docs/heads.md from that file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import eventful
from eventful import Config, Stream, TopR, files
from eventful.bench.results import origin
from eventful.bench.tables import put
from eventful.bench.timing import in_turn
from eventful.surgery.libraries import load

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "dense-heads.json", ROOT / "docs" / "heads.md"
SIZE, PATCH, FRAMES, FIRST = 518, 14, 14, 4  # the first frames are not timed
CASES = (("a corner", 4), ("a corner", 12), ("the middle", 4), ("the middle", 12))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="measure nothing")
    if not parser.parse_args().table:
        warnings.simplefilter("ignore")  # weights are random: times do not depend on them
        model = depth_anything_small()
        rows = []
        for threads in sorted({1, os.cpu_count() or 1}):
            torch.set_num_threads(threads)
            rows += [{"threads": threads, **measure(model, *case)} for case in CASES]
        files.write_json(RESULTS, {"frames": FRAMES, "rows": rows, "origin": origin("cpu")})
    put(PAGE, table(json.loads(RESULTS.read_text())), "dense heads")


def depth_anything_small() -> nn.Module:
    """The shapes of Depth Anything Small, with random weights."""
    transformers = load("transformers")
    torch.manual_seed(0)
    backbone = transformers.Dinov2Config(
        hidden_size=384,
        num_attention_heads=6,
        image_size=SIZE,
        patch_size=PATCH,
        out_indices=[3, 6, 9, 12],
        reshape_hidden_states=False,
    )
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone,
        reassemble_hidden_size=384,
        neck_hidden_sizes=[48, 96, 192, 384],
        fusion_hidden_size=64,
    )
    model: nn.Module = transformers.DepthAnythingForDepthEstimation(config).eval()
    return model


def measure(model: nn.Module, place: str, side: int) -> dict[str, Any]:
    """Median times of a frame: the model alone, a stream with dense heads, and a stream.

    Args:
        side: of the square that changes, in tokens.
    """
    config = Config.fast(TopR(side**2), fallback=False)
    ready, dense = (eventful.convert(model, config) for _ in range(2))
    for part in (dense.neck, dense.head):  # a hook makes a head run as it is
        part.register_forward_hook(lambda *call: None)
    streams = {"stream": Stream(ready), "dense_heads": Stream(dense)}
    calls = {"dense": model, **streams}
    times: dict[str, list[float]] = {name: [] for name in calls}
    shares, apart = [], 0.0
    for t, frame in enumerate(clip(place, side)):
        depth = {}
        for name in in_turn(list(calls), t):
            began = time.perf_counter()
            with torch.no_grad():
                depth[name] = calls[name](frame).predicted_depth
            if t >= FIRST:
                times[name].append((time.perf_counter() - began) * 1e3)
        last = streams["stream"].last
        assert last is not None
        shares.append(last.head_macs / last.dense_head_macs)
        one, other = depth["stream"], depth["dense_heads"]
        apart = max(apart, float((one - other).abs().max() / other.abs().max()))
    return {
        "place": place,
        "tokens": side**2,
        "operations": round(statistics.mean(shares[FIRST:]), 3),
        "difference": apart,
        "state": [streams[name].nbytes for name in ("dense_heads", "stream")],
        **{f"{name}_ms": round(statistics.median(values), 1) for name, values in times.items()},
    }


def clip(place: str, side: int) -> list[Tensor]:
    """Frames of noise that stands still, but for a square that is new in every frame."""
    draw = torch.Generator().manual_seed(3)
    ground = torch.randn(1, 3, SIZE, SIZE, generator=draw) / 2
    start = 0 if place == "a corner" else (SIZE // PATCH - side) // 2 * PATCH
    span = slice(start, start + side * PATCH)
    frames = []
    for _ in range(FRAMES):
        frame = ground.clone()
        frame[..., span, span] = torch.randn(frame[..., span, span].shape, generator=draw)
        frames.append(frame)
    return frames


def table(result: dict[str, Any]) -> str:
    """The rows as a table of the documentation."""
    lines = [
        "| what changes | threads | operations of the heads | dense model | stream, dense heads | "
        "stream | faster than with dense heads |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['tokens']} tokens in {row['place']} | {row['threads']} "
        f"| {row['operations']:.0%} | "
        f"{row['dense_ms']:.0f} ms | {row['dense_heads_ms']:.0f} ms | {row['stream_ms']:.0f} ms | "
        f"{row['dense_heads_ms'] / row['stream_ms']:.2f}x |"
        for row in result["rows"]
    ]
    where, rows = result["origin"], result["rows"]
    without, with_maps = (size / 1e6 for size in rows[0]["state"])
    about = (
        f"*Depth Anything Small, {SIZE} px, random weights, 1,369 tokens; `TopR` of as many tokens "
        f"as change, {result['frames']} frames, medians, each on each frame in turn. "
        f"Results are within {max(row['difference'] for row in rows):.0e} of each "
        f"other. State: {without:.0f} MB with dense heads, {with_maps:.0f} MB with maps. "
        f"{where['device_name']}, fp32, torch {where['torch']}, commit "
        f"{where['commit']}: "
        "[benchmarks/results/dense-heads.json](../benchmarks/results/dense-heads.json).*"
    )
    return "\n".join([*lines, "", about])


if __name__ == "__main__":
    main()
