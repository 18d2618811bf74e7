"""Measure the presets and store the result with the machine and the commit it came from.

A number in the README or the docs is generated from a file written here, never typed in.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.presets import measure
from eventful import files

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
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
    parser.add_argument("--frames", type=int, default=60)
    frames = parser.parse_args().frames

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
    print(f"wrote {target.relative_to(ROOT)} and the table in README.md")


def render(record: dict[str, Any]) -> None:
    """Put the measured table between the README's markers."""
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
        "[benchmarks/results/demo.json](benchmarks/results/demo.json), by `make bench`.*",
        "",
    ]
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(before + BEGIN + "\n".join(lines) + END + after)


if __name__ == "__main__":
    main()
