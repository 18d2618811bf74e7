"""EPIC-Kitchens-100: `EPIC_100_{train,validation}.csv` beside videos or folders of frames."""

from __future__ import annotations

from pathlib import Path

from eventful.errors import DataError
from eventful.paper.data.problems import OnProblem, missing, stop
from eventful.paper.data.records import Video, VideoSet
from eventful.paper.data.tables import Row, class_list, class_names, rows
from eventful.video.source import FrameSource, ImageFiles, VideoFile

SPLITS = ("validation", "train")
VERBS = 97
FPS = 30.0  # the published weights were trained on video at this rate
COLUMNS = (
    "narration_id",
    "participant_id",
    "video_id",
    "start_timestamp",
    "stop_timestamp",
    "start_frame",
    "stop_frame",
    "verb_class",
)
VERB_TABLE = "EPIC_100_verb_classes.csv"


def splits(path: Path) -> tuple[str, ...]:
    """Splits whose table is there."""
    return tuple(split for split in SPLITS if _table(path, split).is_file())


def parts(path: Path) -> dict[str, bool]:
    """What the format consists of, and whether it is there."""
    names = [_table(path, split).name for split in SPLITS]
    found = {name: (_annotations(path) / name).is_file() for name in [*names, VERB_TABLE]}
    return {**found, "<participant>/...": any(p.is_dir() for p in path.glob("P[0-9]*"))}


def open_epic(
    path: Path,
    split: str = "validation",
    on_problem: OnProblem = stop,
    *,
    fps: float = FPS,
) -> VideoSet:
    """The action segments of a split, labelled with their verb.

    A file `classes.txt` beside the tables replaces the 97 verbs by other names, one a line.

    Args:
        path: The folder of the tables (or of `annotations/` with them) and of the videos.
        fps: Rate the segments are resampled to.
    """
    verbs = _verbs(path, on_problem)
    videos: dict[str, Video] = {}
    for row in rows(_table(path, split), COLUMNS, on_problem):
        try:
            name, label = row.text("narration_id"), row.number("verb_class", 0, len(verbs) - 1)
            if name in videos:
                raise row.refuse("narration_id", "one that no earlier row has")
            videos[name] = Video(name, _frames(path, row, fps), label=label)
        except DataError as error:
            on_problem(error)
    return VideoSet("epic-kitchens", split, "action", verbs, tuple(videos.values()))


def _frames(root: Path, row: Row, fps: float) -> FrameSource:
    person, name = row.text("participant_id"), row.text("video_id")
    start, stop_ = row.seconds("start_timestamp"), row.seconds("stop_timestamp")
    if stop_ <= start:
        raise row.refuse("stop_timestamp", "a time after start_timestamp")
    folders = [root / person / "videos", root / person, root / "videos" / person, root / "videos"]
    for path in (folder / f"{name}{ending}" for folder in folders for ending in (".MP4", ".mp4")):
        if path.is_file():
            return VideoFile(path, start, stop_, fps)
    for folder in (root / person / "rgb_frames" / name, root / person / name):
        if folder.is_dir():
            return _images(folder, row, stop_, fps)
    raise missing(
        root / person / "videos" / f"{name}.MP4",
        f"named in {row.path}, line {row.line} (nor is {person}/{name}.MP4, videos/{name}.MP4 or "
        f"{person}/rgb_frames/{name}/)",
    )


def _images(folder: Path, row: Row, stop_: float, fps: float) -> ImageFiles:
    """The extracted frames nearest in time; their own rate follows from the row."""
    first, last = row.number("start_frame", 1), row.number("stop_frame", 1)
    if last <= first:
        raise row.refuse("stop_frame", "a frame after start_frame")
    rate = last / stop_
    count = max(1, round((last - first) / rate * fps))
    numbers = (min(first + int(i * rate / fps + 0.5), last) for i in range(count))
    return ImageFiles(folder, tuple(f"frame_{number:010d}.jpg" for number in numbers))


def _verbs(root: Path, on_problem: OnProblem) -> tuple[str, ...]:
    """Names of the verbs from the class table, or their numbers where it is not there."""
    listing = class_list(_annotations(root))
    if listing is not None:
        return class_names(listing)
    names = [f"verb {number}" for number in range(VERBS)]
    table = _annotations(root) / VERB_TABLE
    if table.is_file():
        for row in rows(table, ("id", "key"), on_problem):
            try:
                names[row.number("id", 0, VERBS - 1)] = row.text("key")
            except DataError as error:
                on_problem(error)
    return tuple(names)


def _annotations(root: Path) -> Path:
    inner = root / "annotations"
    return inner if any(inner.glob("EPIC_100_*.csv")) else root


def _table(root: Path, split: str) -> Path:
    return _annotations(root) / f"EPIC_100_{split}.csv"
