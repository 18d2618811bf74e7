"""Checks a dataset on disk: what is there, what is missing or malformed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from eventful.errors import ConfigError, DamagedMediaError, DataError, MissingFileError
from eventful.paper.data import world
from eventful.paper.data.catalog import FORMATS, DatasetFormat, no_split, recognise
from eventful.paper.data.problems import Problems, missing
from eventful.paper.data.records import Task, Video, VideoSet
from eventful.video.source import ImageFiles

Verdict = Literal["complete", "partial", "unusable"]
Watcher = Callable[[str, int, int], None]

PROBED = 32  # default number of videos of which two frames are decoded


@dataclass(frozen=True)
class SplitReport:
    """One split.

    Args:
        frames: Images that are listed; None where the videos are files, whose frames only decoding
            would count.
        annotations: Boxes, or labelled clips.
        labels: How many of the classes occur.
        probed: Videos of which the first and last frame were decoded.
    """

    split: str
    videos: int
    frames: int | None
    annotations: int
    labels: int
    classes: int
    probed: int
    missing: tuple[str, ...]
    malformed: tuple[str, ...]
    damaged: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """Unusable without videos or with malformed rows; partial where files would be skipped."""
        if not self.videos or self.malformed:
            return "unusable"
        return "partial" if self.missing or self.damaged else "complete"


@dataclass(frozen=True)
class Report:
    """A whole folder.

    Args:
        format: None where it was not recognised.
        parts: Files and folders of the format, and whether they are there.
    """

    path: str
    format: str | None
    task: Task | None
    parts: dict[str, bool]
    splits: tuple[SplitReport, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of its splits'; unusable without any."""
        verdicts = {split.verdict for split in self.splits}
        if not verdicts or "unusable" in verdicts:
            return "unusable"
        return "partial" if "partial" in verdicts else "complete"

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with the verdicts."""
        splits = [{**asdict(split), "verdict": split.verdict} for split in self.splits]
        known = {name: known.form for name, known in FORMATS.items()}
        extra = {} if self.format else {"known_layouts": known}
        return {
            "path": self.path,
            "layout": self.format,  # the name the output has always had
            "task": self.task,
            "parts": self.parts,
            "splits": splits,
            "verdict": self.verdict,
            **extra,
        }


def check(
    path: str | Path,
    split: str | None = None,
    probe: int = PROBED,
    watch: Watcher = lambda split, done, videos: None,
) -> Report:
    """Read every annotation, look for every file, decode a sample.

    Args:
        split: Check this one alone.
        probe: Videos per split to decode the first and last frame of, evenly spread; -1 for all.
        watch: Called with the split, its videos done and its number of videos.
    """
    path = Path(path)
    if world.recognises(path):
        world.splits(path)  # raises where the name is wrong
        raise ConfigError(
            f"{path} is generated: no file of it can be missing or damaged, so there is nothing to "
            f"check. `eventful data export {path} FOLDER --format mot` writes a folder that can be."
        )
    if not path.exists():
        raise missing(path, "the folder to check")
    found = recognise(path)
    if found is None:
        return Report(str(path), None, None, {}, ())
    names = found.splits(path)
    if split is not None and split not in names:
        raise no_split(path, split, found, names)
    reports = tuple(
        _split(found, path, name, probe, watch)
        for name in ([split] if split is not None else names)
    )
    return Report(str(path), found.name, found.task, found.parts(path), reports)


def _split(found: DatasetFormat, path: Path, split: str, probe: int, watch: Watcher) -> SplitReport:
    problems = Problems()
    try:
        videos = found.open(path, split, problems)
    except DataError as error:
        problems(error)
        videos = VideoSet(found.name, split, found.task, (), ())
    labels: list[int] = []
    probed = _sample(len(videos), probe)
    for index, video in enumerate(videos):
        labels += _labels(video, problems)
        _find_files(video, problems)
        if index in probed:
            _decode(video, problems)
        watch(split, index + 1, len(videos))
    listed = [len(v) for v in videos if isinstance(v.frames, ImageFiles)]
    return SplitReport(
        split=split,
        videos=len(videos),
        frames=sum(listed) if len(listed) == len(videos) else None,
        annotations=len(labels),
        labels=len(set(labels)),
        classes=len(videos.classes),
        probed=len(probed),
        missing=tuple(dict.fromkeys(problems.missing)),
        malformed=tuple(problems.malformed),
        damaged=tuple(problems.damaged),
    )


def _labels(video: Video, problems: Problems) -> Iterator[int]:
    """The label of the clip, or of every box; reading them is what finds malformed files."""
    if video.label is not None:
        yield video.label
    for index in range(len(video.boxes or ())):
        try:
            yield from [box.label for box in (video.boxes or ())[index]]
        except DataError as error:
            problems(error)


def _find_files(video: Video, problems: Problems) -> None:
    """Report missing image files."""
    if isinstance(video.frames, ImageFiles):
        for path in video.frames.missing():
            problems(missing(path, f"a frame of {video.name}"))


def _decode(video: Video, problems: Problems) -> None:
    """Decode the first frame and the last, one by one: images may differ in size."""
    try:
        for index in {0, len(video) - 1}:
            video.frames.read([index])
    except DamagedMediaError as error:
        problems(error)
    except MissingFileError:
        pass  # already reported by `_find_files`


def _sample(videos: int, count: int) -> set[int]:
    """Positions of so many, evenly spread; -1 for all."""
    if count < 0 or count >= videos:
        return set(range(videos))
    return {i * videos // count for i in range(count)}
