"""Generated videos as a dataset: `world:street` with boxes, `world:actions` with labels.

A name takes the place of a path, with options after a question mark:
`world:street?videos=8&frames=48&camera=hand&first=0&size=288x512&device=cuda&exposures=1`.
`world:7?camera=pan` is one video, by its seed (`open_seed`).
Frames and boxes are rendered on access, and kept in memory up to a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from eventful.errors import ConfigError
from eventful.paper.data.kept import FRAMES
from eventful.paper.data.problems import OnProblem, stop
from eventful.paper.data.records import Box, Task, Video, VideoSet
from eventful.video.world import ACTIONS, CAMERAS, CLASSES, SIZE, Boxes, Shot, World, boxes_of
from eventful.video.world.surfaces import Surfaces

PREFIX = "world:"
# Seeds of each split. Those from 900,000 to 1,999,999 are left for training without videos.
SPLITS = {
    "val": range(0, 100_000),
    "test": range(100_000, 900_000),
    "train": range(2_000_000, 2**31),
}


@dataclass(frozen=True)
class _Choice:
    """What a name and its options ask for.

    Attributes:
        videos: how many; None for the usual number of the split.
        first: number of the first one within its split.
        camera: of all videos; None for several in turn.
    """

    frames: int
    size: tuple[int, int]
    cameras: tuple[str, ...]
    videos: int | None = None
    first: int = 0
    camera: str | None = None
    device: str = "cpu"
    exposures: int = 3


@dataclass(frozen=True)
class _Kind:
    """One of the two datasets, and how many videos its splits have unless asked for others."""

    task: Task
    classes: tuple[str, ...]
    usual: _Choice
    videos: dict[str, int]


KINDS = {
    "street": _Kind(
        "detection",
        CLASSES,
        _Choice(100, SIZE, CAMERAS),
        {"val": 20, "test": 20, "train": 200},
    ),
    "actions": _Kind(
        "action",
        ACTIONS,
        _Choice(32, (160, 160), ("stand", "hand", "pan")),
        {"val": 96, "test": 96, "train": 960},
    ),
}
OPTIONS = ("videos", "first", "frames", "camera", "size", "device", "exposures")
SEED_OPTIONS = ("frames", "camera", "size", "device", "exposures", "action")


@dataclass(frozen=True)
class Film(World):
    """A video that remembers the boxes of the frames it has rendered.

    Frames are kept with those of all other videos, up to a limit (`kept.FRAMES`). So reading a
    frame and its boxes renders it once, as often as it is read while it is kept.
    """

    def read(self, indices: Sequence[int]) -> Tensor:
        """See `World`."""
        inside = range(len(self))
        there = {index: FRAMES.get(self._key, index) for index in indices if index in inside}
        missing = [i for i in dict.fromkeys(indices) if i not in there or there[i][0] is None]
        made = dict(zip(missing, super().read(missing), strict=True))
        if missing:
            FRAMES.put(self._key, missing, list(made.values()), self._noted)
        for index, (frame, boxes) in there.items():
            if frame is not None:
                made[index] = frame
                if boxes is not None:
                    self._noted.setdefault(index, boxes)
        if not made:
            return torch.empty(0, 3, *self.size, dtype=torch.uint8)
        return torch.stack([made[index] for index in indices])

    def shot(self, indices: Sequence[int]) -> Shot:
        """See `World`."""
        shot = super().shot(indices)
        if self.action is None:
            self._note(indices, boxes_of(shot))
        return shot

    def boxes_at(self, index: int) -> tuple[Box, ...]:
        """The boxes of one frame; they are those of its middle moment, whatever the blur."""
        if not 0 <= index < len(self):
            raise IndexError(f"frame {index} of a video of {len(self)} frames")
        if index not in self._noted and (kept := FRAMES.get(self._key, index)[1]) is not None:
            self._noted[index] = kept
        if index not in self._noted:
            self._note([index], replace(self, exposures=1).boxes([index]))
        return self._noted[index]

    def _note(self, indices: Sequence[int], found: Boxes) -> None:
        found = Boxes(**{name: values.cpu() for name, values in vars(found).items()})
        self._noted.update({index: boxes_in(found, row) for row, index in enumerate(indices)})

    @property
    def _key(self) -> tuple[object, ...]:
        """All that a frame depends on besides its position."""
        return self.seed, self.mode, self.size, self.device, self.exposures, self.action

    @cached_property
    def _noted(self) -> dict[int, tuple[Box, ...]]:
        return {}

    @property
    def _surfaces(self) -> Surfaces:
        return _surfaces_of(self.seed, self.device)


@lru_cache(maxsize=8)
def _surfaces_of(seed: int, device: str) -> Surfaces:
    """The pictures of a scene, some megabytes."""
    return Surfaces.make(torch.tensor([seed % 2**31], dtype=torch.int32, device=device))


@dataclass(frozen=True)
class FilmBoxes:
    """The boxes of a video, rendered on access."""

    film: Film

    def __len__(self) -> int:
        return len(self.film)

    def __getitem__(self, index: int) -> tuple[Box, ...]:
        return self.film.boxes_at(index)


def camera_of(video: Video) -> str | None:
    """The camera of a generated video; None for other videos."""
    return video.frames.mode if isinstance(video.frames, Film) else None


def boxes_in(found: Boxes, row: int) -> tuple[Box, ...]:
    """What is seen in one of some frames."""
    kept = found.seen[row].nonzero()[:, 0]
    values = (found.boxes, found.labels, found.tracks, found.ignore)
    return tuple(
        Box(left, top, right, bottom, label, track, ignore)
        for (left, top, right, bottom), label, track, ignore in zip(
            *(value[row, kept].tolist() for value in values), strict=True
        )
    )


def recognises(path: Path) -> bool:
    """Whether this is a name of generated videos, and not a path."""
    return str(path).startswith(PREFIX)


def splits(path: Path) -> tuple[str, ...]:
    """The splits of a valid name."""
    _parsed(str(path))
    return tuple(SPLITS)


def parts(path: Path) -> dict[str, bool]:
    """Nothing is stored."""
    return {}


def open_world(path: Path, split: str = "val", on_problem: OnProblem = stop) -> VideoSet:
    """The videos of a split.

    Video number n of a split always is the same one: its seed, its camera (all kinds in turn) and
    its label (all actions in turn) follow from n. `first` and `videos` choose a range of numbers.

    Args:
        path: `world:street` or `world:actions`, with options or without.
        split: `"val"`, `"test"` or `"train"`: other seeds.
    """
    name, choice = _parsed(str(path))
    kind, seeds = KINDS[name], SPLITS[split]
    count = kind.videos[split] if choice.videos is None else choice.videos
    if choice.first + count > len(seeds):
        raise ConfigError(
            f"{path}: {split} has {len(seeds):,} videos; first and videos are {choice.first:,} and "
            f"{count:,}. Choose smaller ones, or another split."
        )
    numbers = range(choice.first, choice.first + count)
    videos = tuple(_video(name, choice, number, seeds[number]) for number in numbers)
    return VideoSet("world", split, kind.task, kind.classes, videos)


def names_seed(text: str) -> bool:
    """Whether this is one video of the world by its seed, `world:7` or `world:7?camera=pan`."""
    return text.startswith(PREFIX) and text.removeprefix(PREFIX).partition("?")[0].isdecimal()


def open_seed(text: str, frames: int | None = None) -> World:
    """One video by its seed: `world:7`, with options as in `world:7?camera=pan&frames=100`.

    Args:
        frames: its length where the name does not say it; None for the usual one.
    """
    name, _, query = text.removeprefix(PREFIX).partition("?")
    given = _options(text, name, query, SEED_OPTIONS)
    if frames is not None:
        given.setdefault("frames", frames)
    if "action" in given:
        usual = KINDS["actions"].usual
        camera = usual.cameras[int(name) % len(usual.cameras)]
        given = {"frames": usual.frames, "size": usual.size, "camera": camera} | given
    try:
        return World(int(name), **given)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{text}: {error}") from None


def seed_name(world: World) -> str:
    """The name by which `open_seed` opens a video."""
    height, width = world.size
    parts = [f"camera={world.mode}", f"frames={world.frames}", f"size={height}x{width}"]
    parts += [] if world.exposures == 3 else [f"exposures={world.exposures}"]
    parts += [] if world.device == "cpu" else [f"device={world.device}"]
    parts += [] if world.action is None else [f"action={world.action}"]
    return f"{PREFIX}{world.seed}?{'&'.join(parts)}"


def _video(name: str, choice: _Choice, number: int, seed: int) -> Video:
    """One video; its name says all that its frames depend on."""
    camera = choice.camera or choice.cameras[number % len(choice.cameras)]
    label = number % len(ACTIONS) if name == "actions" else None
    film = Film(
        seed, choice.frames, camera, choice.size, choice.device, choice.exposures,
        None if label is None else ACTIONS[label],
    )  # fmt: skip
    height, width = choice.size
    title = f"{name}-{seed:07d}-{camera}-{choice.frames}x{height}x{width}-{choice.exposures}"
    return Video(title, film, FilmBoxes(film) if label is None else None, label)


@lru_cache(maxsize=64)
def _parsed(text: str) -> tuple[str, _Choice]:
    """`street` or `actions`, and the options."""
    name, _, query = text.removeprefix(PREFIX).partition("?")
    if name not in KINDS:
        known = " and ".join(PREFIX + kind for kind in KINDS)
        raise ConfigError(f"There is no {PREFIX}{name}; the generated sets are {known}.")
    given = _options(text, name, query, OPTIONS)
    choice = replace(KINDS[name].usual, **given)  # type: ignore[arg-type]
    try:
        World(0, choice.frames, choice.camera, choice.size, choice.device, choice.exposures)
    except ConfigError as error:
        raise ConfigError(f"{text}: {error}") from None
    return name, choice


def _options(text: str, name: str, query: str, known: Sequence[str]) -> dict[str, object]:
    """What follows the question mark, by name."""
    given: dict[str, object] = {}
    for entry in filter(None, query.split("&")):
        option, equals, value = entry.partition("=")
        if option not in known or not equals:
            raise ConfigError(
                f"{text}: {entry!r} is no option; those are {', '.join(known)}, written "
                f"{PREFIX}{name}?frames=48&camera=hand."
            )
        if option in given:
            raise ConfigError(f"{text}: {option} is given twice; give it once.")
        given[option] = _value(text, option, value)
    return given


def _value(text: str, option: str, value: str) -> object:
    if option in ("camera", "action"):
        return value
    if option == "device":
        return _device(text, value)
    if option == "size":
        height, _, width = value.partition("x")
        if not (height.isdecimal() and width.isdecimal()):
            raise ConfigError(f"{text}: size is height x width, such as 288x512, not {value!r}.")
        return int(height), int(width)
    least = 0 if option == "first" else 1
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(f"{text}: {option} is a whole number from {least} up, not {value!r}.")
    return int(value)


def _device(text: str, value: str) -> str:
    """A device that is there."""
    kind, _, number = value.partition(":")
    if kind not in ("cpu", "cuda") or not (number == "" or number.isdecimal()):
        raise ConfigError(f"{text}: device is cpu, cuda or cuda:0 and so on, not {value!r}.")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(f"{text}: there is no {value} here; leave device out to use the CPU.")
    return value
