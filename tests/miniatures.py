"""Miniature copies of the datasets, in their exact layouts, with pixels that tell where they are.

Frame t of a video is uniformly grey at `grey(t)`, save for a white square where a box lies, so a
test can tell from the pixels which frame it was given.
"""

from __future__ import annotations

import csv
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

SIZE = (48, 64)  # height, width
EPIC_COLUMNS = [
    *("narration_id", "participant_id", "video_id", "narration_timestamp"),
    *("start_timestamp", "stop_timestamp", "start_frame", "stop_frame", "narration"),
    *("verb", "verb_class", "noun", "noun_class", "all_nouns", "all_noun_classes"),
]
KINETICS_COLUMNS = ["label", "youtube_id", "time_start", "time_end", "split", "is_cc"]


def grey(t: int) -> int:
    return 20 + 2 * t


def picture(t: int, box: tuple[int, int, int, int] | None = None, size=SIZE) -> np.ndarray:
    pixels = np.full((*size, 3), grey(t), np.uint8)
    if box is not None:
        x1, y1, x2, y2 = box
        pixels[y1:y2, x1:x2] = 255
    return pixels


def write_image(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, format="JPEG", quality=95)


def write_video(path: Path, frames: int, fps: int = 25, size=SIZE) -> None:
    """An H.264 file with B-frames and a key frame every ten."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "1"})
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = 10
        stream.codec_context.max_b_frames = 2
        stream.codec_context.time_base = Fraction(1, fps)
        for t in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(t % 100, size=size), format="rgb24")
            frame.pts = t
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def write_xml(path: Path, boxes: list[tuple[str, tuple[int, int, int, int]]]) -> None:
    objects = "".join(
        f"<object><trackid>{i}</trackid><name>{name}</name><bndbox><xmax>{x2}</xmax>"
        f"<xmin>{x1}</xmin><ymax>{y2}</ymax><ymin>{y1}</ymin></bndbox><occluded>0</occluded>"
        "<generated>0</generated></object>"
        for i, (name, (x1, y1, x2, y2)) in enumerate(boxes)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    size = f"<size><width>{SIZE[1]}</width><height>{SIZE[0]}</height></size>"
    path.write_text(f"<annotation>\n\t<folder>f</folder>{size}\n{objects}\n</annotation>\n")


def square(t: int) -> tuple[int, int, int, int]:
    """Where the object of frame t lies."""
    return 4 + 3 * t, 8, 24 + 3 * t, 28


def imagenet(root: Path, frames: int = 4, videos: int = 2) -> Path:
    """Snippets to validate, one to train, three DET images (a car, a person, both)."""
    top = root / "ILSVRC2015"
    listed = []
    for number in reversed(range(videos)):
        wordnet = ("n02691156", "n02958343")[number % 2]
        snippet = f"ILSVRC2015_val_{number:05d}000"
        _snippet(top, f"VID/val/{snippet}", wordnet, frames)
        listed += [f"{snippet}/{t:06d}" for t in range(frames)]
    lines = "".join(f"{name} {i}\n" for i, name in enumerate(listed, start=1))
    _write(top / "ImageSets/VID/val.txt", lines)
    snippet = "ILSVRC2015_VID_train_0000/ILSVRC2015_train_00000000"
    _snippet(top, f"VID/train/{snippet}", "n02391049", frames)
    for number in range(1, 31):
        lines = f"{snippet} 1\n" if number == 30 else f"{snippet} -1\n"
        _write(top / f"ImageSets/VID/train_{number}.txt", lines)
    for number in range(1, 201):
        cars = "a/car 1\na/person -1\na/both 1\na/partial 0\n"
        _write(top / f"ImageSets/DET/train_{number}.txt", cars if number == 37 else "a/car -1\n")
    shown = {"car": ["n02958343"], "person": ["n00007846"], "both": ["n00007846", "n02958343"]}
    for name, classes in shown.items():
        write_image(top / f"Data/DET/train/a/{name}.JPEG", picture(0, square(0)))
        write_xml(top / f"Annotations/DET/train/a/{name}.xml", [(c, square(0)) for c in classes])
    return root


def coco(root: Path, videos: int = 2, frames: int = 4, *, named: bool = False) -> Path:
    """CocoVID; with `named`, images whose file name alone tells video and frame."""
    images, annotations = [], []
    for v in range(videos):
        for t in range(frames):
            number = 100 * v + t
            file = f"ILSVRC2015_val_{v:08d}_{t:06d}.JPEG" if named else f"v{v}/{t:06d}.JPEG"
            write_image(root / "val" / file, picture(t, square(t)))
            image = {"id": number, "file_name": file, "height": SIZE[0], "width": SIZE[1]}
            images.append(image if named else {**image, "video_id": v, "frame_id": t})
            x1, y1, x2, y2 = square(t)
            box = {"bbox": [x1, y1, x2 - x1, y2 - y1], "category_id": 1 + v, "iscrowd": 0}
            annotations.append({"id": number, "image_id": number, "instance_id": 7, **box})
    content = {
        "images": images[::-1],  # order is no part of the format
        "annotations": annotations,
        "categories": [{"id": 2, "name": "dog"}, {"id": 1, "name": "car"}],
    }
    if not named:
        content["videos"] = [{"id": v, "name": f"clip {v}"} for v in range(videos)]
    _write(root / "annotations/val.json", json.dumps(content))
    return root


def mot(root: Path, frames: int = 4, step: int = 1) -> Path:
    for split, name in (("train", "B-seq"), ("train", "A-seq"), ("val", "C-seq")):
        sequence = root / split / name
        rows = []
        for t in range(frames):
            number = 1 + t * step
            write_image(sequence / f"img1/{number:06d}.jpg", picture(t, square(t)))
            x1, y1, x2, y2 = square(t)
            rows.append(f"{number},1,{x1},{y1},{x2 - x1},{y2 - y1},1,-1,-1,-1")
        rows.append("1,2,0.50,0.25,5.00,6.00,0,-1,-1,-1")
        _write(sequence / "gt/gt.txt", "\n".join(rows) + "\n")
        info = f"name={name}\nimDir=img1\nframeRate=30\nseqLength={frames}\nimExt=.jpg\n"
        _write(sequence / "seqinfo.ini", f"[Sequence]\n{info}")
    return root


def epic(root: Path, *, frames: bool = False) -> Path:
    """One 2 s video at 50 fps with two segments, as a file or as extracted frames."""
    if frames:
        for t in range(100):
            write_image(root / f"P01/rgb_frames/P01_11/frame_{t + 1:010d}.jpg", picture(t))
    else:
        write_video(root / "P01/videos/P01_11.MP4", 100, fps=50)
    table = [
        epic_row("P01_11_0", "00:00:00.20", "00:00:01.20", 10, 60, "take", 0),
        epic_row("P01_11_1", "00:00:01.00", "00:00:02.00", 50, 100, "put, down", 96),
    ]
    for split in ("train", "validation"):
        write_csv(root / f"EPIC_100_{split}.csv", EPIC_COLUMNS, table)
    verbs = [[0, "take", "retrieve", "['take']"], [96, "bend", "manipulate", "['bend']"]]
    header = ["id", "key", "category", "instances"]
    write_csv(root / "EPIC_100_verb_classes.csv", header, verbs)
    return root


def epic_row(name, start, stop, first, last, verb, number) -> list[object]:
    nouns = ["door", 8, "['door']", "[8]"]
    times = [start, start, stop, first, last]
    return [name, "P01", "P01_11", *times, f"{verb} door", verb, number, *nouns]


def kinetics(root: Path) -> Path:
    rows = [
        ["zumba", "aaaaaaaaaaa", 3, 13, "val", 0],
        ["abseiling", "-bbbbbbbb_b", 120, 130, "val", 0],
    ]
    write_csv(root / "val.csv", KINETICS_COLUMNS, rows)
    train = [["yoga", "ccccccccccc", 0, 10, "train", 0]]
    write_csv(root / "train.csv", KINETICS_COLUMNS, train)
    write_video(root / "val/aaaaaaaaaaa_000003_000013.mp4", 50, fps=25)
    write_video(root / "val/-bbbbbbbb_b_000120_000130.mp4", 60, fps=30, size=(64, 48))
    write_video(root / "train/yoga/ccccccccccc_000000_000010.mp4", 5)
    return root


def write_csv(path: Path, header: list[str], rows: list[list[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def _snippet(top: Path, where: str, wordnet: str, frames: int) -> None:
    for t in range(frames):
        write_image(top / "Data" / where / f"{t:06d}.JPEG", picture(t, square(t)))
        write_xml(top / "Annotations" / where / f"{t:06d}.xml", [(wordnet, square(t))])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


MAKE = {  # what makes each layout, by its name
    "imagenet-vid": imagenet,
    "coco": coco,
    "mot": mot,
    "epic-kitchens": epic,
    "kinetics": kinetics,
}


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """ImageNet VID with one picture that does not decode."""
    data = imagenet(tmp_path / "vid", frames=2)
    picture = next(data.rglob("Data/VID/val/ILSVRC2015_val_00001000/000001.JPEG"))
    picture.write_bytes(b"no picture")
    return data


def strict_json(text: str) -> dict:
    """JSON as others read it, who know no NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    return json.loads(text, parse_constant=refuse)
