"""The clip that comes with the package for `eventful demo`: frames as H.264, boxes as JSON.

    python -m benchmarks.demo_clip

renders it again, which takes a minute or two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.progress import track

import eventful
from eventful import files
from eventful.paper.data import Box
from eventful.paper.data.world import Film
from eventful.video.sink import VideoSink
from eventful.video.world import CLASSES, RATE

FOLDER = Path(eventful.__file__).parent / "pipeline" / "clips"
SEED, CAMERA, FRAMES = 105, "stand", 96
CRF = 20  # of H.264: a lower number is a larger file


def main() -> None:
    film = Film(SEED, FRAMES, CAMERA)
    FOLDER.mkdir(exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {"images": [], "annotations": []}
    height, width = film.size
    with VideoSink(FOLDER / "street.mp4", RATE, crf=CRF) as sink:
        for index in track(range(FRAMES)):
            sink.write(film.read([index])[0])
            name = f"street/{index:06d}.jpg"
            found["images"].append(
                {"id": index + 1, "video_id": 1, "frame_id": index, "file_name": name,
                 "height": height, "width": width}
            )  # fmt: skip
            for box in film.boxes_at(index):
                found["annotations"].append(_annotation(box, index + 1, len(found["annotations"])))
    categories = [{"id": label + 1, "name": name} for label, name in enumerate(CLASSES)]
    about = {
        "info": {"description": f"world:{SEED}?camera={CAMERA}"},
        "videos": [{"id": 1, "name": "street"}], "categories": categories, **found,
    }  # fmt: skip
    files.write_json(FOLDER / "street.json", about)


def _annotation(box: Box, image: int, before: int) -> dict[str, Any]:
    size = [box.x2 - box.x1, box.y2 - box.y1]
    return {
        "id": before + 1, "image_id": image, "category_id": box.label + 1,
        "bbox": [box.x1, box.y1, *size], "area": size[0] * size[1], "iscrowd": 0,
        "ignore": int(box.ignore), "track_id": box.track,
    }  # fmt: skip


if __name__ == "__main__":
    main()
