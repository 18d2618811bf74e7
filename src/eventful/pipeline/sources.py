"""Sources of a run: what `eventful.read` takes, and the generated world, as pictures in turn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from eventful import files
from eventful.errors import ConfigError, EventfulError, MissingFileError
from eventful.paper.data import world as worlds
from eventful.paper.data.records import Box
from eventful.video.address import LIST_SUFFIX, Source, find_source, read_list, without_credentials
from eventful.video.fitting import Fitting
from eventful.video.frame import Frame
from eventful.video.normalization import choose_normalization
from eventful.video.read import ReadOptions, VideoReader
from eventful.video.world import ACTIONS, CLASSES, RATE, SIZE, World, as_bytes, boxes_of

AHEAD = 2  # frames of the source's own size held in memory; they may be large
TIMEOUT = 10.0
LASTING = 600.0  # seconds for which a live source that was lost is tried again
_AT_ONCE = 4  # frames of the world rendered together
_REMOTE = ("camera:", "rtsp:", "rtsps:", "http:", "https:")


@dataclass(frozen=True)
class Taken:
    """One frame of a source.

    Attributes:
        picture: (3, H, W) uint8 RGB, in the source's own size.
        truth: its annotated objects; None where they are not known.
        resumed: a live source was lost before it: what a stream remembers is out of date.
    """

    index: int
    seconds: float | None
    picture: Tensor
    truth: tuple[Box, ...] | None = None
    resumed: bool = False


@dataclass(frozen=True)
class SourceName:
    """A source as a user named it, not opened.

    Attributes:
        name: as it may be shown: without credentials.
        slug: for names of files; no two sources of a run share one.
        address: what is opened; it may hold credentials.
        listed: of a source in a `.streams` file, what the list says.
    """

    name: str
    slug: str
    address: str = field(repr=False)
    listed: Source | None = field(default=None, repr=False)

    @property
    def live(self) -> bool:
        """Whether it may never end: cameras and addresses."""
        if self.listed is not None:
            return self.listed.kind not in ("file", "images")
        return self.address.lower().startswith(_REMOTE)


class Footage:
    """An open source.

    Attributes:
        rate: frames a second.
        length: number of frames, None where it is not known.
        live: frames arrive whether they are taken or not; numbers begin at 0 when it is opened.
        classes: names of the labels of its truth; empty where it has none.
        action: position in `classes` of what the whole video shows; None where it is not known.
    """

    rate: float
    length: int | None
    live = False
    classes: tuple[str, ...] = ()
    action: int | None = None

    def frames(self, after: int = -1) -> Iterator[Taken]:
        """Every frame behind number `after`, in turn."""
        raise NotImplementedError

    @property
    def damaged(self) -> int:
        """Frames that did not decode and were skipped."""
        return 0

    @property
    def dropped(self) -> int:
        """Frames of a live source that were replaced by newer ones."""
        return 0

    @property
    def lost(self) -> int:
        """How often a live source was lost and tried again."""
        return 0

    @property
    def ready(self) -> bool:
        """Whether the next frame, or the end, comes without a wait, once `frames` was called."""
        return True

    def close(self) -> None:
        """Close the source."""


class ReadFootage(Footage):
    """What `eventful.read` takes, in its own size."""

    def __init__(self, source: Source) -> None:
        fitting = Fitting(None, "pad", 1, choose_normalization("none"))
        options = ReadOptions(fitting, False, None, TIMEOUT, AHEAD)
        self._reader = VideoReader(source, options).lasting(LASTING)
        self.rate, self.live = self._reader.rate, self._reader.live
        try:
            self.length = len(self._reader)
        except TypeError:
            self.length = None

    def frames(self, after: int = -1) -> Iterator[Taken]:
        """See `Footage`."""
        # Begun here and not at the first frame, so that `ready` does not have to wait for it.
        return self._taken(iter(self._reader), after)

    def _taken(self, frames: Iterator[Frame], after: int) -> Iterator[Taken]:
        for frame in frames:
            if frame.index > after or self.live:
                # Pixels are bytes divided by 255, so this gives the same bytes again.
                picture = (frame[0] * 255).round().to(torch.uint8)
                yield Taken(frame.index, frame.time, picture, resumed=frame.resumed)

    @property
    def damaged(self) -> int:
        """See `Footage`."""
        return self._reader.damaged

    @property
    def dropped(self) -> int:
        """See `Footage`."""
        return self._reader.dropped

    @property
    def lost(self) -> int:
        """See `Footage`."""
        return self._reader.lost

    @property
    def ready(self) -> bool:
        """See `Footage`."""
        return self._reader.ready

    def close(self) -> None:
        """See `Footage`."""
        self._reader.close()


class WorldFootage(Footage):
    """A video of the generated world, with its truth."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.rate, self.length = float(RATE), len(world)
        self.classes = CLASSES if world.action is None else ACTIONS
        self.action = None if world.action is None else ACTIONS.index(world.action)

    def frames(self, after: int = -1) -> Iterator[Taken]:
        """See `Footage`.

        Frames are rendered in the same groups wherever one begins: rounding depends on the group.
        """
        for first in range((after + 1) // _AT_ONCE * _AT_ONCE, len(self._world), _AT_ONCE):
            indices = list(range(first, min(first + _AT_ONCE, len(self._world))))
            shot = self._world.shot(indices)
            pictures = as_bytes(shot.pixels).cpu()
            found = boxes_of(shot) if self.action is None else None
            for row, index in enumerate(indices):
                if index > after:
                    truth = None if found is None else worlds.boxes_in(found, row)
                    yield Taken(index, index / self.rate, pictures[row], truth)


def find_sources(texts: Sequence[str], frames: int | None = None) -> list[SourceName]:
    """The sources that a user named: lists and sets of the world become their members.

    Whether they are there is seen when they are opened.

    Args:
        frames: how many are wanted, for videos of the world whose name does not say it.

    Raises:
        ConfigError: A name of the world is wrong, or a source is named twice.
        DataError: A `.streams` file cannot be used.
    """
    found = [member for text in texts for member in _members(text, frames)]
    names = [name for name, _, _ in found]
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise ConfigError(f"{twice[0]} is given twice; give every source once.")
    if not found:
        raise ConfigError("There is nothing to run on: name a source, such as street.mp4.")
    slugs = _apart(names)
    return [
        SourceName(name, slug, address, listed)
        for (name, address, listed), slug in zip(found, slugs, strict=True)
    ]


def missing_file(source: SourceName) -> MissingFileError | None:
    """Why a file or folder cannot be opened: it is not there. None for all other sources."""
    if source.address.startswith(worlds.PREFIX):
        return None
    try:
        source.listed or find_source(source.address)
    except MissingFileError as error:
        return error
    return None


def open_source(source: SourceName, frames: int | None = None) -> Footage:
    """Open a source.

    Args:
        frames: as for `find_sources`.
    """
    if source.address.startswith(worlds.PREFIX):
        return WorldFootage(worlds.open_seed(source.address, _world_frames(frames)))
    return ReadFootage(source.listed or find_source(source.address))


def _members(text: str, frames: int | None) -> Iterator[tuple[str, str, Source | None]]:
    """Name, address and entry of a list, for each source that a text stands for."""
    if worlds.names_seed(text):
        worlds.open_seed(text, _world_frames(frames))  # raises for wrong options
        yield text, text, None
    elif text.startswith(worlds.PREFIX):
        for video in worlds.open_world(Path(text)):
            assert isinstance(video.frames, World)
            name = worlds.seed_name(video.frames)
            yield name, name, None
    elif text.endswith(LIST_SUFFIX) and not Path(text).is_dir():
        for name, source in read_list(Path(text)).items():
            yield name, source.address, source
    else:
        yield _shown(text), text, None


def _shown(text: str) -> str:
    """A source as it may be shown, whether it is there or not."""
    try:
        return find_source(text).shown
    except EventfulError:
        return without_credentials(text)


def _world_frames(frames: int | None) -> int | None:
    """The length of a world whose name does not say it: the usual one, or more if asked for."""
    return None if frames is None else max(frames, World(0).frames)


def _slug(name: str) -> str:
    """A short name for files, which other sources may share."""
    if name.startswith(worlds.PREFIX):
        whole = name.replace(f"size={SIZE[0]}x{SIZE[1]}", "")
    else:
        whole = name.rstrip("/").rpartition("/")[2]
        whole = Path(whole).stem or whole
    made = re.sub(r"[^\w.]+", "-", whole).strip("-.") or "source"
    return made[:80]


def _apart(names: Sequence[str]) -> list[str]:
    """Short names, none twice, whatever the order: those that are shared get a digest."""
    short = [_slug(name) for name in names]
    shared = {slug for slug in short if [s.lower() for s in short].count(slug.lower()) > 1}
    return [
        f"{slug}-{files.digest([name])[:8]}" if slug in shared else slug
        for slug, name in zip(short, names, strict=True)
    ]
