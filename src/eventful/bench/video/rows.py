"""The numbers of one clip under one contender: by frame, and as one row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

FAR, NEAR = 0.25, 0.1  # relative errors above which a frame is wrong, below which it is right


@dataclass
class Series:
    """What one contender did, frame by frame.

    Attributes:
        updated: share of the tokens updated.
        operations: as a share of dense.
        error: relative error of the output tokens against the dense ones.
        cosine: between output and dense tokens, the median over tokens.
        cosine_worst: the same, the lowest of all tokens.
        estimate: the stream's own estimate of its error; empty where it makes none.
        stale: frames on which the stream says that its output is out of date; empty likewise.
        at_ceiling: frames on which more tokens wanted to pass than may; empty likewise.
        wanted: share of the tokens that wanted to pass; NaN where they were not counted.
        ms: time of a step; empty where it was not timed.
    """

    updated: list[float] = field(default_factory=list)
    operations: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    cosine: list[float] = field(default_factory=list)
    cosine_worst: list[float] = field(default_factory=list)
    estimate: list[float] = field(default_factory=list)
    stale: list[bool] = field(default_factory=list)
    at_ceiling: list[bool] = field(default_factory=list)
    wanted: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)

    def judge(self, output: Tensor, dense: Tensor) -> None:
        """Compare the output tokens (1, N, D) of a frame with the dense ones."""
        got, wanted = output.float(), dense.to(output.device).float()
        self.error.append(float((got - wanted).norm() / wanted.norm().clamp_min(1e-12)))
        alike = torch.cosine_similarity(got, wanted, dim=-1).flatten()
        self.cosine.append(float(alike.median()))
        self.cosine_worst.append(float(alike.min()))


@dataclass(frozen=True)
class VideoRow:
    """One contender on one clip.

    The first frame is computed in full by everybody. `updated` and `operations` include it, the
    `_steady` ones and everything about errors leave it out. Times leave out the first frames.

    Attributes:
        contender: dense, default, the name of a config, or a kind of frame skipping: `skip` at
            the default's operations, `skip-time` at its time, `-carried` with its held
            tokens carried along the motion of the picture; `oracle` updates as many tokens as the
            default, those that are most wrong.
        config: what was converted with; "" for the others.
        updated: share of the tokens updated, the mean over frames.
        operations: as a share of dense, the mean over frames. Carrying is not counted.
        ms: of a step, the median; of frame skipping the mean, by the times of the dense model.
        first_ms: of the first frame, which allocates and may compile.
        dense_ms: of the fastest dense path, named `dense_path`, in the same run; the median.
        time: total time against dense over the same frames, without reading.
        time_median: the median over frames of the same; None for frame skipping.
        time_read: total time against dense with reading, resizing and copying to the device.
        read_ms: of reading, resizing and copying one frame, the mean.
        error: relative error of the output tokens against dense, the median over frames.
        cosine: between output and dense tokens: the median token of the median frame.
        cosine_worst: the worst token of the worst frame.
        estimate_rank: rank correlation over frames of the stream's estimate and the true error.
        stale_caught: share of the frames with an error above 0.25 that the stream flags.
        stale_false: share of the frames with an error below 0.1 that the stream flags.
        at_ceiling: share of the frames on which more tokens wanted to pass than may.
        map50: COCO's average precision at IoU 0.5, where there are labels and a head.
        by_frame: the series behind it.
    """

    clip: str
    contender: str
    config: str
    model: str
    size: str
    tokens: int
    frames: int
    device: str
    precision: str
    updated: float | None = None
    updated_steady: float | None = None
    operations: float | None = None
    operations_steady: float | None = None
    ms: float | None = None
    first_ms: float | None = None
    dense_path: str = ""
    dense_ms: float | None = None
    time: float | None = None
    time_median: float | None = None
    time_read: float | None = None
    read_ms: float | None = None
    error: float | None = None
    error_worst: float | None = None
    cosine: float | None = None
    cosine_worst: float | None = None
    estimate_rank: float | None = None
    stale_caught: float | None = None
    stale_false: float | None = None
    at_ceiling: float | None = None
    map50: float | None = None
    notes: tuple[str, ...] = ()
    by_frame: Series = field(default_factory=Series)


def quality_fields(series: Series) -> dict[str, float | None]:
    """The columns of a row that are not times."""
    errors = series.error[1:] or series.error
    return {
        "updated": _mean(series.updated),
        "updated_steady": _mean(series.updated[1:]),
        "operations": _mean(series.operations),
        "operations_steady": _mean(series.operations[1:]),
        "error": _median(errors),
        "error_worst": max(errors, default=None),
        "cosine": _median(series.cosine[1:] or series.cosine),
        "cosine_worst": min(series.cosine_worst[1:] or series.cosine_worst, default=None),
        "estimate_rank": rank_correlation(series.estimate[1:], series.error[1:]),
        "stale_caught": _flagged(series, lambda error: error > FAR),
        "stale_false": _flagged(series, lambda error: error < NEAR),
        "at_ceiling": _mean([float(flag) for flag in series.at_ceiling[1:]]),
    }


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's, with mean ranks for equals; None where one of them does not vary."""
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if math.isfinite(x) and math.isfinite(y)]
    if len(pairs) < 3:
        return None
    first, second = (_ranks([pair[i] for pair in pairs]) for i in (0, 1))
    if min(len(set(first)), len(set(second))) < 2:
        return None
    return statistics.correlation(first, second)


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [statistics.mean(places[value]) for value in values]


def _flagged(series: Series, concerned: Callable[[float], bool]) -> float | None:
    flags = [
        float(flag)
        for flag, error in zip(series.stale[1:], series.error[1:], strict=False)
        if concerned(error)
    ]
    return _mean(flags)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
