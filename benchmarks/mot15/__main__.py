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
from benchmarks.mot15.predictions import Detector, Kept, gather, read_manifest, write_manifest
from benchmarks.mot15.report import store
from benchmarks.mot15.scores import can_score, rows_of
from benchmarks.mot15.settings import (
    BACKBONE,
    QUICK,
    VARIANTS,
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
    parser.add_argument("--preset", action="append", choices=(*PRESETS, "none"))
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="of fast, too")
    parser.add_argument("--share", action="append", type=float, help="of the tokens; default four")
    parser.add_argument("--no-carried", action="store_true", help="skip frames plainly alone")
    parser.add_argument("--head", type=Path, help="a head.pt of an earlier run, not to train one")
    parser.add_argument("--train-only", action="store_true", help="train the head and stop")
    parser.add_argument("--predict-only", action="store_true", help="detect, and score elsewhere")
    parser.add_argument(
        *("--score", "--score-only"), dest="score", metavar="DIR", type=Path,
        help="score what --predict-only left in this folder",
    )  # fmt: skip
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
        given["presets"] = tuple(name for name in arguments.preset if name != "none")
    if arguments.variant:
        given["variants"] = tuple(arguments.variant)
    if arguments.share:
        given["shares"] = tuple(sorted(arguments.share))
    given["carried"] = not arguments.no_carried
    return replace(options, **given)


def main() -> None:
    arguments = parse()
    if arguments.source is not None:
        result = json.loads(arguments.source.read_text())
        store(result, arguments.source.parent, publish=True)
    elif arguments.score is not None:
        finish(arguments.score, Clock(arguments.minutes), publish=not arguments.no_publish)
    else:
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Train where needed, detect, and score unless that is for later."""
    missing = [name for name in ("data", "weights", "out") if getattr(arguments, name) is None]
    if missing:
        raise SystemExit(f"Give --{' --'.join(missing)}, --score DIR, or --from a stored result.")
    if arguments.head is not None and not arguments.head.is_file():
        raise SystemExit(f"{arguments.head} is not there; --train-only makes a head.")
    later = arguments.predict_only or arguments.train_only
    if not later and not can_score():
        raise SystemExit(
            "faster-coco-eval is not installed, and scores need it: install it, or detect here "
            "with --predict-only and score elsewhere with --score DIR."
        )
    refuse_tracked(arguments.out)
    options, clock = chosen(arguments), Clock(arguments.minutes)
    digest = fingerprint(options, arguments.weights, arguments.device, arguments.head)
    folder = arguments.out / digest
    if arguments.quick:
        shutil.rmtree(folder, ignore_errors=True)
    device = torch.device(arguments.device)
    backbone = build_backbone(arguments.weights, device)
    head, about = trained(backbone, options, arguments.data, folder, clock, arguments.head)
    if arguments.train_only:
        say(clock, f"the head is {arguments.head or folder / 'head.pt'}")
        return
    clips = load_clips(arguments.data, "val", options)
    say(clock, f"read {sum(len(c.truth) for c in clips)} validation frames")
    where = {**origin(arguments.device), "timm": libraries.load("timm").__version__}
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
    }
    runs = f"runs-{where['commit']}"  # runs of other commits are not reused
    gather(clips, options, Kept(folder / runs, clock, Detector(backbone, head, device)))
    manifest = write_manifest(folder, result, clips, options, runs)
    if arguments.predict_only:
        say(clock, f"wrote {manifest}; score it with --score {arguments.out}")
        return
    finish(arguments.out, clock, publish=not (arguments.quick or arguments.no_publish))


def finish(out: Path, clock: Clock, *, publish: bool) -> None:
    """Score the predictions of a folder and store the result in it."""
    if not can_score():
        raise SystemExit("faster-coco-eval is not installed, and scores need it.")
    about, clips, options, runs = read_manifest(out)
    made = gather(clips, options, Kept(runs, clock))
    store({**about, "rows": rows_of(made, clips, clock)}, out, publish=publish)
    say(clock, f"wrote {out / 'results.json'}")


if __name__ == "__main__":
    main()
