"""What a codec's own knowledge of unchanged blocks could save: shares, times, prototypes.

    python -m benchmarks.codec --out benchmarks/results/codec/cpu.json

takes the four videos and the ViT-S/14 of EVENTFUL_ASSETS (or ../shared/assets), as they are and
encoded again, and writes a row after each. Nothing else should run meanwhile. --table writes the
tables of docs/decisions/0012-unchanged-blocks.md from all that is stored.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import torch

import eventful
from benchmarks.codec import page
from benchmarks.codec.blocks import ENCODINGS, PATCH, describe, encode
from benchmarks.codec.gain import Clip, gain_of
from benchmarks.codec.parts import parts_of
from benchmarks.default import CLIPS, WEIGHTS, assets
from eventful import files
from eventful.bench.results import origin
from eventful.bench.video.footage import fitted_size
from eventful.bench.video.model import load_backbone

MODEL = "vit_small_patch14_dinov2"
ORIGINAL = "as it is"
TIMED = (ORIGINAL, "H.264, crf 28", "H.264, crf 35")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", action="store_true", help="write the page from what is stored")
    parser.add_argument("--sides", type=int, nargs="+", default=[448], help="longer side, pixels")
    parser.add_argument("--frames", type=int, default=64)
    parser.add_argument(
        "--processor",
        action="store_true",
        help="one thread, and its processor time: other processes do not lengthen it",
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timed", nargs="*", default=list(TIMED), help="encodings to time")
    given = parser.parse_args()
    if given.out is not None:
        measure(given)
    if given.table:
        page.write()


def measure(given: argparse.Namespace) -> None:
    """Measure every clip, and write to `out` after each."""
    now = time.perf_counter
    if given.processor:
        torch.set_num_threads(1)
        now = time.process_time
    where = {**origin("cpu"), "av": av.__version__, "clock": now.__name__}
    backbone = load_backbone(MODEL, assets() / WEIGHTS)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for clip, encoding, path in _videos(Path(folder), given.frames):
            for side in given.sides:
                print(f"{clip}, {encoding}, {side}", file=sys.stderr)
                with av.open(str(path)) as video:
                    stream = video.streams.video[0]
                    size = fitted_size((stream.height, stream.width), str(side), (PATCH, PATCH), 0)
                row: dict[str, Any] = {"clip": clip, "encoding": encoding, "size": list(size)}
                row["equal"] = describe(path, size, given.frames)
                if encoding in given.timed:
                    model, _ = backbone.at(size, "x".join(map(str, size)), "cpu", torch.float32)
                    converted = eventful.convert(model)
                    row["parts"] = parts_of(path, converted, size, given.frames, now)
                    row["gain"] = gain_of(
                        Clip(path, size, given.frames), converted, given.rounds, now
                    )
                rows.append(row)
                files.write_json(given.out, {**where, "model": MODEL, "rows": rows}, indent=1)


def _videos(folder: Path, frames: int) -> Iterator[tuple[str, str, Path]]:
    """Every clip as it is, then in every encoding."""
    for clip in CLIPS:
        path = assets() / "videos" / f"{clip}.mp4"
        yield clip, ORIGINAL, path
        for how in ENCODINGS:
            made = folder / "encoded.mp4"
            encode(path, made, how, frames)
            yield clip, how.name, made


if __name__ == "__main__":
    main()
