"""The clip that comes with the package for `eventful demo`: frames as H.264, boxes as JSON.

    python -m benchmarks.demo_clip

renders it again, which takes a minute or two.
"""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

from rich.progress import track

import eventful
from eventful import files
from eventful.paper.data.world import Film
from eventful.video.sink import VideoSink
from eventful.video.world import CLASSES, RATE

FOLDER = Path(eventful.__file__).parent / "pipeline" / "clips"
SEED, CAMERA, FRAMES = 105, "stand", 96
CRF = 20  # of H.264: a lower number is a larger file


def main() -> None:
    film = Film(SEED, FRAMES, CAMERA)
    FOLDER.mkdir(exist_ok=True)
    rows = []
    with VideoSink(FOLDER / "street.mp4", RATE, crf=CRF) as sink:
        for index in track(range(FRAMES)):
            sink.write(film.read([index])[0] / 255)
            rows.append([astuple(box) for box in film.boxes_at(index)])
    about = {"seed": SEED, "camera": CAMERA, "rate": RATE, "classes": CLASSES, "boxes": rows}
    files.write_json(FOLDER / "street.json", about)


if __name__ == "__main__":
    main()
