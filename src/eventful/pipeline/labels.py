"""The truth of a source from a dataset on disk: `--labels`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from eventful.errors import ConfigError, MissingFileError
from eventful.paper.data import mot, open_dataset
from eventful.paper.data.records import Annotations, Video
from eventful.pipeline.sources import Footage, SourceName, Taken


class LabelledFootage(Footage):
    """A source whose frames have the boxes of a dataset, by their position."""

    def __init__(self, footage: Footage, boxes: Annotations, classes: tuple[str, ...]) -> None:
        self._footage, self._boxes = footage, boxes
        self.rate, self.length, self.live = footage.rate, footage.length, footage.live
        self.classes = classes

    def frames(self, after: int = -1) -> Iterator[Taken]:
        """See `Footage`; a frame behind the last annotated one has no truth."""
        return self._with_truth(self._footage.frames(after))

    def _with_truth(self, frames: Iterator[Taken]) -> Iterator[Taken]:
        for taken in frames:
            known = taken.index < len(self._boxes)
            yield replace(taken, truth=tuple(self._boxes[taken.index]) if known else None)

    @property
    def damaged(self) -> int:
        """See `Footage`."""
        return self._footage.damaged

    @property
    def dropped(self) -> int:
        """See `Footage`."""
        return self._footage.dropped

    @property
    def lost(self) -> int:
        """See `Footage`."""
        return self._footage.lost

    @property
    def ready(self) -> bool:
        """See `Footage`."""
        return self._footage.ready

    def close(self) -> None:
        """See `Footage`."""
        self._footage.close()


def labelled(
    footage: Footage, source: SourceName, labels: Path, classes: Sequence[str]
) -> LabelledFootage:
    """A source with the truth of the video of its name, or of the only one.

    Args:
        labels: a MOTChallenge folder or sequence, a COCO-style JSON file, or another dataset with
            boxes (docs/data.md).
        classes: of the model; those of the labels must be the same.
    """
    videos: Sequence[Video]
    known: tuple[str, ...]
    if (labels / "seqinfo.ini").is_file():
        videos, known = (mot.open_sequence(labels),), ("person",)
    else:
        found = open_dataset(labels)
        videos, known = found.videos, found.classes
    if known != tuple(classes):
        raise ConfigError(
            f"The labels in {labels} have the classes {_few(known)}, the model has "
            f"{_few(classes)}: detections cannot be scored. Leave --labels out."
        )
    names = {Path(source.name).stem, *Path(source.name).parts, source.slug}
    mine = videos if len(videos) == 1 else [video for video in videos if video.name in names]
    if len(mine) != 1 or mine[0].boxes is None:
        raise MissingFileError(
            f"{labels} has no boxes for {source.name}; its videos are "
            f"{_few([video.name for video in videos])}. Name the source like its video."
        )
    return LabelledFootage(footage, mine[0].boxes, tuple(known))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") or "none"
