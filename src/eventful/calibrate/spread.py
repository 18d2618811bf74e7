"""A calibration by worker processes: an item for each clip and setting, stored like a video.

The workers and the store are those of an evaluation. Samples are put together in the order of
clips and settings, so that the numbers are those of one process; a run that was stopped goes on
with the items that are not stored.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from eventful import files
from eventful.bench.video.measure import Tick
from eventful.calibrate.measure import (
    EAGER,
    Clip,
    FrameSamples,
    Measured,
    Sample,
    dense_outputs,
    refuse_still,
    samples_of,
)
from eventful.calibrate.settings import Setting
from eventful.calibrate.thresholds import Errors, errors_of, joined_errors, operations_of
from eventful.config import Config
from eventful.cost.times import without_times
from eventful.errors import DataError, WorkerError
from eventful.models.vitdet.frames import Detections
from eventful.paper.data.records import Video
from eventful.paper.evaluate.runs import RunStore, VideoResult
from eventful.paper.evaluate.workers import Item
from eventful.paper.evaluate.workers import Tick as FrameTick

_COLUMNS = ("updated", "operations", "error")
_FOUND = ("boxes", "scores", "labels")
_DENSE = "dense"


class Opener(Hashable, Protocol):
    """Opens a clip, with its model, in any process. It is pickled and sent there."""

    def __call__(self, device: str) -> Clip:
        """The clip, with the model on a device."""


class Runs(Protocol):
    """Processes that run items, as `Workers` and `RayWorkers`."""

    def run(self, items: Sequence[Item], tick: FrameTick = ...) -> dict[int, str]:
        """Process the items; returns the problems, by index."""


def clip_digest(clip: Clip) -> str:
    """Of the pixels of a clip, and of the weights of its model."""
    tensors = (*clip.frames, *clip.model.state_dict().values())
    flat = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors)
    return files.digest(memoryview(values.numpy()) for values in flat)


@dataclass(frozen=True)
class _Job:
    """What all jobs on a clip know.

    Attributes:
        digest: see `clip_digest`; it must be the same in every process.
    """

    opener: Opener
    digest: str
    frames: int

    def length(self, video: Video) -> int:
        """See `Job`."""
        return self.frames

    def run(self, video: Video, device: str, tick: FrameTick) -> VideoResult:
        """See `Job`."""
        clip, digest = _opened(self.opener, device)
        if digest != self.digest:
            raise WorkerError(
                "A worker reads other pixels or weights than the calling process. Put videos and "
                "weights on a file system that all machines mount under the same path, and install "
                "the same versions everywhere."
            )
        with without_times():
            tensors = self.tensors(clip, device, tick)
        return VideoResult(tensors, {"name": video.name, "order": list(tensors)})

    def tensors(self, clip: Clip, device: str, tick: FrameTick) -> dict[str, Tensor]:
        """What is kept."""
        raise NotImplementedError


@dataclass(frozen=True)
class SampleJob(_Job):
    """Samples of one setting; those of the dense model, where it has a head, for None."""

    setting: Setting | None = None

    def tensors(self, clip: Clip, device: str, tick: FrameTick) -> dict[str, Tensor]:
        """See `_Job`."""
        settings = [] if self.setting is None else [self.setting]
        made = []
        for frame in samples_of(clip, settings, _truths(self.opener, device)):
            made.append(frame)
            tick(1)
        if self.setting is None:
            return _packed([frame.dense_found for frame in made])
        samples = [frame.settings[self.setting.name] for frame in made]
        kept = {
            column: torch.tensor([getattr(one, column) for one in samples], dtype=torch.float64)
            for column in _COLUMNS
        }
        return kept | _packed([one.found for one in samples])


@dataclass(frozen=True)
class ErrorsJob(_Job):
    """Errors of the gates under a config; see `thresholds.errors_of`."""

    config: Config | None = None

    def tensors(self, clip: Clip, device: str, tick: FrameTick) -> dict[str, Tensor]:
        """See `_Job`."""
        assert self.config is not None
        return errors_of(clip, self.config)


@dataclass(frozen=True)
class OperationsJob(_Job):
    """Operations of a config; see `thresholds.operations_of`."""

    config: Config | None = None

    def tensors(self, clip: Clip, device: str, tick: FrameTick) -> dict[str, Tensor]:
        """See `_Job`."""
        assert self.config is not None
        shares = operations_of(clip, self.config)
        return {"operations": torch.tensor(shares, dtype=torch.float64)}


@lru_cache(maxsize=1)
def _opened(opener: Opener, device: str) -> tuple[Clip, str]:
    """The clip that this process is at: items follow each other by clip."""
    clip = opener(device)
    return clip, clip_digest(clip)


@lru_cache(maxsize=1)
def _truths(opener: Opener, device: str) -> list[Tensor]:
    return dense_outputs(_opened(opener, device)[0])


@dataclass(frozen=True)
class _ClipItem(Item):
    """An item whose file is numbered by its clip; indices are unique among the items of a run."""

    number: int = 0

    def keep(self, result: VideoResult) -> None:
        """See `Item`."""
        self.store.save(self.variant, self.number, self.video.name, result)


@dataclass(frozen=True)
class _Pixels:
    """The frames of a clip, for a check whether this process can read them."""

    opener: Opener
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(_opened(self.opener, "cpu")[0].frames)

    def read(self, indices: Sequence[int]) -> Tensor:
        """See `FrameSource`."""
        return torch.stack([_opened(self.opener, "cpu")[0].frames[i] for i in indices])


@dataclass(frozen=True)
class Spread:
    """Clips whose settings are run by workers.

    Attributes:
        clips: as this process has them; their models are not run here.
        openers: of each clip.
    """

    clips: Sequence[Clip]
    openers: Sequence[Opener]
    store: RunStore
    workers: Runs
    tick: Tick = lambda *_: None

    def measure(self, settings: Sequence[Setting]) -> Measured:
        """Every setting on every clip, as `measure.measure` without times."""
        made = Measured(self.clips, settings, timed=False, notes=refuse_still(self.clips))
        wanted: list[Setting | None] = [*settings]
        if any(clip.head is not None for clip in self.clips):
            wanted.append(None)
        jobs = {_key_of(setting): _with(SampleJob, setting) for setting in wanted}
        found = self._run(jobs, "measuring")
        names = list(jobs)
        for number, clip in enumerate(self.clips):
            of = {name: found[name][number].tensors for name in names}
            dense: Sequence[Any] = [None] * len(clip.frames)
            if wanted[-1] is None:
                dense = _unpacked(of[names[-1]], len(clip.frames))
            columns = {
                setting.name: _samples(of[name], len(clip.frames))
                for setting, name in zip(settings, names, strict=False)
            }
            made.frames.append(
                [
                    FrameSamples(
                        {name: samples[t] for name, samples in columns.items()},
                        {EAGER: 0.0},
                        dense[t],
                    )
                    for t in range(len(clip.frames))
                ]
            )
        return made

    def errors(self, config: Config) -> Errors:
        """See `thresholds.Tuned`."""
        key = _key("errors", config)
        found = self._run({key: _with(ErrorsJob, config)})
        # By gate in the order of the model; a file has another one.
        return joined_errors(
            [{name: each.tensors[name] for name in each.facts["order"]} for each in found[key]]
        )

    def operations(self, config: Config) -> float:
        """See `thresholds.Tuned`."""
        key = _key("operations", config)
        found = self._run({key: _with(OperationsJob, config)})
        return statistics.fmean(
            share for result in found[key] for share in result.tensors["operations"].tolist()
        )

    def _run(
        self, jobs: Mapping[str, Callable[..., _Job]], what: str = ""
    ) -> dict[str, list[VideoResult]]:
        """Results of each job, by clip; those that are stored already are not computed again."""
        items: list[Item] = []
        for number, (clip, opener) in enumerate(zip(self.clips, self.openers, strict=True)):
            digest, count = clip_digest(clip), len(clip.frames)
            video = Video(clip.name, _Pixels(opener, count))
            for key, make in jobs.items():
                if not self.store.has(key, number, clip.name):
                    job = make(opener, digest, count)
                    items.append(_ClipItem(job, self.store, key, len(items), video, number))
        done, count = 0, sum(item.job.length(item.video) for item in items)

        def advance(frames: int) -> None:
            nonlocal done
            done += frames
            if what:
                self.tick(what, done, count)

        problems = self.workers.run(items, advance)
        if problems:
            raise DataError(next(iter(problems.values())))
        return {
            key: [self.store.load(key, number, clip.name) for number, clip in enumerate(self.clips)]
            for key in jobs
        }


def _with(kind: Callable[..., _Job], what: Any) -> Callable[..., _Job]:
    return lambda *clip: kind(*clip, what)


def _key_of(setting: Setting | None) -> str:
    if setting is None:
        return _DENSE
    return _key(setting.name, setting.config, setting.every)


def _key(name: str, config: Config | None, every: int = 0) -> str:
    """A folder for a config or frame skipping: another one has another."""
    content = [every, None if config is None else config.to_dict()]
    safe = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")[-40:]
    return f"{safe}-{files.digest([json.dumps(content, sort_keys=True)])[:16]}"


def _samples(tensors: Mapping[str, Tensor], count: int) -> list[Sample]:
    rows = zip(*(tensors[column].tolist() for column in _COLUMNS), strict=True)
    found = _unpacked(tensors, count)
    return [
        Sample(updated, operations, error, found=one)
        for (updated, operations, error), one in zip(rows, found, strict=True)
    ]


def _packed(found: Sequence[Detections | None]) -> dict[str, Tensor]:
    """Detections of all frames in one table; nothing without a head."""
    known = [one for one in found if one is not None]
    if not known:
        return {}
    made = {name: torch.cat([getattr(one, name) for one in known]) for name in _FOUND}
    return {**made, "counts": torch.tensor([len(one) for one in known])}


def _unpacked(tensors: Mapping[str, Tensor], count: int) -> Sequence[Detections | None]:
    if "counts" not in tensors:
        return [None] * count
    counts = tensors["counts"].tolist()
    split = [tensors[name].split(counts) for name in _FOUND]
    return [Detections(*parts) for parts in zip(*split, strict=True)]
