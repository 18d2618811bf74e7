"""Measure the demo and store the result with the machine and the commit it came from.

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

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


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
    # Where Python sits on this machine says nothing about the measurement.
    machine["python"].pop("executable")
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **commit,
        "machine": {key: machine[key] for key in ("python", "platform", "libraries", "devices")},
        "demo": eventful("demo", "--frames", str(frames)),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    target = RESULTS / "demo.json"
    target.write_text(json.dumps(record, indent=2) + "\n")
    print(f"wrote {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
