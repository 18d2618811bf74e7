"""Writes a set of videos to a folder in one of the formats that `open_dataset` reads."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from eventful import files
from eventful.errors import ConfigError
from eventful.paper.data import epic, imagenet, kinetics, mot
from eventful.paper.data.catalog import FORMATS
from eventful.paper.data.records import Box, Frame, Task, Video, VideoSet
from eventful.paper.data.tables import CLASS_LIST
from eventful.surgery.libraries import load
from eventful.video.sink import VideoSink
from eventful.video.world import RATE

Picture = Literal["jpeg", "png"]
Watch = Callable[[int, int], None]  # frames done, and frames in all

_QUALITY = 95  # of JPEG files
_CRF = 12  # of clips
_PERSON = "P01"


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        annotations: boxes, or labelled clips.
    """

    folder: str
    format: str
    split: str
    videos: int
    frames: int
    annotations: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass
class _Job:
    """What a writer of a format is given.

    Attributes:
        named: the videos by names that can be file names.
        fresh: the folder holds nothing yet.
    """

    classes: tuple[str, ...]
    named: dict[str, Video]
    folder: Path
    split: str
    picture: Picture
    watch: Watch
    fresh: bool
    frames: int = 0
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = sum(len(video) for video in self.named.values())

    def pictures(self, video: Video, folder: str, ending: str, first: int = 0) -> Iterator[Frame]:
        """Write each frame as a file by its number, and return it."""
        where = self.folder / folder
        try:
            where.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(
                f"{where} is there already, of an export that was stopped; delete it, or export to "
                "a new folder."
            ) from None
        for frame in video:
            self._write(frame.pixels, where / f"{frame.index + first:06d}{ending}")
            self._done()
            yield frame

    @property
    def ending(self) -> str:
        """Of the names of pictures."""
        return ".png" if self.picture == "png" else ".jpg"

    def clip(self, video: Video, path: Path, fps: float) -> int:
        """Write a video file; the number of its frames."""
        before = self.frames
        with VideoSink(path, fps, _CRF) as sink:
            for pixels in video.frames:
                sink.write(pixels.float() / 255)
                self._done()
        return self.frames - before

    def write(self, name: str, text: str) -> None:
        """A text file, by its path within the folder."""
        files.write_bytes(self.folder / name, text.encode())

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A CSV file."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *rows])

    def list_classes(self, usual: Sequence[str] = (), folder: str = "") -> None:
        """List the labels' names, if they are not the usual ones of the format.

        Another split in the folder has to have the same.
        """
        path = self.folder / folder / CLASS_LIST
        wanted = "" if self.classes == usual else "".join(f"{name}\n" for name in self.classes)
        there = path.read_text("utf-8") if path.is_file() else ""
        if not self.fresh and there != wanted:
            raise ConfigError(
                f"{self.folder} holds a split with other classes; export to another folder."
            )
        if wanted:
            self.write(str(path.relative_to(self.folder)), wanted)

    def _write(self, pixels: Tensor, path: Path) -> None:
        image = load("PIL.Image").fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        jpeg = path.suffix != ".png"
        image.save(path, **({"format": "JPEG", "quality": _QUALITY} if jpeg else {"format": "PNG"}))

    def _done(self) -> None:
        self.frames += 1
        self.watch(self.frames, self.total)


def export(
    videos: VideoSet,
    folder: str | Path,
    format: str,
    split: str | None = None,
    *,
    picture: Picture = "jpeg",
    watch: Watch = lambda done, total: None,
) -> Exported:
    """Write a set to a folder, so that `open_dataset(folder, split)` reads it again.

    What the formats cannot hold:

    - `imagenet-vid`: no flag for boxes to ignore, so those are read back as ordinary ones, and
      are marked `<occluded>1</occluded>`. A training video without boxes is in no list and is
      not read back. Pictures are JPEG.
    - `mot`: the column of the visibility is -1, for unknown.
    - `kinetics` and `epic-kitchens`: videos are compressed with loss (H.264), and odd sides get a
      pixel more. EPIC-Kitchens is read at 30 frames a second and its files are written so: all
      frames are read back, and what moves is a little faster.

    All hold classes other than their own by a file `classes.txt`.

    Args:
        folder: Is made; one that is not empty is refused, unless it holds another split in the
            same format.
        format: imagenet-vid, coco or mot for boxes; kinetics or epic-kitchens for labels.
        split: Name of the split to write; None for the name it has.
        picture: Kind of the picture files, where the format leaves a choice.
        watch: Called with the frames done and the frames in all.
    """
    if format not in WRITERS:
        raise ConfigError(f"no format {format!r} to write: there are {', '.join(WRITERS)}")
    task, allowed, write = WRITERS[format]
    if videos.task != task:
        suitable = [name for name, writer in WRITERS.items() if writer[0] == videos.task]
        raise ConfigError(
            f"{format} is for {task}, and this is a set for {videos.task}: write it as "
            f"{' or '.join(suitable)}."
        )
    if picture not in get_args(Picture) or (picture == "png" and format == "imagenet-vid"):
        kinds = "jpeg" if format == "imagenet-vid" else " or ".join(get_args(Picture))
        raise ConfigError(f"picture is {kinds} for {format}, not {picture!r}.")
    split = _split(format, split or videos.split, allowed)
    folder = Path(folder)
    fresh = _is_fresh(folder, format, split)
    job = _Job(videos.classes, _named(videos.videos), folder, split, picture, watch, fresh)
    annotations = write(job)
    return Exported(str(folder), format, split, len(videos), job.frames, annotations)


def _split(format: str, split: str, allowed: tuple[str, ...]) -> str:
    """The name of a split in a format; EPIC-Kitchens writes `val` out."""
    split = epic.SPLITS[0] if format == "epic-kitchens" and split == "val" else split
    if allowed and split not in allowed:
        raise ConfigError(f"{format} has no split {split!r}; write it as {' or '.join(allowed)}.")
    if not re.fullmatch(r"\w[\w.-]*", split):
        raise ConfigError(
            f"A split is named by letters, digits, '_', and inside also '.' and '-', not {split!r}."
        )
    return split


def _is_fresh(folder: Path, format: str, split: str) -> bool:
    """Whether a folder holds nothing; raises unless it may be written to."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; give a folder.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return True
    known = FORMATS[format]
    if not known.recognises(folder) or split in known.splits(folder):
        raise ConfigError(f"{folder} is not empty; export to a new folder, or empty this one.")
    return False


def _named(videos: Sequence[Video]) -> dict[str, Video]:
    found: dict[str, Video] = {}
    for video in videos:
        name = re.sub(r"[^\w.-]+", "-", video.name).strip(".-") or "video"
        free = (f"{name}-{number}" for number in itertools.count(2))
        found[name if name not in found else next(n for n in free if n not in found)] = video
    return found


def _boxes(frame: Frame, classes: Sequence[str]) -> Iterator[tuple[Box, str]]:
    for box in frame.boxes:
        yield box, classes[box.label]


def _imagenet(job: _Job) -> int:
    """`Data`, `Annotations` and `ImageSets` of VID."""
    known = job.classes == imagenet.NAMES
    names = tuple(imagenet.LABELS) if known else job.classes
    job.list_classes(imagenet.NAMES, "ImageSets/VID")
    count, listed = 0, 0
    lines: list[str] = []
    having: list[list[str]] = [[] for _ in job.classes]
    for name, video in job.named.items():
        where = f"VID/{job.split}/{name}"
        seen: set[int] = set()
        for frame in job.pictures(video, f"Data/{where}", ".JPEG"):
            job.write(f"Annotations/{where}/{frame.index:06d}.xml", _xml(frame, name, names))
            count, listed = count + len(frame.boxes), listed + 1
            seen |= {box.label for box in frame.boxes}
            lines.append(f"{name}/{frame.index:06d} {listed}\n")
        for label in seen:
            having[label].append(f"{name} 1\n")
    if job.split == imagenet.VAL:
        job.write("ImageSets/VID/val.txt", "".join(lines))
    else:
        for number, entries in enumerate(having, start=1):
            job.write(f"ImageSets/VID/train_{number}.txt", "".join(entries))
    return count


def _xml(frame: Frame, video: str, names: Sequence[str]) -> str:
    root = ElementTree.Element("annotation")

    def add(parent: ElementTree.Element, **values: object) -> None:
        for tag, value in values.items():
            ElementTree.SubElement(parent, tag).text = str(value)

    add(root, folder=video, filename=f"{frame.index:06d}")
    add(ElementTree.SubElement(root, "source"), database="eventful")
    _, height, width = frame.pixels.shape
    add(ElementTree.SubElement(root, "size"), width=width, height=height)
    for box, name in _boxes(frame, names):
        node = ElementTree.SubElement(root, "object")
        add(node, trackid="" if box.track is None else box.track, name=name)
        bounds = ElementTree.SubElement(node, "bndbox")
        add(bounds, xmax=_number(box.x2), xmin=_number(box.x1), ymax=_number(box.y2),
            ymin=_number(box.y1))  # fmt: skip
        add(node, occluded=int(box.ignore), generated=0)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _coco(job: _Job) -> int:
    """`annotations/<split>.json` with `video_id` and `frame_id`, and pictures."""
    content: dict[str, list[dict[str, Any]]] = {
        "videos": [],
        "images": [],
        "annotations": [],
        "categories": [{"id": i, "name": name} for i, name in enumerate(job.classes, start=1)],
    }
    for number, (name, video) in enumerate(job.named.items(), start=1):
        content["videos"].append({"id": number, "name": name})
        where = f"{job.split}/{name}"
        for frame in job.pictures(video, where, job.ending):
            image = len(content["images"]) + 1
            _, height, width = frame.pixels.shape
            content["images"].append(
                {
                    "id": image, "file_name": f"{where}/{frame.index:06d}{job.ending}",
                    "height": height, "width": width, "video_id": number,
                    "frame_id": frame.index,
                }
            )  # fmt: skip
            for box in frame.boxes:
                content["annotations"].append(
                    _annotation(box, image, len(content["annotations"]) + 1)
                )
    job.write(f"annotations/{job.split}.json", json.dumps(content))
    return len(content["annotations"])


def _annotation(box: Box, image: int, number: int) -> dict[str, Any]:
    width, height = box.x2 - box.x1, box.y2 - box.y1
    track = {} if box.track is None else {"instance_id": box.track}
    return {
        "id": number, "image_id": image, "category_id": box.label + 1,
        "bbox": [box.x1, box.y1, width, height], "area": width * height, "iscrowd": 0,
        "ignore": int(box.ignore), **track,
    }  # fmt: skip


def _mot(job: _Job) -> int:
    """A folder for each sequence; an ignored box has confidence 0."""
    count = 0
    job.list_classes(("person",))
    for name, video in job.named.items():
        where = f"{job.split}/{name}"
        rows: list[str] = []
        size = (0, 0)
        for frame in job.pictures(video, f"{where}/img1", job.ending, first=1):
            size = (frame.pixels.shape[1], frame.pixels.shape[2])
            rows += [_mot_row(frame.index + 1, box) for box in frame.boxes]
        count += len(rows)
        job.write(f"{where}/{mot.GROUND_TRUTH}", "".join(rows))
        info = {
            "name": name, "imDir": "img1", "frameRate": _number(RATE), "seqLength": len(video),
            "imWidth": size[1], "imHeight": size[0], "imExt": job.ending,
        }  # fmt: skip
        lines = [f"{key}={value}\n" for key, value in info.items()]
        job.write(f"{where}/seqinfo.ini", "[Sequence]\n" + "".join(lines))
    return count


def _mot_row(number: int, box: Box) -> str:
    corner = (box.x1, box.y1, box.x2 - box.x1, box.y2 - box.y1)
    track = -1 if box.track is None else box.track
    values = (number, track, *map(_number, corner), int(not box.ignore), box.label + 1, -1)
    return ",".join(map(str, values)) + "\n"


def _kinetics(job: _Job) -> int:
    """A table and a clip for each video."""
    job.list_classes()
    rows = []
    for name, video in job.named.items():
        seconds = math.ceil(len(video) / kinetics.FPS)
        clip = f"{job.split}/{name}_{0:06d}_{seconds:06d}.mp4"
        job.clip(video, job.folder / clip, kinetics.FPS)
        rows.append((job.classes[_label(video)], name, 0, seconds, job.split))
    job.table(f"{job.split}.csv", (*kinetics.COLUMNS, "split"), rows)
    return len(rows)


def _epic(job: _Job) -> int:
    """A table and a file for each video, all of one participant."""
    job.list_classes()
    rows = []
    first = sum(1 for _ in (job.folder / _PERSON / "videos").glob("*.MP4"))
    for number, (name, video) in enumerate(job.named.items(), start=first + 1):
        title = f"{_PERSON}_{number:03d}"
        count = job.clip(video, job.folder / _PERSON / "videos" / f"{title}.MP4", epic.FPS)
        start, end = _time(0), _time(count / epic.FPS)
        rows.append((name, _PERSON, title, start, end, 1, count, _label(video)))
    job.table(f"EPIC_100_{job.split}.csv", epic.COLUMNS, rows)
    return len(rows)


def _label(video: Video) -> int:
    if video.label is None:
        raise ConfigError(f"{video.name} has no label; leave it out of the set.")
    return video.label


def _time(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes // 60):02d}:{int(minutes % 60):02d}:{rest:06.3f}"


def _number(value: float) -> str:
    """Without a fraction where there is none; else with all digits."""
    return str(int(value)) if value == int(value) else repr(float(value))


Writer = Callable[[_Job], int]
WRITERS: dict[str, tuple[Task, tuple[str, ...], Writer]] = {
    "imagenet-vid": ("detection", (imagenet.VAL, imagenet.TRAIN), _imagenet),
    "coco": ("detection", (), _coco),
    "mot": ("detection", (), _mot),
    "kinetics": ("action", kinetics.SPLITS, _kinetics),
    "epic-kitchens": ("action", epic.SPLITS, _epic),
}
