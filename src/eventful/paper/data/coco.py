"""Videos in COCO-style JSON: `images` with `video_id` and `frame_id`, `annotations`, `categories`.

This is the form known as CocoVID: `videos` (`id`, `name`) is optional, `bbox` is left, top, width,
height. Where images have no `video_id`, video and frame are read off the end of the file name,
`..._<video>_<frame>.JPEG`, as in the copy of VID that goes with the paper; an image whose name
has neither is a video of its own.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from eventful.errors import DataError
from eventful.paper.data.problems import OnProblem, malformed, missing, stop
from eventful.paper.data.records import Box, Video, VideoSet, pieces
from eventful.paper.data.tables import text_of
from eventful.video.source import ImageFiles

T = TypeVar("T")

_NAMED = re.compile(r"_(\d+)_(\d+)$")
_LISTS = ("images", "annotations", "categories")
_LOOKED_FOR = 16  # images, to find out where they lie


@dataclass(frozen=True)
class _Image:
    """One entry of `images`; `title` is what its video is called if no other is called so."""

    number: int
    video: str
    title: str
    frame: int
    file: str


def splits(path: Path) -> tuple[str, ...]:
    """Names of the JSON files in `annotations/`, or in the folder itself; validation first."""
    return tuple(sorted(_files(path), key=lambda name: ("val" not in name, name)))


def parts(path: Path) -> dict[str, bool]:
    """What the format consists of, and whether it is there."""
    return {"annotations/<split>.json": bool(_files(path))}


def open_coco(path: Path, split: str, on_problem: OnProblem = stop) -> VideoSet:
    """The videos of one JSON file.

    A video whose frames have gaps becomes one video per piece (see `pieces`).

    Args:
        path: The folder with `annotations/` and the images, or one JSON file.
        split: Name of the JSON file without its ending.
    """
    files = _files(path)
    if split not in files:
        raise missing(path / "annotations" / f"{split}.json", f"JSON files are {sorted(files)}")
    file = files[split]
    content = _load(file)
    labels, names = _categories(file, content["categories"])
    entries = ("images", content["images"])
    expected = "id, file_name, and video_id with frame_id or neither"
    images = list(_good(file, entries, expected, _images(content), on_problem))
    boxes = _boxes(file, content, labels, {image.number for image in images}, on_problem)
    root = file.parent.parent if file.parent.name == "annotations" else file.parent
    folder = _image_folder(root, split, images)
    videos: list[Video] = []
    groups = _grouped(images)
    called = Counter(members[0].title for members in groups.values())
    for video, members in groups.items():
        try:
            title = members[0].title
            name = title if called[title] == 1 else f"{title} ({video})"
            videos += _pieces_of(file, name, folder, members, boxes)
        except DataError as error:
            on_problem(error)
    return VideoSet("coco", split, "detection", names, tuple(videos))


def _files(path: Path) -> dict[str, Path]:
    if path.is_file():
        return {path.stem: path} if path.suffix == ".json" else {}
    for folder in (path / "annotations", path):
        found = {file.stem: file for file in folder.glob("*.json")}
        if found:
            return found
    return {}


def _load(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(text_of(file, "the annotations"))
    except json.JSONDecodeError as error:
        raise malformed(file, error.lineno, "JSON", error.msg) from None
    except RecursionError:
        raise malformed(file, 1, "COCO-style JSON", "lists nested too deeply") from None
    if not isinstance(content, dict):
        raise malformed(file, 1, "an object", type(content).__name__)
    for name in _LISTS:
        if not isinstance(content.get(name), list):
            raise malformed(file, "top level", f"a list under {name!r}", list(content))
    if not isinstance(content.get("videos", []), list):
        raise malformed(file, "top level", "a list under 'videos', or none", content["videos"])
    return content


def _categories(file: Path, entries: list[Any]) -> tuple[dict[int, int], tuple[str, ...]]:
    """Label of each category id, in order of the ids, and the names."""
    try:
        named = sorted((int(entry["id"]), str(entry["name"])) for entry in entries)
    except (KeyError, TypeError, ValueError):
        raise malformed(file, "categories", "each with an id and a name", entries[:3]) from None
    if len(dict(named)) != len(named):
        raise malformed(file, "categories", "ids that differ", [number for number, _ in named])
    return {number: label for label, (number, _) in enumerate(named)}, tuple(n for _, n in named)


def _good(
    file: Path,
    entries: tuple[str, list[Any]],
    expected: str,
    parse: Callable[[Any], T],
    on_problem: OnProblem,
) -> Iterator[T]:
    """Each entry of a named list, parsed; those that cannot be read go to `on_problem`."""
    name, found = entries
    for position, entry in enumerate(found):
        try:
            yield parse(entry)
        except (KeyError, TypeError, ValueError) as error:
            # A KeyError's text is the name of what is not there.
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            where = f"{name}[{position}] ({what})"
            on_problem(malformed(file, where, f"an entry with {expected}", entry))


def _images(content: dict[str, Any]) -> Callable[[Any], _Image]:
    """A parser of entries of `images` that refuses repeated ids."""
    titles = {str(video["id"]): str(video["name"]) for video in _titled(content)}
    seen: set[int] = set()

    def parse(entry: Any) -> _Image:
        number, file = _new(entry["id"], seen), str(entry["file_name"])
        path = Path(file)
        named = _NAMED.search(path.stem)
        if entry.get("video_id") is not None:
            video = str(entry["video_id"])
            return _Image(number, video, titles.get(video, video), int(entry["frame_id"]), file)
        if (
            named
        ):  # the folder and what comes ahead of the two numbers are part of a video's identity, too
            video = str(path.parent / path.stem[: named.end(1)])
            return _Image(number, video, named[1], int(named[2]), file)
        return _Image(number, file, file, 0, file)

    return parse


def _new(number: Any, seen: set[int]) -> int:
    """An id that was not seen before."""
    if int(number) in seen:
        raise ValueError("an earlier entry has its id")
    seen.add(int(number))
    return int(number)


def _boxes(
    file: Path,
    content: dict[str, Any],
    labels: dict[int, int],
    images: set[int],
    on_problem: OnProblem,
) -> dict[int, list[Box]]:
    seen: set[int] = set()

    def parse(entry: Any) -> tuple[int, Box]:
        if "id" in entry:
            _new(entry["id"], seen)
        left, top, width, height = map(float, entry["bbox"])
        if not all(map(math.isfinite, (left, top, width, height))):
            raise ValueError("numbers that are not finite")
        if width < 0 or height < 0:
            raise ValueError("width or height below 0")
        if int(entry["image_id"]) not in images:
            raise ValueError("no image has its image_id")
        if int(entry["category_id"]) not in labels:
            raise ValueError("no category has its category_id")
        track = entry.get("instance_id", entry.get("track_id"))
        ignore = bool(entry.get("iscrowd", 0)) or bool(entry.get("ignore", 0))
        label = labels[int(entry["category_id"])]
        box = Box(left, top, left + width, top + height, label, track, ignore)
        return int(entry["image_id"]), box

    boxes: dict[int, list[Box]] = {}
    entries = ("annotations", content["annotations"])
    expected = "the image_id and category_id of an image and a category, and bbox [x, y, w, h]"
    for image, box in _good(file, entries, expected, parse, on_problem):
        boxes.setdefault(image, []).append(box)
    return boxes


def _titled(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for video in content.get("videos", []):
        if isinstance(video, dict) and {"id", "name"} <= set(video):
            yield video


def _image_folder(root: Path, split: str, images: list[_Image]) -> Path:
    """The first of the usual places that holds one of a sample; the root where none does."""
    places = [root, root / split, root / "images", root / "Data" / "VID", root / "Data"]
    places += [root / "images" / split, root / "frames"]
    sample = images[:: max(1, len(images) // _LOOKED_FOR)]
    found = (p for p in places if any((p / image.file).is_file() for image in sample))
    return next(found, root)


def _grouped(images: list[_Image]) -> dict[str, list[_Image]]:
    videos: dict[str, list[_Image]] = {}
    for image in images:
        videos.setdefault(image.video, []).append(image)
    return {name: sorted(found, key=lambda image: image.frame) for name, found in videos.items()}


def _pieces_of(
    file: Path, name: str, folder: Path, images: list[_Image], boxes: dict[int, list[Box]]
) -> Iterator[Video]:
    """One video, or one per piece where its frames have gaps."""
    steps = [after.frame - before.frame for before, after in pairwise(images)]
    if 0 in steps:
        first, second = images[steps.index(0)], images[steps.index(0) + 1]
        found = f"{first.file} and {second.file} for frame {first.frame}"
        raise malformed(file, f"images of video {name}", "one image per frame_id", found)
    for title, part in pieces(name, [image.frame for image in images]):
        piece = images[part]
        yield Video(
            title,
            ImageFiles(folder, tuple(image.file for image in piece)),
            tuple(tuple(boxes.get(image.number, ())) for image in piece),
        )
