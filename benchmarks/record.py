"""Measure the demo and the presets, and store the results with machine and commit.

A number in the README or the docs is generated from a file written here, never typed in.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.presets import measure
from eventful import files
from eventful.pipeline.demo import PICTURE

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README, PRESETS = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
KEPT = (
    *("model", "frames", "updated", "operations", "ms", "dense_ms", "speedup", "error", "estimate"),
    *("flushed", "stale", "accuracy", "memory", "settings", "versions"),
)
MODEL, SIZE = "timm:vit_small_patch16_224", 384
BEGIN, END = "<!-- demo:begin -->\n", "<!-- demo:end -->"


def eventful(*arguments: str) -> Any:
    """Run one `eventful` command in a fresh process and parse the JSON it prints."""
    command = [sys.executable, "-m", "eventful.cli", *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def git(*arguments: str) -> str:
    """Output of one git command in this repository."""
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=60, help="of the presets")
    parser.add_argument("--only", choices=("demo", "presets"), help="default: both")
    given = parser.parse_args()
    if given.only != "presets":
        record_demo()
    if given.only != "demo":
        record_presets(given.frames)


def record_demo() -> None:
    """Store the summary and the picture of `eventful demo`, and put its table into the README."""
    commit = git("rev-parse", "--short", "HEAD")
    with tempfile.TemporaryDirectory() as folder:
        summary = eventful("demo", "--out", folder)
        shutil.copy(Path(folder) / PICTURE, ROOT / "docs" / "images" / "demo.png")
    kept = {key: summary[key] for key in KEPT} | {"commit": commit}
    files.write_json(RESULTS / "demo-detector.json", kept, indent=2)
    scores = summary["accuracy"]["mAP50"]
    versions = summary["versions"]
    lines = [
        "",
        "| | dense | eventful |",
        "|---|--:|--:|",
        f"| mAP50 | {scores['dense']:.3f} | {scores['eventful']:.3f} |",
        f"| operations of the blocks | 100 % | {100 * summary['operations']:.0f} % |",
        f"| ms a frame, from pixels to boxes | {summary['dense_ms']:.0f} | {summary['ms']:.0f} |",
        f"| speed | 1x | {summary['speedup']:.2f}x |",
        f"| memory of the stream | 0 | {summary['memory'] / 1e6:.0f} MB |",
        "",
        f"*{summary['frames']} frames, both models on each in turn, medians; dense is eager with "
        f"fused attention, fp32. {versions['device_name']}, {versions['threads']} threads, torch "
        f"{versions['torch']}, commit {commit}: "
        "[benchmarks/results/demo-detector.json](benchmarks/results/demo-detector.json).*",
        "",
    ]
    put(README, lines, "<!-- detector:begin -->\n", "<!-- detector:end -->")
    print("wrote the results, the picture and the table of the demo")


def record_presets(frames: int) -> None:
    """Store the comparison of presets, and put its table into docs/benchmarks.md."""
    # Read before the result is written, or the result itself would make the tree dirty.
    commit = {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    machine = eventful("doctor")
    # The path of Python is irrelevant to the measurement.
    machine["python"].pop("executable")
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **commit,
        "machine": {key: machine[key] for key in ("python", "platform", "libraries", "devices")},
        "demo": {
            "model": MODEL,
            "size": SIZE,
            "frames": frames,
            "rows": measure(frames, MODEL, SIZE),
        },
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    target = RESULTS / "demo.json"
    files.write_json(target, record, indent=2)
    render(record)
    print(f"wrote {target.relative_to(ROOT)} and the table in {PRESETS.relative_to(ROOT)}")


def render(record: dict[str, Any]) -> None:
    """Put the measured table between the markers of its page."""
    demo = record["demo"]
    cpu = record["machine"]["devices"][0]
    lines = [
        "",
        f"`{demo['model']}` (random weights) at {demo['size']} px on a made-up clip, "
        f"{demo['frames']} frames, medians over steady frames:",
        "",
        "| preset | tokens updated | operations saved | speed-up | feature error |",
        "|---|---|---|---|---|",
    ]
    for row in demo["rows"]:
        lines.append(
            f"| {row['preset']} | {row['tokens_updated']:.0f} of {row['tokens']} "
            f"| {1 / row['operations_ratio']:.1f}x | {row['speedup']:.1f}x "
            f"| {row['feature_error']:.3f} |"
        )
    lines += [
        "",
        f"*{cpu['name']} ({cpu['capability']}), {cpu['threads']} threads, torch "
        f"{record['machine']['libraries']['torch']}, commit {record['commit'][:7]}: "
        "[benchmarks/results/demo.json](../benchmarks/results/demo.json), by `make bench`.*",
        "",
    ]
    put(PRESETS, lines, BEGIN, END)


def put(page: Path, lines: list[str], begin: str, end: str) -> None:
    """Put lines between two marks of a page."""
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(before + begin + "\n".join(lines) + end + after)


if __name__ == "__main__":
    main()
