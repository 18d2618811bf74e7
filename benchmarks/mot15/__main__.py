"""Parse, train, measure, store."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import torch

import benchmarks.mot15
from benchmarks.mot15.clips import load_clips
from benchmarks.mot15.contest import evaluate
from benchmarks.mot15.report import store
from benchmarks.mot15.settings import (
    BACKBONE,
    QUICK,
    Clock,
    Options,
    fingerprint,
    refuse_tracked,
    say,
)
from benchmarks.mot15.training import build_backbone, trained
from eventful.bench.results import origin
from eventful.config import PRESETS
from eventful.surgery import libraries


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=benchmarks.mot15.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="MOT15, with folders train and val")
    parser.add_argument("--weights", type=Path, help=f"safetensors of timm's {BACKBONE}")
    parser.add_argument("--out", type=Path, help="folder for the head and the results")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=8.0, help="stop in good order after these")
    parser.add_argument("--quick", action="store_true", help="a few small frames, no results kept")
    parser.add_argument("--width", type=int, help="pixels, in whole patches")
    parser.add_argument("--steps", type=int, help="of training")
    parser.add_argument("--views", type=int, help="of each training frame")
    parser.add_argument("--train-frames", type=int, help="per sequence; default all")
    parser.add_argument("--val-frames", type=int, help="per sequence, from its start; default all")
    parser.add_argument("--sequence", action="append", help="of val; default all")
    parser.add_argument("--preset", action="append", choices=PRESETS)
    parser.add_argument("--no-publish", action="store_true", help="write to --out alone")
    parser.add_argument("--from", dest="source", type=Path, help="store and draw a results.json")
    return parser.parse_args()


def chosen(arguments: argparse.Namespace) -> Options:
    options = replace(Options(), **QUICK) if arguments.quick else Options()
    given = {
        name: getattr(arguments, name)
        for name in ("width", "steps", "views", "train_frames", "val_frames")
        if getattr(arguments, name) is not None
    }
    if arguments.sequence:
        given["sequences"] = tuple(arguments.sequence)
    if arguments.preset:
        given["presets"] = tuple(arguments.preset)
    return replace(options, **given)


def main() -> None:
    arguments = parse()
    if arguments.source is not None:
        result = json.loads(arguments.source.read_text())
        store(result, arguments.source.parent, publish=True)
        return
    missing = [name for name in ("data", "weights", "out") if getattr(arguments, name) is None]
    if missing:
        raise SystemExit(f"Give --{' --'.join(missing)}, or --from a stored result.")
    refuse_tracked(arguments.out)
    options, clock = chosen(arguments), Clock(arguments.minutes)
    folder = arguments.out / fingerprint(options, arguments.weights, arguments.device)
    if arguments.quick:
        shutil.rmtree(folder, ignore_errors=True)
    backbone = build_backbone(arguments.weights, torch.device(arguments.device))
    head, about = trained(backbone, options, arguments.data, folder, clock)
    clips = load_clips(arguments.data, "val", options)
    say(clock, f"read {sum(len(c.truth) for c in clips)} validation frames")
    device = torch.device(arguments.device)
    where = {**origin(arguments.device), "timm": libraries.load("timm").__version__}
    kept = folder / f"runs-{where['commit']}"  # runs of other commits are not reused
    rows = evaluate(backbone, head, clips, options, device, kept, clock)
    result = {
        "origin": where,
        "data": "MOTChallenge 2015, the part and size of it that was measured: see options",
        "backbone": {"name": BACKBONE, "weights": arguments.weights.name, "frozen": True},
        "options": asdict(options),
        "sequences": [
            {"name": c.name, "frames": len(c.truth), "size": c.size, "tokens": c.tokens}
            for c in clips
        ],
        "training": about,
        "rows": rows,
    }
    store(result, arguments.out, publish=not (arguments.quick or arguments.no_publish))
    say(clock, f"wrote {arguments.out / 'results.json'}")


if __name__ == "__main__":
    main()
