"""Time families of models at one size each, dense and with the default, in turn in one process.

`python -m benchmarks.families` stores the ratios; `--table` writes the table of docs/models.md from
what is stored. Weights are random and the clip is made up: time depends on shapes and on how
much changes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch

import eventful
from benchmarks.record import git
from eventful import files
from eventful.modelspec.opening import open_named
from eventful.video.synthetic import moving_objects

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "benchmarks" / "results" / "families.json"
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families:begin -->\n", "<!-- families:end -->"
FRAMES, FIRST = 8, 2  # timed ones, and those ahead of them

NAMES = (
    "timm:vit_small_patch16_384",
    "timm:vit_base_patch16_clip_384",
    "timm:eva02_small_patch14_336.mim_in22k_ft_in1k",
    "timm:beit_base_patch16_384",
    "timm:vit_relpos_base_patch16_224",
    "timm:naflexvit_base_patch16_gap",
    "timm:samvit_base_patch16_224",
    "torchvision:vit_b_16",
    "hf:Dinov2Model",
    "hf:DINOv3ViTModel",
    "hf:SiglipVisionModel",
    "hf:Owlv2VisionModel",
    "hf:YolosForObjectDetection",
    "hf:RfDetrForObjectDetection",
    "hf:LwDetrForObjectDetection",
    "hf:DepthAnythingForDepthEstimation",
    "hf:DPTForDepthEstimation",
    "hf:VitPoseForPoseEstimation",
    "hf:SamVisionModel",
)


@torch.no_grad()
def timed(name: str) -> dict[str, Any]:
    """Milliseconds of a frame, dense and with the default, and the share of tokens updated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = open_named(name).model.eval()
        report = eventful.inspect(model)
    assert report.size is not None
    tokens = sum(report.tokens.values())
    stream = eventful.Stream(eventful.convert(model))
    clip = [(frame - 0.45) / 0.225 for frame in moving_objects(FIRST + FRAMES, report.size)]
    dense, eventful_ms, shares = [], [], []
    for number, frame in enumerate(clip):
        start = time.perf_counter()
        model(frame)
        middle = time.perf_counter()
        stream(frame)
        end = time.perf_counter()
        assert stream.last is not None
        if number >= FIRST:
            dense.append(1e3 * (middle - start))
            eventful_ms.append(1e3 * (end - middle))
            shares.append(float(sum(stream.last.updated.values())) / tokens)
    adapters = sorted({block.adapter for block in report.blocks if block.matched})
    return {
        "model": name,
        "adapter": ", ".join(adapters),
        "size": list(report.size),
        "tokens": tokens,
        "blocks": [report.matched, len(report.blocks)],
        "state": {preset: report.state_bytes[preset] for preset in ("fast", "exact", "paper")},
        "dense_ms": median(dense),
        "ms": median(eventful_ms),
        "share": median(shares),
    }


def measure() -> None:
    """Time every family, and store what was found after each."""
    about = {
        "what": "default settings beside the eager dense model (SDPA), median of 8 frames",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": git("rev-parse", "--short", "HEAD"),
        "cpus": os.cpu_count(),
    }
    rows: list[dict[str, Any]] = []
    for name in NAMES:
        try:
            row = timed(name)
        except Exception as error:  # one family must not stop the others
            print(name, "failed:", type(error).__name__, str(error)[:200], flush=True)
            continue
        rows.append(row)
        print(name, f"{row['dense_ms'] / row['ms']:.2f}x at {row['share']:.0%}", flush=True)
        files.write_json(STORED, {**about, "rows": rows})


def table() -> str:
    """The stored rows as a table."""
    head = [
        "| model | frame | tokens | blocks | adapter | state: fast, exact, paper | tokens updated "
        "| against dense |",
        "|---|---|--:|--:|---|---|--:|--:|",
    ]
    stored = json.loads(STORED.read_text())
    for row in stored["rows"]:
        state = ", ".join(f"{count / 1e6:,.0f}" for count in row["state"].values())
        head.append(
            f"| `{row['model']}` | {row['size'][0]} x {row['size'][1]} | {row['tokens']:,} "
            f"| {row['blocks'][0]} of {row['blocks'][1]} | {row['adapter']} | {state} MB "
            f"| {row['share']:.0%} | {row['dense_ms'] / row['ms']:.1f}x |"
        )
    head += ["", f"*{stored['threads']} threads, torch {stored['torch']}, {stored['commit']}*"]
    return "\n".join(head) + "\n"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="write the table alone")
    if not parser.parse_args().table:
        measure()
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main()
