"""A copy of MOT15 at the size mot15.py takes, small enough to carry to another machine.

    python benchmarks/pack_mot15.py MOT15 DIR

Same layout, frames resized to whole patches and written as JPEG, boxes scaled with them. The data
is licensed CC BY-NC-SA 3.0: keep the copy out of the repository, in a folder git ignores.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import mot15
from eventful.adapters import libraries
from eventful.data import Box, Video, open_dataset


@dataclass(frozen=True)
class Packed:
    """What one sequence became."""

    name: str
    frames: int
    size: tuple[int, int]
    nbytes: int


def write_jpeg(path: Path, pixels: Tensor, quality: int) -> int:
    """Write uint8 RGB (3, H, W); returns the bytes of the file."""
    image = libraries.load("PIL.Image").fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    image.save(path, format="JPEG", quality=quality, optimize=True)
    return path.stat().st_size


def row(frame: int, box: Box) -> str:
    """A line of gt.txt; an ignored box has confidence 0."""
    sides = (box.x1, box.y1, box.x2 - box.x1, box.y2 - box.y1)
    track = -1 if box.track is None else box.track
    numbers = ",".join(f"{value:.2f}" for value in sides)
    return f"{frame},{track},{numbers},{0 if box.ignore else 1},-1,-1,-1\n"


def pack_sequence(video: Video, target: Path, width: int, quality: int) -> Packed:
    """Write one sequence under its own frame numbers."""
    (target / "img1").mkdir(parents=True)
    (target / "gt").mkdir()
    nbytes, rows, size = 0, [], (0, 0)
    for index in range(len(video)):
        clip = mot15.load_clip(video, width, [index])
        number = int(Path(video.frames.names[index]).stem)  # type: ignore[attr-defined]
        size = clip.size
        nbytes += write_jpeg(target / "img1" / f"{number:06d}.jpg", clip.frames[0], quality)
        rows += [row(number, box) for box in clip.truth[0]]
    (target / "gt" / "gt.txt").write_text("".join(rows))
    (target / "seqinfo.ini").write_text(
        f"[Sequence]\nname={video.name}\nimDir=img1\nseqLength={len(video)}\n"
        f"imWidth={size[1]}\nimHeight={size[0]}\nimExt=.jpg\n"
    )
    nbytes += (target / "gt" / "gt.txt").stat().st_size
    return Packed(video.name, len(video), size, nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="MOT15, with folders train and val")
    parser.add_argument("target", type=Path, help="a new folder")
    parser.add_argument("--width", type=int, default=mot15.Options.width)
    parser.add_argument("--quality", type=int, default=90, help="of val, where noise matters")
    parser.add_argument("--train-quality", type=int, default=60, help="of train")
    parser.add_argument("--split", action="append", help="default: train and val")
    parser.add_argument("--force", action="store_true", help="replace the folder if it is there")
    arguments = parser.parse_args()
    mot15.refuse_tracked(arguments.target)
    if arguments.target.exists():
        if not arguments.force:
            raise SystemExit(f"{arguments.target} is there already; --force replaces it.")
        shutil.rmtree(arguments.target)
    torch.set_num_threads(1)
    total = 0
    for split in arguments.split or ("train", "val"):
        quality = arguments.train_quality if split == "train" else arguments.quality
        for video in open_dataset(arguments.source, split):
            folder = arguments.target / split / video.name
            packed = pack_sequence(video, folder, arguments.width, quality)
            total += packed.nbytes
            height, width = packed.size
            print(
                f"{split}/{packed.name}: {packed.frames} frames of {width}x{height}, "
                f"{packed.nbytes / 2**20:.1f} MiB"
            )
    print(f"{arguments.target}: {total / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
