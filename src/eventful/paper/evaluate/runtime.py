"""Times of the paper's systems (Table 2), every variant in turn on the same frames.

ViTDet is timed per frame, backbone and whole detector, each in a stream of its own; ViViT per
video, spatial model and whole model, with the views of the video stepped together. Time depends on
shapes, so a synthetic clip is used, and random weights if none are given. The fastest dense path of
the device is timed as well, because a user would choose it otherwise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eventful.bench.contenders import Contender, Dense, Measured
from eventful.bench.dense import DenseSpec, dense_paths
from eventful.bench.results import origin
from eventful.bench.timing import in_turn, pipelined, timed
from eventful.errors import ConfigError
from eventful.models.vitdet.model import ViTDet, vitdet_b
from eventful.models.vivit.model import ViViT, steps, vivit_b
from eventful.paper.evaluate.contenders import contender, dense_macs
from eventful.paper.evaluate.evaluation import Progress
from eventful.paper.evaluate.experiment import Experiment
from eventful.paper.evaluate.models import Weights
from eventful.paper.evaluate.report import Report, Row
from eventful.paper.evaluate.variants import BASE, DENSE, SKIP, Variant
from eventful.video.synthetic import moving_objects

WARM = {
    "cpu": 2,
    "cuda": 5,
}  # steps of every contender before any is timed; capturing a CUDA graph takes four
LIVELY = (
    20.0  # factor on the class weights of a random detector, so that it finds a hundred objects
)
ROUNDS = {"cpu": 1, "cuda": 5}  # timed flushes of a detector, timed videos of a recogniser
USUAL_FRAMES = {"cpu": 6, "cuda": 30}


@dataclass(frozen=True)
class Plan:
    """How to time.

    Attributes:
        frames: steady frames of the clip for ViTDet; 0 for the usual number of the device.
        views: of a video for ViViT, temporal and spatial.
        streams: videos that a detector steps together.
        compiled: try `torch.compile` for the fastest dense path.
        compile_mode: of `torch.compile`; "" for the usual one of the device.
        weights: `base` for ViTDet, `vivit` for ViViT; either may be left out.
    """

    device: str = "cpu"
    dtype: str = "float32"
    frames: int = 0
    views: tuple[int, int] = (4, 3)
    streams: int = 1
    compiled: bool = True
    compile_mode: str = ""
    weights: Mapping[str, Path] = field(default_factory=dict)

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`."""
        return torch.device(self.device).type

    @property
    def steady(self) -> int:
        """Frames to time after the first."""
        return self.frames or USUAL_FRAMES[self.device_type]

    @property
    def rounds(self) -> int:
        """How often the first frame of a video is timed."""
        return ROUNDS[self.device_type]

    def place(self, model: nn.Module) -> nn.Module:
        """The model on the device."""
        return model.to(self.device, getattr(torch, self.dtype))

    def put(self, pixels: Tensor) -> Tensor:
        """Pixels from 0 to 1, normalised, on the device."""
        return ((pixels - 0.45) / 0.225).to(self.device, getattr(torch, self.dtype))

    def dense_spec(self, model: nn.Module, example: Tensor) -> DenseSpec:
        """What `dense_paths` needs to build the dense paths of a model."""
        made = DenseSpec(model, example, self.compiled, self.compile_mode)
        if not isinstance(model, ViTDet):
            return made
        stages = [f"heads.stages.{number}" for number in range(len(model.heads.stages))]
        parts = ("backbone", "pyramid", "rpn", *stages)
        return replace(made, parts=parts, read=lambda found: found.scores)


@dataclass
class Entry(Measured):
    """The contender of a variant; `ms` are milliseconds of the transformer alone.

    Attributes:
        whole: the contender of the whole model; None where the rest runs after the transformer.
        total: milliseconds of the whole model.
        pipelined: the same with all frames, or all steps of a video, queued before the last is
            waited for; of a frame, or of a video.
        first: of the first frame of a video, transformer and whole model.
        macs: operations of each timed step.
    """

    variant: Variant = field(kw_only=True)
    whole: Contender | None = None
    total: list[float] = field(default_factory=list)
    pipelined: list[float] = field(default_factory=list)
    first: list[tuple[float, float]] = field(default_factory=list)
    macs: list[int] = field(default_factory=list)

    def clear(self) -> None:
        """Discard the measurements so far."""
        for values in (self.ms, self.total, self.pipelined, self.first, self.macs):
            values.clear()

    def measured(self, fastest: Entry, base: Entry) -> dict[str, Any]:
        """Times for a row, and ratios of frames timed next to each other."""
        firsts = [statistics.median(values) for values in zip(*self.first, strict=True)]
        queued = {}
        if self.pipelined:
            queued = {
                "pipelined_ms": statistics.median(self.pipelined),
                "pipelined_speedup": _ratio(fastest.pipelined, self.pipelined),
            }
        return {
            **queued,
            "ms": statistics.median(self.ms),
            "total_ms": statistics.median(self.total),
            "first_ms": firsts[0],
            "first_total_ms": firsts[1],
            "speedup": _ratio(fastest.ms, self.ms),
            "total_speedup": _ratio(fastest.total, self.total),
            "base_speedup": _ratio(base.ms, self.ms),
        }


def measure_runtime(
    experiment: Experiment,
    plan: Plan,
    progress: Progress,
    keep: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Time every variant; those of one model and size take turns.

    Args:
        keep: called with the report so far after each model and size.
    """
    settings = {
        "device": plan.device,
        "dtype": plan.dtype,
        "frames": plan.steady,
        "views": list(plan.views),
        "streams": plan.streams,
        "weights": sorted(plan.weights),
        "compile": (plan.compile_mode or "usual") if plan.compiled else "",
    }
    detail: dict[str, Any] = {"dense_paths": {}, "objects": {}}
    report = Report(experiment, (), settings, origin(plan.device), detail=detail)
    run = _Run(plan, progress, detail["dense_paths"], detail["objects"])
    for (model, size), group in groupby(experiment.variants, lambda v: (v.model, v.size)):
        time = _time_detector if model == "vitdet" else _time_recogniser
        rows = time(list(group), size, run)
        report = replace(report, rows=(*report.rows, *rows))
        keep(report)
    return report


@dataclass(frozen=True)
class _Run:
    """What the groups of variants share.

    Attributes:
        dense_notes: trial times of the dense paths, by variant.
        found: objects in a frame, by detector.
    """

    plan: Plan
    progress: Progress
    dense_notes: dict[str, str]
    found: dict[str, float]


def _time_detector(variants: Sequence[Variant], size: int | None, run: _Run) -> list[Row]:
    """Milliseconds a frame: of the backbone in one stream, of the whole detector in another."""
    plan, progress, size = run.plan, run.progress, size or 1024
    progress.stage(f"vitdet at {size} px: building the model and its frames")
    model, clip = _detector(size, plan), _clip(plan, size)
    several = None if plan.streams == 1 else plan.streams
    dense = dense_macs(model.backbone, size) * plan.streams
    entries = [
        Entry(
            contender(model.backbone, variant, size, views=several),
            variant=variant,
            whole=contender(model, variant, size, views=several),
        )
        for variant in variants
    ]
    entries.append(_fastest_detector(variants[0], model, clip[0], dense, run))
    warm = WARM[plan.device_type]
    progress.begin(variants[0], (warm + plan.rounds + plan.steady) * len(entries), 1)

    def step(entry: Entry, pixels: Tensor) -> tuple[float, float]:
        assert entry.whole is not None
        _, spent = timed(entry.run, pixels)
        _, total = timed(entry.whole, pixels)
        progress.advance(1)
        return spent, total

    for entry in (
        entries
    ):  # one after the other, so that graphs and compiled code are counted to the right one
        for t in range(warm):
            step(entry, clip[t % len(clip)])
    for turn in range(plan.rounds):
        for entry in in_turn(entries, turn):
            _reset(entry)
            entry.first.append(step(entry, clip[0]))
    for entry in entries:
        entry.macs.append(entry.run.macs)
    for turn, pixels in enumerate(clip[1:]):
        for entry in in_turn(entries, turn):
            spent, total = step(entry, pixels)
            entry.ms.append(spent)
            entry.total.append(total)
            entry.macs.append(entry.run.macs)
    _queue(entries, clip[1:], plan.rounds)
    run.found[f"vitdet-{size}"] = _objects(entries[-1], clip[0])
    return _rows(entries, dense / 1e9, lambda entry: statistics.mean(entry.macs) / 1e9)


def _clip(plan: Plan, size: int) -> list[Tensor]:
    """The frames (streams, 3, size, size) of one video for each stream."""
    videos = [moving_objects(1 + plan.steady, (size, size), seed=s) for s in range(plan.streams)]
    return [plan.put(torch.cat(frames)) for frames in zip(*videos, strict=True)]


def _reset(entry: Entry) -> None:
    entry.run.reset()
    if entry.whole is not None:
        entry.whole.reset()


def _queue(entries: Sequence[Entry], frames: Sequence[Tensor], rounds: int) -> None:
    """Time whole models with their frames queued; on a CPU that is no different."""
    if frames[0].device.type == "cpu":
        return
    for turn in range(rounds):
        for entry in in_turn(entries, turn):
            assert entry.whole is not None
            entry.pipelined.append(pipelined(entry.whole, frames))


def _objects(entry: Entry, pixels: Tensor) -> float:
    """Objects that a detector finds in a frame, in the mean."""
    assert entry.whole is not None
    return statistics.mean(len(part) for part in entry.whole(pixels))


def _time_recogniser(variants: Sequence[Variant], size: int | None, run: _Run) -> list[Row]:
    """Milliseconds a video: all its views together, step by step."""
    plan, progress, size = run.plan, run.progress, size or 320
    progress.stage(f"vivit at {size} px: building the model and its videos")
    model = _recogniser(size, plan)
    views = plan.views[0] * plan.views[1]
    frames, tubelet = model.config.frames, model.config.tubelet
    clips = [
        torch.stack(list(moving_objects(frames, (size, size), seed=v)), 2) for v in range(views)
    ]
    parts = steps(plan.put(torch.cat(clips)), tubelet)
    together = torch.stack(parts, 1).flatten(0, 1)  # every step of every view
    dense = dense_macs(model.spatial, size) * len(together)
    fastest = _fastest_dense(variants[0], model.spatial, together, dense, run)
    for variant in variants:
        if variant.preset == SKIP:
            raise ConfigError(
                f"{variant.label}: the time of skipping is that of dense, by its share."
            )
    entries = [Entry(contender(model.spatial, v, size, views=views), variant=v) for v in variants]
    entries.append(fastest)
    vectors = together.new_zeros(views, len(parts), model.config.dim)
    behind = nn.Sequential(model.temporal, model.dropout, model.classifier)  # as in `classify`
    _, classes = _fastest(behind, vectors, run, name="behind the spatial model", reset=False)
    videos = {id(entry): [together] if entry is fastest else parts for entry in entries}
    progress.begin(variants[0], (1 + plan.rounds) * len(entries) * len(parts), 1)

    def video(entry: Entry) -> None:
        """Every step from an idle device to an idle one, then the same video without waiting."""
        entry.run.reset()
        timings, made = [], []
        for part in videos[id(entry)]:
            vector, spent = timed(entry.run, part)
            made.append(vector)
            timings.append(spent)
            entry.macs.append(entry.run.macs)
        _, rest = timed(classes, _vectors(made, views))
        entry.ms.append(sum(timings))
        entry.total.append(sum(timings) + rest)
        entry.first.append((timings[0], timings[0]))
        if plan.device_type != "cpu":
            entry.run.reset()
            entry.pipelined.append(_queued_video(entry.run, videos[id(entry)], classes, views))
        progress.advance(len(parts))

    for entry in (
        entries
    ):  # one after the other, so that graphs and compiled code are counted to the right one
        video(entry)
        entry.clear()
    for turn in range(plan.rounds):
        for entry in in_turn(entries, turn):
            video(entry)
    return _rows(entries, dense / 1e12, lambda entry: sum(entry.macs) / plan.rounds / 1e12)


def _rows(
    entries: Sequence[Entry], dense: float, operations: Callable[[Entry], float]
) -> list[Row]:
    fastest = entries[-1]
    base = next((e for e in entries if e.variant.preset == DENSE and e.variant.pool == 1), fastest)
    rows = []
    for entry in entries:
        measured = entry.measured(fastest, base)
        measured |= {"operations": operations(entry), "dense_operations": dense}
        rows.append(Row.of(entry.variant, frames=len(entry.ms), **measured))
    return rows


def _fastest_dense(like: Variant, model: nn.Module, example: Tensor, macs: int, run: _Run) -> Entry:
    """The dense path with the shortest trial time, named in the label."""
    name, best = _fastest(model, example, run)
    variant = Variant(f"Base model, {name}", DENSE, like.model, like.size)
    return Entry(Dense(best, macs), variant=variant)


def _fastest_detector(like: Variant, model: ViTDet, example: Tensor, macs: int, run: _Run) -> Entry:
    """The fastest dense paths of a backbone and of the whole detector."""
    inner, backbone = _fastest(model.backbone, example, run)
    outer, whole = _fastest(model, example, run, reset=False)
    label = outer if inner == outer else f"{outer}, backbone {inner}"
    variant = Variant(f"Base model, {label}", DENSE, like.model, like.size)
    return Entry(Dense(backbone, macs), variant=variant, whole=Dense(whole))


def _fastest(
    model: nn.Module, example: Tensor, run: _Run, *, name: str = "", reset: bool = True
) -> tuple[str, Callable[[Tensor], Any]]:
    """Name and call of the dense path with the shortest trial time."""
    name = name or f"{type(model).__name__} at {example.shape[-1]} px"
    paths = dense_paths(
        run.plan.dense_spec(model, example),
        lambda what: run.progress.stage(f"{name}: {what}"),
        reset=reset,
    )
    best = min(paths.trial_ms, key=lambda path: paths.trial_ms[path])
    trials = ", ".join(f"{path} {ms:.3g} ms" for path, ms in paths.trial_ms.items())
    run.dense_notes[name] = "; ".join([f"trials: {trials}", *paths.notes])
    return best, paths.runs[best]


def _vectors(made: Sequence[Tensor], views: int) -> Tensor:
    """(views, steps, D) from the vectors of each step, or of all steps at once."""
    return made[0].unflatten(0, (views, -1)) if len(made) == 1 else torch.stack([*made], 1)


def _queued_video(
    run: Contender, parts: Sequence[Tensor], classes: Callable[[Tensor], Tensor], views: int
) -> float:
    """Milliseconds of a video, from an idle device to an idle one, without waiting in between."""

    def whole(_: Tensor) -> Tensor:
        return classes(_vectors([run(part) for part in parts], views))

    return timed(whole, parts[0])[1]


def _ratio(dense: Sequence[float], own: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(dense, own, strict=True))


def _detector(size: int, plan: Plan) -> ViTDet:
    if BASE in plan.weights:
        return Weights(plan.weights[BASE], size, plan.dtype).vitdet(plan.device)
    torch.manual_seed(0)
    model = plan.place(vitdet_b(size=size))
    assert isinstance(model, ViTDet)
    with torch.no_grad():
        for stage in model.heads.stages:
            stage.get_submodule("scores").weight.mul_(LIVELY)  # type: ignore[operator]
    return model


def _recogniser(size: int, plan: Plan) -> ViViT:
    if "vivit" in plan.weights:
        return Weights(plan.weights["vivit"], None, plan.dtype).vivit(plan.device)
    torch.manual_seed(0)
    model = plan.place(vivit_b(size=size))
    assert isinstance(model, ViViT)
    return model
