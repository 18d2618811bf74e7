"""Two versions of eventful on the same frames, in turn: is the new one as fast, and equal?

git worktree add ../before COMMIT
python benchmarks/compare.py ../before/src src --device cpu --out results.json

Each version runs in a process of its own. Frames are timed a few at a time, the two versions in
turn, so that other load on the machine meets both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIDE, SQUARE, FRAMES, DEPTH = 336, 70, 12, 6
CASES = ("fast", "exact", "paper", "block", "default")


class Version:
    """One version of the sources, in a process that answers requests line by line."""

    def __init__(self, sources: Path, device: str) -> None:
        command = [sys.executable, __file__, "--serve", str(sources), "--device", device]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: object) -> Any:
        """The answer to one request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.terminate()


def serve(sources: Path, device: str) -> None:
    """Answer requests with the version of eventful below `sources`."""
    sys.path.insert(0, str(sources))
    warnings.simplefilter("ignore")
    step: Callable[[], float] | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if "case" in request:
            step, seen = build(request["case"], device)
            print(json.dumps(seen), flush=True)
        elif step is not None:
            print(json.dumps([step() for _ in range(request["frames"])]), flush=True)


def build(case: str, device: str) -> tuple[Callable[[], float], dict[str, Any]]:
    """A stream that times its next frame at each call, and what its first frames gave."""
    import torch

    import eventful

    eventful.repair_torchvision()
    import timm

    budget = eventful.TopR(64)
    config = {
        "fast": lambda: eventful.Config.fast(budget, fallback=False),
        "exact": lambda: eventful.Config.exact(budget, fallback=False),
        "paper": lambda: eventful.Config.paper(budget),
        "block": lambda: eventful.Config(gating="block", attention="query", policy=budget),
        "default": eventful.Config.fast,
    }[case]()
    torch.manual_seed(0)
    size = (SIDE, SIDE)
    model = timm.create_model(
        "vit_small_patch14_dinov2", img_size=size, num_classes=0, depth=DEPTH
    ).eval()
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    dtype = next(model.parameters()).dtype
    scene, clip = torch.rand(1, 3, *size), []
    for t in range(FRAMES):
        frame = scene + 0.01 * torch.randn(1, 3, *size)
        frame[..., 12 * t : 12 * t + SQUARE, 20 : 20 + SQUARE] = 0.5
        clip.append(frame.to(device, dtype))
    stream, turn = eventful.Stream(eventful.convert(model, config)), 0
    outputs = [stream(frame) for frame in clip]
    last = stream.last
    seen = {
        "output": outputs[-1].float().flatten().tolist(),
        "macs": last.macs,
        "updated": last.updated,
    }

    def step() -> float:
        nonlocal turn
        turn += 1
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        stream(clip[turn % FRAMES])
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return step, seen


def compare(old: Version, new: Version, case: str, rounds: int) -> dict[str, Any]:
    """One case: the ratio of times, and whether outputs and counts are the same."""
    before, after = old.ask(case=case), new.ask(case=case)
    ratios, times = [], {"old": [], "new": []}
    for turn in range(rounds):
        pair = (("old", old), ("new", new))
        for name, version in pair if turn % 2 else reversed(pair):
            times[name].append(statistics.median(version.ask(frames=4)))
        ratios.append(times["new"][-1] / times["old"][-1])
    largest = max(map(abs, before["output"]))
    apart = max(abs(a - b) for a, b in zip(before["output"], after["output"], strict=True))
    return {
        "case": case,
        "ratio": statistics.median(ratios),
        "old_ms": 1e3 * statistics.median(times["old"]),
        "new_ms": 1e3 * statistics.median(times["new"]),
        "outputs_apart": apart / largest,
        "same_operations": before["macs"] == after["macs"],
        "same_tokens": before["updated"] == after["updated"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", type=Path, nargs="*", help="the old and the new src folder")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.device)
        return
    if len(options.sources) != 2:
        parser.error("name two folders: the old src and the new src")
    old, new = (Version(path.resolve(), options.device) for path in options.sources)
    rows = []
    for case in options.cases:
        rows.append(compare(old, new, case, options.rounds))
        print(json.dumps(rows[-1]), flush=True)
    old.close()
    new.close()
    if options.out is not None:
        sys.path.insert(0, str(options.sources[1].resolve()))
        from eventful.bench.results import origin

        options.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"origin": origin(options.device), "rows": rows}
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
