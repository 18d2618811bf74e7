"""Kinetics-400: `<split>.csv` and clips named `<youtube id>_<start>_<end>.mp4`."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from eventful.errors import DataError
from eventful.paper.data.problems import OnProblem, malformed, missing, stop
from eventful.paper.data.records import Video, VideoSet
from eventful.paper.data.tables import Row, header_of, lines, rows
from eventful.video.source import VideoFile

SPLITS = ("val", "train", "test")
CLASS_LIST = "classes.txt"
FPS = 25.0  # the published weights were trained on video at this rate
COLUMNS = ("label", "youtube_id", "time_start", "time_end")


def splits(path: Path) -> tuple[str, ...]:
    """Splits whose table is there; a table without labels, as of a test split, does not count."""
    there = (split for split in SPLITS if _table(path, split).is_file())
    return tuple(s for s in there if s != "test" or "label" in header_of(_table(path, s)))


def recognises(path: Path) -> bool:
    """Whether one of the tables has the columns of Kinetics."""
    return any(set(COLUMNS) <= set(header_of(_table(path, split))) for split in splits(path))


def parts(path: Path) -> dict[str, bool]:
    """What the format consists of, and whether it is there."""
    found = splits(path)
    return {f"{split}.csv": split in found for split in ("val", "train")}


def open_kinetics(
    path: Path, split: str = "val", on_problem: OnProblem = stop, *, fps: float = FPS
) -> VideoSet:
    """The clips of a split.

    Labels have the numbers of the published weights: the place of their name among the 400 in
    alphabetical order, whichever of them the tables name. A file `classes.txt` beside the tables
    replaces these names, one a line, in the order of the weights that are used. A label that is
    not in the list is refused; nothing is numbered by what happens to occur.

    Args:
        path: The folder of the tables (or of `annotations/` with them) and of the clips, which lie
            in it, in `<split>/`, `videos/` or `<split>/<label>/`.
        fps: Rate the clips are resampled to.
    """
    table = _table(path, split)
    listed = list(rows(table, COLUMNS, on_problem))
    classes, listing = _classes(path), _class_list(path)
    numbers = {name: number for number, name in enumerate(classes)}
    where = listing or f"Kinetics-400 (list other classes in {path / CLASS_LIST})"
    videos: dict[str, Video] = {}
    for row in listed:
        try:
            if _label(row) not in numbers:
                raise row.refuse("label", f"one of the {len(classes)} names in {where}")
            clip, label = _clip(path, split, row), numbers[_label(row)]
            if clip.stem in videos:
                raise row.refuse("youtube_id", "a clip that no earlier row names")
            videos[clip.stem] = Video(clip.stem, VideoFile(clip, fps=fps), label=label)
        except DataError as error:
            on_problem(error)
    return VideoSet("kinetics", split, "action", classes, tuple(videos.values()))


def _clip(root: Path, split: str, row: Row) -> Path:
    start, end = row.number("time_start", 0), row.number("time_end", 1)
    if end <= start:
        raise row.refuse("time_end", "a second after time_start")
    name = f"{row.text('youtube_id')}_{start:06d}_{end:06d}.mp4"
    label = _label(row)
    folders = [root / split, root / split / label, root / "videos", root / split / "videos", root]
    for folder in [*folders, root / split / label.replace(" ", "_")]:
        if (folder / name).is_file():
            return folder / name
    raise missing(root / split / name, f"named in {row.path}, line {row.line}")


def _classes(root: Path) -> tuple[str, ...]:
    """Names of the labels, in the order of their numbers."""
    path = _class_list(root)
    if path is None:
        text = (resources.files("eventful.paper.data") / "kinetics400.txt").read_text("utf-8")
        return tuple(text.splitlines())
    names: dict[str, int] = {}
    for line, name in lines(path, "the names of the labels"):
        before = names.setdefault(name, line)
        if before != line:
            raise malformed(path, line, f"each name once (line {before} has it)", name)
    return tuple(names)


def _class_list(root: Path) -> Path | None:
    """The file that names other labels than those of Kinetics-400, if there is one."""
    found = (folder / CLASS_LIST for folder in (root / "annotations", root))
    return next((path for path in found if path.is_file()), None)


def _label(row: Row) -> str:
    return row.text("label")


def _table(root: Path, split: str) -> Path:
    inner = root / "annotations" / f"{split}.csv"
    return inner if inner.is_file() else root / f"{split}.csv"
