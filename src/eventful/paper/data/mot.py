"""MOTChallenge folders: `<split>/<sequence>/{seqinfo.ini, img1/, gt/gt.txt}`."""

from __future__ import annotations

import configparser
import math
from dataclasses import dataclass
from pathlib import Path

from eventful.errors import DataError
from eventful.paper.data.problems import OnProblem, malformed, missing, stop
from eventful.paper.data.records import Box, Video, VideoSet
from eventful.paper.data.tables import class_list, class_names, lines, text_of
from eventful.video.source import ImageFiles

ALL = "all"  # the split of a folder that holds sequences itself
GROUND_TRUTH = "gt/gt.txt"
PEDESTRIAN = 1
# MOT16 and later: categories of people that the benchmark ignores.
UNCLEAR = {2: "person on vehicle", 7: "static person", 8: "distractor", 12: "reflection"}


@dataclass(frozen=True)
class SequenceInfo:
    """The content of `seqinfo.ini`."""

    folder: str
    extension: str
    length: int
    rate: float | None = None  # frames per second; None if not stated


def splits(path: Path) -> tuple[str, ...]:
    """Folders that hold sequences, `val` first and then `train`, or this one itself.

    A folder in which no sequence has boxes (the benchmark's `test`) counts only if all are so.
    """
    if _sequences(path):
        return (ALL,)
    if not path.is_dir():
        return ()
    found = {p.name: _sequences(p) for p in path.iterdir() if p.is_dir()}
    found = {name: sequences for name, sequences in found.items() if sequences}
    marked = [name for name, own in found.items() if any((s / GROUND_TRUTH).is_file() for s in own)]
    return tuple(sorted(marked or found, key=lambda n: (n != "val", n != "train", n)))


def parts(path: Path) -> dict[str, bool]:
    """What the format consists of, and whether it is there."""
    found = splits(path)
    if found == (ALL,):
        return {"<sequence>/seqinfo.ini": True}
    return {f"{name}/<sequence>/seqinfo.ini": name in found for name in ("train", "val")}


def open_mot(path: Path, split: str = "train", on_problem: OnProblem = stop) -> VideoSet:
    """The sequences of one split, people with one class.

    A file `classes.txt` in the folder names other classes, one a line: category 1 of the rows is
    the first of them, and no category is ignored. A row whose confidence is 0 becomes an ignored
    box. Coordinates are taken as written.

    Args:
        split: A folder of sequences, or `"all"` where `path` is one.
    """
    folder = path if split == ALL else path / split
    sequences = _sequences(folder)
    if not sequences:
        raise missing(folder, "a folder of MOTChallenge sequences, each with a seqinfo.ini")
    listing = class_list(path)
    classes = class_names(listing) if listing is not None else None
    videos = []
    for sequence in sequences:
        try:
            videos.append(_video(sequence, on_problem, classes))
        except DataError as error:
            on_problem(error)
    return VideoSet("mot", split, "detection", classes or ("person",), tuple(videos))


def open_sequence(path: Path, on_problem: OnProblem = stop) -> Video:
    """One sequence, given the folder with its `seqinfo.ini`."""
    return _video(path, on_problem)


def _sequences(folder: Path) -> list[Path]:
    return sorted(p.parent for p in folder.glob("*/seqinfo.ini"))


def _video(sequence: Path, on_problem: OnProblem, classes: tuple[str, ...] | None = None) -> Video:
    info = sequence_info(sequence / "seqinfo.ini")
    folder = sequence / info.folder
    images = {int(p.stem): p.name for p in folder.glob(f"*{info.extension}") if p.stem.isdigit()}
    if not images:
        raise missing(folder, f"frames NNNNNN{info.extension} of sequence {sequence.name}")
    if len(images) != info.length:
        expected = f"seqLength to be the number of frames in {folder}, {len(images)}"
        on_problem(malformed(sequence / "seqinfo.ini", "[Sequence]", expected, info.length))
    boxes = _truth(sequence / GROUND_TRUTH, set(images), on_problem, classes)
    numbers = sorted(images)
    return Video(
        sequence.name,
        ImageFiles(folder, tuple(images[number] for number in numbers)),
        tuple(tuple(boxes.get(number, ())) for number in numbers),
    )


def sequence_info(path: Path) -> SequenceInfo:
    """Read a `seqinfo.ini`."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text_of(path, "what a sequence consists of"), str(path))
    except configparser.Error as error:
        expected = "an ini file with a section [Sequence]"
        raise malformed(path, getattr(error, "lineno", 1) or 1, expected, str(error)) from None
    if "Sequence" not in parser:
        raise malformed(path, 1, "a section [Sequence]", parser.sections())
    section = parser["Sequence"]
    length = section.get("seqLength", "")
    if not length.isdigit():
        raise malformed(path, "[Sequence]", "a number of frames in seqLength", length)
    rate = section.get("frameRate", "")
    return SequenceInfo(
        section.get("imDir", "img1"),
        section.get("imExt", ".jpg"),
        int(length),
        float(rate) if rate.replace(".", "", 1).isdigit() and float(rate) > 0 else None,
    )


def _truth(
    path: Path, frames: set[int], on_problem: OnProblem, classes: tuple[str, ...] | None
) -> dict[int, list[Box]]:
    boxes: dict[int, list[Box]] = {}
    first: dict[tuple[int, int], int] = {}  # line of each object in each frame
    for number, line in lines(path, "the boxes of a sequence"):
        try:
            frame, box = _row(path, number, line, classes)
        except DataError as error:
            on_problem(error)
            continue
        if frame not in frames:
            on_problem(malformed(path, number, "a frame number that img1 has", frame))
        elif box is not None:
            own = -number if box.track is None else box.track
            before = first.setdefault((frame, own), number)
            if before == number:
                boxes.setdefault(frame, []).append(box)
            else:
                expected = f"an id once in a frame (line {before} has it)"
                on_problem(malformed(path, number, expected, line))
    return boxes


def _row(
    path: Path, number: int, line: str, classes: tuple[str, ...] | None = None
) -> tuple[int, Box | None]:
    """One row: frame, id, left, top, width, height, confidence, then either form of the rest.

    MOT15 goes on with x, y, z in the world (ten values); MOT16 and later with class and visibility
    (nine).
    """
    fields = line.split(",")
    if len(fields) not in {9, 10}:
        expected = "frame,id,left,top,width,height,confidence and 2 or 3 values more"
        raise malformed(path, number, expected, line)
    try:
        frame, track = int(fields[0]), int(float(fields[1]))
        left, top, width, height, confidence = map(float, fields[2:7])
        category = int(fields[7]) if len(fields) == 9 else PEDESTRIAN
    except (ValueError, OverflowError):
        raise malformed(path, number, "numbers, frame and id whole", line) from None
    if not all(map(math.isfinite, (left, top, width, height, confidence))):
        raise malformed(path, number, "finite numbers", line)
    if width <= 0 or height <= 0:
        raise malformed(path, number, "a width and height above 0", line)
    known = track if track >= 0 else None  # -1 stands for no id
    right, bottom, ignore = left + width, top + height, confidence == 0
    if classes is not None:
        if not 1 <= category <= len(classes):
            raise malformed(path, number, f"a category from 1 to {len(classes)}", category)
        return frame, Box(left, top, right, bottom, category - 1, known, ignore)
    if category != PEDESTRIAN and category not in UNCLEAR:
        return frame, None
    return frame, Box(left, top, right, bottom, 0, known, ignore or category in UNCLEAR)
