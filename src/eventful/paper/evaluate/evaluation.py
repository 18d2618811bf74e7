"""Evaluates the variants of an experiment on data, video by video, and makes a report."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from eventful import files
from eventful.bench.results import origin
from eventful.config import Config
from eventful.cost.counting import BlockWork, count_backbone
from eventful.errors import ConfigError, DamagedMediaError, DataError, MissingFileError
from eventful.models.vitdet.model import ViTDet, detector_config
from eventful.models.vivit.model import ViViT
from eventful.paper.data.catalog import open_dataset
from eventful.paper.data.problems import Problems
from eventful.paper.data.records import Video, VideoSet
from eventful.paper.data.world import camera_of
from eventful.paper.evaluate import action, detection, padding
from eventful.paper.evaluate.experiment import Experiment
from eventful.paper.evaluate.gates import GateJob, needs_tuning, with_gates
from eventful.paper.evaluate.metrics import coco_library
from eventful.paper.evaluate.models import Weights
from eventful.paper.evaluate.ray_workers import RayWorkers
from eventful.paper.evaluate.report import Report, Row
from eventful.paper.evaluate.runs import RunStore, VideoResult
from eventful.paper.evaluate.variants import BASE, SKIP, Variant
from eventful.paper.evaluate.workers import Item, Job, Workers
from eventful.surgery.conversion import block_shapes

TASKS = {"vitdet": "detection", "vivit": "action"}
TUNED_ON = (5, 8)  # videos of the training split, and frames of each, to tune thresholds on


@dataclass(frozen=True)
class Settings:
    """Data, weights and options of an evaluation.

    Attributes:
        data: folder, JSON file, or the name of generated videos, as for `open_dataset`.
        weights: files by name; an experiment that needs one calls it `base`.
        size: side of the frames of variants that name none.
        videos: use only this many, from the first on.
        frames: limit for each video (detection).
        views: temporal and spatial views of each video (recognition).
        workers: processes; None for one, or on Ray for as many as fit.
        threads: of each worker; None for an equal part of torch's threads.
        ray: address of a cluster whose processes do the work, empty for Ray on this machine; None
            for processes without Ray.
        out: folder for results; None keeps nothing.
        resume: keep the results that the folder already has.
    """

    data: str | Path
    weights: Mapping[str, Path]
    split: str | None = None
    size: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    videos: int | None = None
    frames: int | None = None
    views: tuple[int, int] = (4, 3)
    workers: int | None = None
    threads: int | None = None
    ray: str | None = None
    out: Path | None = None
    resume: bool = True


class Progress(Protocol):
    """Progress callbacks."""

    def stage(self, what: str) -> None:
        """Something that takes long and has no frames starts, such as compiling a model."""

    def begin(self, variant: Variant, frames: int, videos: int) -> None:
        """A variant starts, with this many frames and videos to process."""

    def advance(self, frames: int) -> None:
        """This many more frames are done."""


class NoProgress:
    """Reports no progress."""

    def stage(self, what: str) -> None:
        """See `Progress`."""

    def begin(self, variant: Variant, frames: int, videos: int) -> None:
        """See `Progress`."""

    def advance(self, frames: int) -> None:
        """See `Progress`."""


@dataclass
class _Run:
    """The state that all variants of one evaluation share."""

    experiment: Experiment
    settings: Settings
    data: VideoSet
    store: RunStore
    workers: Workers | RayWorkers
    progress: Progress
    problems: dict[str, str] = field(default_factory=dict)


def evaluate(
    experiment: Experiment, settings: Settings, progress: Progress | None = None
) -> Report:
    """Measure every variant for which weights are given."""
    problems = Problems()
    data = opened(experiment, settings, problems)
    variants, left_out = with_weights(experiment, settings)
    statistics: dict[str, float] = {}
    if experiment.kind == "padding":
        statistics = _padding(experiment, settings, data, problems)
    if not variants and not statistics:
        raise ConfigError(
            f"No weights for any variant of {experiment.name}: give "
            + ", ".join(f"--weights {name}=FILE" for name in experiment.weights)
        )
    for variant in variants:
        _check_weights(variant, settings, data)
    experiment, without = without_coco(experiment, variants)
    about = described(experiment, settings, data, variants)
    tuned_on: tuple[Video, ...] = ()
    if any([needs_tuning(variant) for variant in variants]):
        tuned_on = _training_videos(settings)
        names = files.digest(["\n".join(video.name for video in tuned_on)])
        about["tuned_on"] = {"names": names, "frames": TUNED_ON[1]}
    with folder_of(settings) as folder:
        store = RunStore.open(folder, about, resume=settings.resume)
        with workers_of(settings) as workers:
            run = _Run(experiment, settings, data, store, workers, progress or NoProgress())
            variants = [_tuned(run, variant, tuned_on) for variant in variants]
            rows, detail, groups = _measure(run, variants)
    about["variants"] = {variant.key: variant.to_dict() for variant in variants}
    noted = {f"annotation {i}": str(error) for i, error in enumerate(problems.found, start=1)}
    statistics |= detail.pop("padding", {})
    report = Report(
        experiment,
        tuple(rows),
        about,
        origin(settings.device),
        left_out | without,
        noted | run.problems,
        statistics,
        detail,
        groups,
    )
    if settings.out is not None:
        report.write(settings.out)
    return report


def opened(experiment: Experiment, settings: Settings, problems: Problems) -> VideoSet:
    """The videos to use, which must suit the experiment."""
    data = open_dataset(_absolute(settings.data), settings.split, on_problem=problems)
    data = replace(data, videos=data.videos[: settings.videos])
    _check(experiment, data)
    return data


def without_coco(
    experiment: Experiment, variants: Sequence[Variant]
) -> tuple[Experiment, dict[str, str]]:
    """Where COCO's library is missing, the experiment with FGFA's score alone, and a note."""
    missing = coco_library() if any(v.model == "vitdet" for v in variants) else ""
    if not missing:
        return experiment, {}
    if experiment.metric == "coco_map50":
        experiment = replace(experiment, metric="fgfa_map50")
    return experiment, {"coco_map50": missing}


def workers_of(settings: Settings) -> Workers | RayWorkers:
    """The processes that do the work."""
    if settings.ray is None:
        return Workers(settings.workers or 1, settings.device, settings.threads)
    used = tuple(settings.weights.values())
    return RayWorkers(settings.ray, settings.workers, settings.device, settings.threads, used)


def _training_videos(settings: Settings) -> tuple[Video, ...]:
    """Videos to tune thresholds on."""
    data = open_dataset(_absolute(settings.data), "train", on_problem=Problems())
    return tuple(data.videos[: TUNED_ON[0]])


def _tuned(run: _Run, variant: Variant, videos: Sequence[Video]) -> Variant:
    """A variant with a threshold for each gate; the errors on each video are kept as results."""
    if not needs_tuning(variant):
        return variant
    run.progress.stage(f"{variant.key}: tuning a threshold for each gate")
    job = GateJob(weights_of(variant, run.settings), variant, TUNED_ON[1])
    key = f"gates-of-{variant.key}"
    pending = [
        Item(job, run.store, key, i, video)
        for i, video in enumerate(videos)
        if not run.store.has(key, i, video.name)
    ]
    problems = run.workers.run(pending)
    if problems:
        raise DataError(f"Thresholds cannot be tuned: {next(iter(problems.values()))}")
    kept = [run.store.load(key, i, video.name) for i, video in enumerate(videos)]
    return with_gates(variant, kept)


Groups = dict[str, tuple[Row, ...]]


def _measure(run: _Run, variants: Sequence[Variant]) -> tuple[list[Row], dict[str, Any], Groups]:
    rows: dict[str, Row] = {}
    groups: dict[str, list[Row]] = {}
    cameras = {video.name: camera_of(video) for video in run.data}
    detail: dict[str, Any] = {}
    for planned in variants:
        variant = _with_share(planned, rows, run)
        results = list(_results(run, variant))
        if not results:
            raise DamagedMediaError(
                f"None of the {len(run.data)} videos can be used; the first problem: "
                f"{next(iter(run.problems.values()))}"
            )
        measured = _score(run, variant, results)
        detail[variant.key] = measured.pop("detail")
        counted = [r.facts["padding"] for r in results if "padding" in r.facts]
        if counted:
            detail["padding"] = padding.skipped(counted)
        rows[variant.key] = Row.of(
            variant,
            **{"videos": len(results), **measured},
            skipped_videos=len(run.data) - len(results),
        )
        for camera in dict.fromkeys(filter(None, cameras.values())):
            own = [result for result in results if cameras[result.facts["name"]] == camera]
            if own:
                row = Row.of(variant, **{"videos": len(own), **_score(run, variant, own)})
                groups.setdefault(camera, []).append(row)
    return list(rows.values()), detail, {name: tuple(own) for name, own in groups.items()}


def _with_share(variant: Variant, rows: Mapping[str, Row], run: _Run) -> Variant:
    """A skipping variant with the share of frames that costs as much as its `like`."""
    if variant.preset != SKIP or variant.share is not None:
        return variant
    pattern = rows.get(variant.like or "")
    if pattern is not None and pattern.operations and pattern.dense_operations:
        return replace(variant, share=min(1.0, pattern.operations / pattern.dense_operations))
    return replace(variant, share=_share_of_paper(variant, run.settings))


def _share_of_paper(variant: Variant, settings: Settings) -> float:
    """The cost of the paper's rule at this r as a share of dense, computed from shapes."""
    if variant.r is None and variant.fraction is None:
        raise ConfigError(
            "Frame skipping at equal cost: give r, or another preset to be equal to, or the share "
            "of the frames to compute."
        )
    weights = weights_of(variant, settings)
    with torch.device("meta"):
        if variant.model == "vitdet":
            config = weights.vitdet_config()
            shapes = block_shapes(ViTDet(config), config.backbone.size, Config.paper())
        else:
            sizes = weights.vivit_config()
            shapes = block_shapes(ViViT(sizes), variant.size or sizes.size, Config.paper())
    tokens = shapes[0].tokens
    r = variant.r if variant.r is not None else round(tokens * (variant.fraction or 0.0))
    step = count_backbone(shapes, Config.paper(), [BlockWork.uniform(min(r, tokens))] * len(shapes))
    return min(1.0, step.total / count_backbone(shapes).total)


def _results(run: _Run, variant: Variant) -> Iterator[VideoResult]:
    """Compute missing results, then read all of them in the order of the dataset."""
    store, key = run.store, variant.key
    job = _job(run, variant)
    videos = list(enumerate(run.data))
    pending = [(i, video) for i, video in videos if not store.has(key, i, video.name)]
    run.progress.begin(variant, sum(job.length(video) for _, video in pending), len(pending))
    items = [Item(job, store, key, i, video) for i, video in pending]
    problems = run.workers.run(items, run.progress.advance)
    for i, video in videos:
        if i in problems:
            run.problems[video.name] = problems[i]
        else:
            yield store.load(key, i, video.name)


def _job(run: _Run, variant: Variant) -> Job:
    settings, weights = run.settings, weights_of(variant, run.settings)
    if variant.model == "vitdet":
        counter = run.experiment.kind == "padding"
        return detection.DetectionJob(weights, variant, settings.frames, counter)
    config = weights.vivit_config()
    plan = action.view_plan(run.data.format, config, variant.size or settings.size, settings.views)
    return action.ActionJob(weights, variant, plan)


def weights_of(variant: Variant, settings: Settings) -> Weights:
    """The weights of a variant and how to run them."""
    size = (variant.size or settings.size) if variant.model == "vitdet" else None
    path = Path(_absolute(settings.weights[variant.weights]))
    return Weights(path, size, settings.dtype)


def _absolute(source: str | Path) -> str | Path:
    """A path for processes with another working directory; names of videos stay as they are."""
    path = Path(source)
    return path.resolve() if path.exists() else source


def _score(run: _Run, variant: Variant, results: Sequence[VideoResult]) -> dict[str, Any]:
    if variant.model == "vitdet":
        return detection.score(results, run.data.classes)
    return action.score(results)


def _padding(
    experiment: Experiment, settings: Settings, data: VideoSet, problems: Problems
) -> dict[str, float]:
    """Padding statistics from the image sizes alone."""
    variant = experiment.variants[0]
    if variant.weights in settings.weights:
        config = weights_of(variant, settings).vitdet_config()
    else:
        config = detector_config(len(data.classes), variant.size or 1024, False, "bicubic")
    made = padding.mean_padding(data.videos, config, problems)
    tokens = (config.backbone.size // config.backbone.patch) ** 2
    if made and variant.r is not None:
        skipped = padding.skipped_if_none_is_padding(made["padded_tokens"], tokens, variant.r)
        made["unpadded_skipped_at_least"] = skipped
    return made


def _check(experiment: Experiment, data: VideoSet) -> None:
    if data.task != TASKS[experiment.model]:
        raise ConfigError(
            f"{experiment.model} is for {TASKS[experiment.model]}, and {data.format} is a set for "
            f"{data.task}; {experiment.name} needs {experiment.data or 'other data'}."
        )
    if not data.videos:
        raise MissingFileError(
            f"The split {data.split} of the {data.format} data holds no videos; check it with: "
            "eventful data check"
        )


def _check_weights(variant: Variant, settings: Settings, data: VideoSet) -> None:
    """Raise unless the weights have the data's classes and can run at this size."""
    weights = weights_of(variant, settings)
    if variant.model == "vitdet":
        detector = weights.vitdet_config()
        known, size = detector.heads.classes, detector.backbone.size
        patch = detector.backbone.patch
    else:
        recogniser = weights.vivit_config()
        known, size = recogniser.classes, variant.size or settings.size or recogniser.size
        patch = recogniser.patch
    if size % patch:
        raise ConfigError(
            f"Frames of {size} px do not consist of whole patches of {patch} px: choose "
            f"{size // patch * patch or patch} or another multiple."
        )
    # Fewer classes in the data are an error, too: its labels belong to other weights.
    if known != len(data.classes):
        raise ConfigError(
            f"{weights.path} has {known} classes, the data has {len(data.classes)}: "
            "evaluate weights that were trained for this data."
        )


def with_weights(
    experiment: Experiment, settings: Settings
) -> tuple[list[Variant], dict[str, str]]:
    """The variants whose weights are given, and why the others are left out."""
    known = set(settings.weights)
    unknown = sorted(known - set(experiment.weights) - {BASE})
    if unknown:
        raise ConfigError(
            f"{experiment.name} does not use weights named {unknown[0]!r}; it needs "
            f"{', '.join(experiment.weights)}."
        )
    kept = [variant for variant in experiment.variants if variant.weights in known]
    left_out = {
        variant.key: f"needs --weights {variant.weights}=FILE"
        for variant in experiment.variants
        if variant.weights not in known
    }
    return kept, left_out


def described(
    experiment: Experiment, settings: Settings, data: VideoSet, variants: Sequence[Variant]
) -> dict[str, Any]:
    """Everything the numbers depend on; two runs with equal values give equal numbers."""
    names = [video.name for video in data.videos]
    used = dict.fromkeys(variant.weights for variant in variants)
    return {
        "experiment": experiment.name,
        "kind": experiment.kind,
        "data": {
            "layout": data.format,  # the name that earlier runs have in run.json
            "split": data.split,
            "classes": len(data.classes),
            "videos": len(names),
            "names": files.digest(["\n".join(names)]),
        },
        "weights": {name: files.file_digest(settings.weights[name]) for name in used},
        "variants": {variant.key: variant.to_dict() for variant in variants},
        "size": settings.size,
        "frames": settings.frames,
        "views": list(settings.views) if experiment.model == "vivit" else None,
        "device": settings.device.partition(":")[0],
        "dtype": settings.dtype,
    }


@contextmanager
def folder_of(settings: Settings) -> Iterator[Path]:
    """Where results are stored: the folder asked for, or one that is deleted afterwards."""
    if settings.out is not None:
        yield settings.out
        return
    with tempfile.TemporaryDirectory(prefix="eventful-") as folder:
        yield Path(folder)
