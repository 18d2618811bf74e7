"""Error and operations of a detector frame by frame, beside the dense model (Figure 1).

On each frame the dense model and every variant run in turn. The error is that of the backbone's
output, relative to dense. The heads run on every output, so that detections are scored as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eventful.bench.contenders import Streamed
from eventful.bench.results import origin
from eventful.errors import ConfigError, DamagedMediaError
from eventful.models.vitdet.frames import Detections, Placement
from eventful.models.vitdet.model import ViTDet
from eventful.paper.data.problems import Problems
from eventful.paper.data.records import Video
from eventful.paper.evaluate import detection, evaluation
from eventful.paper.evaluate.contenders import contender, dense_macs
from eventful.paper.evaluate.evaluation import NoProgress, Progress, Settings
from eventful.paper.evaluate.experiment import Experiment
from eventful.paper.evaluate.models import Weights
from eventful.paper.evaluate.report import Report, Row, table
from eventful.paper.evaluate.runs import RunStore, VideoResult
from eventful.paper.evaluate.variants import DENSE, SKIP, Variant
from eventful.paper.evaluate.workers import Item, Tick
from eventful.video.budgets import budget_at, parse_schedule

ALL = "all-variants"  # they run together, so a video has one file
PARTS = 4  # of a trace without a schedule, for means over time


@dataclass(frozen=True)
class TraceJob:
    """Run the dense model and all variants over a video, side by side.

    Attributes:
        schedule: text of `parse_schedule`; '' for the variants' own policies.
        frames: limit for each video; None for all.
    """

    weights: Weights
    variants: tuple[Variant, ...]
    schedule: str = ""
    frames: int | None = None

    def length(self, video: Video) -> int:
        """See `Job`."""
        return min(len(video), self.frames or len(video))

    def run(self, video: Video, device: str, tick: Tick) -> VideoResult:
        """See `Job`."""
        model = self.weights.vitdet(device)
        size = model.config.backbone.size
        steps = [contender(model.backbone, variant, size) for variant in self.variants]
        schedule = parse_schedule(self.schedule) if self.schedule else ()
        logs = [detection.FrameLog() for _ in steps]
        errors: list[list[float]] = []
        for index, frame in enumerate(islice(video, self.frames)):
            budget = budget_at(schedule, index)
            pixels, placement = model.prepare(frame.pixels)
            with torch.no_grad():
                truth = model.backbone(pixels)
            row = []
            for step, log in zip(steps, logs, strict=True):
                if budget is not None and isinstance(step, Streamed):
                    step.stream.policy = budget.policy
                output = step(pixels)
                row.append(relative_error(output, truth))
                log.add(_detect(model, output, placement), frame.boxes, step.macs)
            errors.append(row)
            tick(1)
        tensors = {"error": torch.tensor(errors, dtype=torch.float64).T.reshape(len(steps), -1)}
        for number, log in enumerate(logs):
            tensors |= {f"{number}.{name}": value for name, value in log.tensors().items()}
        dense = dense_macs(model.backbone, size)
        return VideoResult(tensors, {"name": video.name, "dense_macs": dense})


def relative_error(output: Tensor, truth: Tensor) -> float:
    """Norm of the difference, relative to the norm of the truth."""
    difference = (output.float() - truth.float()).norm()
    return float(difference / truth.float().norm().clamp_min(1e-12))


@torch.no_grad()
def _detect(model: ViTDet, output: Tensor, placement: Placement) -> Detections:
    (found,) = model.detect(model.pyramid(output), [placement.content]).back([placement])
    return found


@dataclass(frozen=True)
class TraceReport(Report):
    """A trace, measured.

    Attributes:
        steps: one entry per variant, video and frame.
        parts: means over the frames of each part of the videos, per variant.
    """

    steps: tuple[dict[str, Any], ...] = ()
    parts: tuple[dict[str, Any], ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """See `Report`."""
        return {**super().to_dict(), "parts": list(self.parts)}

    def tables(self) -> dict[str, str]:
        """See `Report`."""
        return {**super().tables(), "trace.csv": table(self.steps), "parts.csv": table(self.parts)}

    def draw(self, folder: Path) -> list[Path]:
        """See `Report`."""
        from eventful.paper.evaluate.trace_figure import draw_trace

        return draw_trace(self, folder / "figure.png")


def measure_trace(
    experiment: Experiment, settings: Settings, progress: Progress | None = None
) -> TraceReport:
    """Trace every variant."""
    problems = Problems()
    data = evaluation.opened(experiment, settings, problems)
    variants, left_out = evaluation.with_weights(experiment, settings)
    _check(experiment, variants)
    experiment, without = evaluation.without_coco(experiment, variants)
    weights = evaluation.weights_of(variants[0], settings)
    job = TraceJob(weights, tuple(variants), experiment.schedule, settings.frames)
    described = evaluation.described(experiment, settings, data, variants)
    described |= {"schedule": experiment.schedule}
    shown, videos = progress or NoProgress(), list(enumerate(data))
    with evaluation.folder_of(settings) as folder:
        store = RunStore.open(folder, described, resume=settings.resume)
        left = [(i, video) for i, video in videos if not store.has(ALL, i, video.name)]
        every = replace(variants[0], label="all variants", r=None, h=None, preset=DENSE, options={})
        shown.begin(every, sum(job.length(video) for _, video in left), len(left))
        items = [Item(job, store, ALL, i, video) for i, video in left]
        with evaluation.workers_of(settings) as workers:
            bad = workers.run(items, shown.advance)
        results = [store.load(ALL, i, video.name) for i, video in videos if i not in bad]
    if not results:
        raise DamagedMediaError(f"None of the {len(data)} videos can be used.")
    rows = [_row(variant, _own(results, k), data.classes) for k, variant in enumerate(variants)]
    noted = {video.name: bad[i] for i, video in videos if i in bad}
    report = TraceReport(
        experiment, tuple(rows), described, origin(settings.device), left_out | without, noted,
        steps=tuple(_steps(experiment, variants, results)),
        parts=tuple(_parts(experiment, variants, results, data.classes)),
    )  # fmt: skip
    if settings.out is not None:
        report.write(settings.out)
    return report


def _check(experiment: Experiment, variants: Sequence[Variant]) -> None:
    if not variants:
        raise ConfigError(f"No weights for {experiment.name}: give --weights FILE.")
    for variant in variants:
        if variant.model != "vitdet" or variant.size is not None or variant.preset == SKIP:
            raise ConfigError(
                f"{experiment.name}: a trace runs detectors at their own size, without skipping; "
                f"{variant.label} is another."
            )
    if len({variant.weights for variant in variants}) > 1:
        raise ConfigError(f"{experiment.name}: all variants of a trace have the same weights.")


def _own(results: Sequence[VideoResult], number: int) -> list[VideoResult]:
    """The results of one variant, as those of a detector."""
    prefix = f"{number}."
    return [
        VideoResult(
            {k.removeprefix(prefix): v for k, v in r.tensors.items() if k.startswith(prefix)},
            r.facts,
        )
        for r in results
    ]


def _row(variant: Variant, results: Sequence[VideoResult], classes: Sequence[str]) -> Row:
    return Row.of(variant, **{"videos": len(results), **detection.score(results, classes)})


def _steps(
    experiment: Experiment, variants: Sequence[Variant], results: Sequence[VideoResult]
) -> list[dict[str, Any]]:
    schedule = parse_schedule(experiment.schedule) if experiment.schedule else ()
    made: list[dict[str, Any]] = []
    for k, variant in enumerate(variants):
        for result in results:
            pairs = zip(result.tensors["error"][k], result.tensors[f"{k}.macs"], strict=True)
            for index, (error, macs) in enumerate(pairs):
                budget = budget_at(schedule, index)
                made.append(
                    {
                        "variant": variant.key,
                        "label": variant.label,
                        "video": result.facts["name"],
                        "frame": index,
                        "budget": "" if budget is None else budget.text,
                        "error": round(float(error), 6),
                        "operations": int(macs) / 1e9,
                    }
                )
    return made


def _parts(
    experiment: Experiment,
    variants: Sequence[Variant],
    results: Sequence[VideoResult],
    classes: Sequence[str],
) -> list[dict[str, Any]]:
    """Means over the frames of each budget, or of equal parts of the videos."""
    frames = max(result.tensors["error"].shape[1] for result in results)
    schedule = parse_schedule(experiment.schedule) if experiment.schedule else ()
    starts = [b.start for b in schedule if b.start < frames]
    starts = starts or [k * frames // PARTS for k in range(min(PARTS, frames))]
    made: list[dict[str, Any]] = []
    for k, variant in enumerate(variants):
        for first, end in zip(starts, [*starts[1:], frames], strict=True):
            budget = budget_at(schedule, first)
            cut = [_cut(result, first, end) for result in _own(results, k)]
            errors = torch.cat([result.tensors["error"][k, first:end] for result in results])
            scored = detection.score(cut, classes)
            made.append(
                {
                    "variant": variant.key,
                    "label": variant.label,
                    "first": first,
                    "last": end - 1,
                    "budget": "" if budget is None else budget.text,
                    "error": float(errors.mean()),
                    "operations": scored["operations"],
                    "fgfa_map50": scored["fgfa_map50"],
                }
            )
    return made


def _cut(result: VideoResult, first: int, end: int) -> VideoResult:
    """Some frames of a detector's result."""
    tensors = dict(result.tensors)
    for counts, names in (
        ("counts", ("boxes", "scores", "labels")),
        ("truth_counts", ("truth_boxes", "truth_labels", "truth_ignore")),
    ):
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), tensors[counts].cumsum(0)])
        low, high = (int(ends[min(place, len(ends) - 1)]) for place in (first, end))
        tensors |= {name: tensors[name][low:high] for name in names}
        tensors[counts] = tensors[counts][first:end]
    tensors["macs"] = tensors["macs"][first:end]
    return VideoResult(tensors, result.facts)
