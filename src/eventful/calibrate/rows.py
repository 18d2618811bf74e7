"""The numbers of each setting over all clips, as rows of a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eventful.bench.video.times import WARM
from eventful.calibrate.measure import EAGER, FrameSamples, Measured, Sample
from eventful.calibrate.settings import Setting

DENSE = "dense"
_LEAST = 3  # frames of a clip that an interrupted run counts
_TAIL = 0.9


@dataclass(frozen=True)
class Row:
    """One setting over all clips. The first frame of a clip, dense for everybody, is left out.

    Attributes:
        setting: None for the dense model.
        updated: share of the tokens, the mean over frames.
        operations: as a share of dense, the mean over frames.
        time: total time against the fastest dense path; the first frames are left out, too.
        ms: of a step, the median; of frame skipping the mean.
        error: relative error of the output tokens, the median over frames.
        error_p90: nine frames of ten have at most this error.
        error_worst: of the worst frame.
        map50: average precision at IoU 0.5, the mean over labelled clips.
    """

    setting: Setting | None
    updated: float
    operations: float
    error: float
    error_p90: float
    error_worst: float
    time: float | None = None
    ms: float | None = None
    map50: float | None = None

    @property
    def name(self) -> str:
        """Of the setting."""
        return DENSE if self.setting is None else self.setting.name

    @property
    def cost(self) -> float:
        """Time where it was measured, else operations; of dense."""
        return self.operations if self.time is None else self.time

    @property
    def adaptive(self) -> bool:
        """Whether a config can hold it, as opposed to dense and frame skipping."""
        return self.setting is not None and self.setting.config is not None


@dataclass(frozen=True)
class DenseTimes:
    """The fastest dense path, and the milliseconds of its frames after the first of each clip."""

    path: str
    ms: list[float]


def dense_times(measured: Measured) -> DenseTimes | None:
    """The dense path with the smallest total; None where times were not measured."""
    if not measured.timed or not counted_frames(measured):
        return None
    clips = [frames for _, frames in _counted(measured)]
    # Another path than eager may exist on some clips only.
    paths = set.intersection(*(set(frames[0].dense_ms) for frames in clips))
    series = {
        path: [frame.dense_ms[path] for frames in clips for frame in _steady(frames)]
        for path in sorted(paths)
    }
    best = min(series, key=lambda path: (sum(series[path]), path != EAGER))
    return DenseTimes(best, series[best])


def counted_frames(measured: Measured) -> int:
    """Frames that the rows are made of."""
    return sum(len(frames) for _, frames in _counted(measured))


def rows_of(measured: Measured) -> list[Row]:
    """Dense, then every setting; empty if nothing was measured."""
    if not counted_frames(measured):
        return []
    dense = dense_times(measured)
    made = [_dense_row(measured, dense)]
    made += [_row(measured, setting, dense) for setting in measured.settings]
    return made


def _dense_row(measured: Measured, dense: DenseTimes | None) -> Row:
    ms = None if dense is None else statistics.median(dense.ms)
    score = _score(measured, lambda frame: frame.dense_found)
    return Row(None, 1.0, 1.0, 0.0, 0.0, 0.0, None if dense is None else 1.0, ms, score)


def _row(measured: Measured, setting: Setting, dense: DenseTimes | None) -> Row:
    def of(frame: FrameSamples) -> Sample:
        return frame.settings[setting.name]

    after_first = [of(frame) for _, frames in _counted(measured) for frame in frames[1:]]
    errors = [sample.error for sample in after_first]
    time, ms = None, None
    if dense is not None:
        own = [of(frame).ms for _, frames in _counted(measured) for frame in _steady(frames)]
        time, ms = sum(own) / sum(dense.ms), statistics.median(own)
    updated = statistics.fmean(sample.updated for sample in after_first)
    operations = statistics.fmean(sample.operations for sample in after_first)
    if setting.every:  # over a long video; a short one may end before the next dense frame
        updated = operations = 1 / setting.every
        if dense is not None:
            time, ms = operations, operations * statistics.fmean(dense.ms)
    return Row(
        setting,
        updated,
        operations,
        statistics.median(errors),
        float(np.quantile(errors, _TAIL)),
        max(errors),
        time,
        ms,
        _score(measured, lambda frame: of(frame).found),
    )


def _score(measured: Measured, found: Callable[[FrameSamples], Any]) -> float | None:
    values = [
        clip.head.score([found(frame) for frame in frames], clip.prepare.size)
        for clip, frames in _counted(measured)
        if clip.head is not None
    ]
    return statistics.fmean(values) if values else None


def _counted(measured: Measured) -> list[tuple[Any, list[FrameSamples]]]:
    """Clips with the frames that were measured of each; those hardly begun are left out."""
    pairs = zip(measured.clips, measured.frames, strict=False)
    return [(clip, frames) for clip, frames in pairs if len(frames) >= _LEAST]


def _steady(frames: Sequence[FrameSamples]) -> Sequence[FrameSamples]:
    """Without the first frames, which allocate, compile and capture graphs."""
    return frames[min(WARM, len(frames) // 3) :]
