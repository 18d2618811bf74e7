"""The known formats of datasets, and which of them a folder has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from eventful.errors import ConfigError, MissingFileError
from eventful.paper.data import coco, epic, imagenet, kinetics, mot, world
from eventful.paper.data.problems import OnProblem, missing, stop
from eventful.paper.data.records import Task, VideoSet


class Opener(Protocol):
    """Reads one split of a folder."""

    def __call__(self, path: Path, split: str, on_problem: OnProblem, /) -> VideoSet:
        """The videos of that split."""
        ...


@dataclass(frozen=True)
class DatasetFormat:
    """How the files of a dataset are arranged on disk, or that it is generated.

    Args:
        task: What its labels are for; of generated videos, those of the first set.
        recognises: Whether a folder has this format, judged by file names or a first line.
        splits: The splits a folder has; the first is the one to evaluate on.
        parts: Its files and folders by name, and whether they are there.
        form: The arrangement of its files, in one line.
    """

    name: str
    task: Task
    form: str
    recognises: Callable[[Path], bool]
    splits: Callable[[Path], tuple[str, ...]]
    parts: Callable[[Path], dict[str, bool]]
    open: Opener


# From the most specific to the least: any folder with a JSON file might be COCO.
FORMATS = {
    known.name: known
    for known in (
        DatasetFormat(
            "world",
            "detection",
            "world:street or world:actions in place of a path: generated, with options as in "
            "world:street?videos=8&frames=48",
            world.recognises,
            world.splits,
            world.parts,
            world.open_world,
        ),
        DatasetFormat(
            "imagenet-vid",
            "detection",
            "ILSVRC2015/{Data,Annotations,ImageSets}/{VID,DET}",
            lambda path: imagenet.root_of(path) is not None,
            imagenet.splits,
            imagenet.parts,
            imagenet.open_imagenet,
        ),
        DatasetFormat(
            "epic-kitchens",
            "action",
            "EPIC_100_{train,validation}.csv and <participant>/videos/<video_id>.MP4",
            lambda path: bool(epic.splits(path)),
            epic.splits,
            epic.parts,
            epic.open_epic,
        ),
        DatasetFormat(
            "kinetics",
            "action",
            "{train,val}.csv and <split>/<youtube_id>_<start>_<end>.mp4",
            kinetics.recognises,
            kinetics.splits,
            kinetics.parts,
            kinetics.open_kinetics,
        ),
        DatasetFormat(
            "mot",
            "detection",
            "<split>/<sequence>/{seqinfo.ini,img1/,gt/gt.txt}",
            lambda path: bool(mot.splits(path)),
            mot.splits,
            mot.parts,
            mot.open_mot,
        ),
        DatasetFormat(
            "coco",
            "detection",
            "annotations/<split>.json (images with video_id and frame_id) and the images",
            lambda path: bool(coco.splits(path)),
            coco.splits,
            coco.parts,
            coco.open_coco,
        ),
    )
}


def recognise(path: Path) -> DatasetFormat | None:
    """The format of a folder, a JSON file or a name; None if it is unknown."""
    return next((known for known in FORMATS.values() if known.recognises(path)), None)


def no_split(
    path: Path, split: str | None, found: DatasetFormat, there: tuple[str, ...]
) -> MissingFileError:
    """The error for a split that a dataset does not have; None if it has none."""
    wanted = "no split" if split is None else f"no split {split!r}"
    return MissingFileError(f"{path} ({found.name}) has {wanted}; it has {list(there) or 'none'}")


def open_dataset(
    path: str | Path,
    split: str | None = None,
    *,
    format: str | None = None,
    on_problem: OnProblem = stop,
    layout: str | None = None,
) -> VideoSet:
    """Open one split of a dataset. Annotations are read where that is quick, pixels never.

    Args:
        path: Its folder, a COCO-style JSON file, or the name of generated videos, `world:street`
            or `world:actions` (see `eventful.paper.data.world`).
        split: Name of the split; None for the one to evaluate on.
        format: Name of the format; None to detect it.
        on_problem: What to do with a malformed row or a missing file: raise it (the default), or
            collect it and continue without (a `Problems`).
        layout: Old name of `format`.

    Raises:
        MissingFileError: No known format is there, or not that split.
    """
    path, format = Path(path), format or layout
    if format is not None and format not in FORMATS:
        raise ConfigError(f"no format {format!r}: there are {', '.join(FORMATS)}")
    found = FORMATS[format] if format is not None else recognise(path)
    if found is None:
        forms = "; ".join(f"{known.name}: {known.form}" for known in FORMATS.values())
        if not path.exists():
            raise missing(path, f"a dataset in one of the formats {forms}")
        raise MissingFileError(f"{path} has none of the known formats: {forms}")
    there = found.splits(path)
    if not there or (split is not None and split not in there):
        raise no_split(path, split, found, there)
    return found.open(path, split if split is not None else there[0], on_problem)


Layout, LAYOUTS = DatasetFormat, FORMATS  # old names
