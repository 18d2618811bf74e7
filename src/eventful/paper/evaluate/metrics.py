"""The numbers of the paper's tables: mAP50 for detection, top-1 and top-5 for recognition.

Detection has two, because the literature on VID has two. `coco_map50` is COCO's average precision
at IoU 0.5 over 101 recalls, computed by faster-coco-eval. `fgfa_map50` is that of the ILSVRC
development kit, as used by FGFA and later work: each box has its own threshold, and the whole area
under the curve counts. No library computes it, so it is computed here.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eventful.errors import ConfigError, MissingDependencyError
from eventful.models.vitdet.frames import Detections
from eventful.paper.data.records import Box
from eventful.paper.evaluate import precision
from eventful.surgery.libraries import load

COCO_LIBRARY = "faster_coco_eval"
MAX_DETECTIONS = 100  # per class and frame; COCO ignores the rest


@dataclass(frozen=True)
class DetectionScore:
    """A mean average precision.

    Args:
        metric: `"coco_map50"` or `"fgfa_map50"`.
        value: Mean over the classes that occur, in [0, 1]; NaN where none does.
        per_class: By name; None for a class that does not occur.
        backend: The library that computed it.
    """

    metric: str
    value: float
    per_class: dict[str, float | None]
    frames: int
    objects: int
    detections: int
    backend: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN."""
        return {**asdict(self), "value": None if math.isnan(self.value) else self.value}


@dataclass(frozen=True)
class RecognitionScore:
    """Shares of videos whose label is the first, or among the first five, of the model's."""

    top1: float
    top5: float
    videos: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def coco_map50(
    found: Sequence[Detections], truth: Sequence[Sequence[Box]], classes: Sequence[str]
) -> DetectionScore:
    """COCO's mean average precision at IoU 0.5, by faster-coco-eval.

    At most 100 detections per class and frame count. An ignored box is treated as a COCO crowd:
    a detection that lies in it by half or more is left out. COCO also leaves out a wrong detection
    whose right edge lies left of its left edge.

    Args:
        found: One per frame.
        truth: Boxes per frame, in the same order.

    Raises:
        MissingDependencyError: faster-coco-eval is not installed.
    """
    frames = _arrays(found, truth, classes)
    library = load(COCO_LIBRARY)
    scores = coco_precisions(frames, classes, library.COCO, library.COCOeval_faster)
    return _score("coco_map50", scores, classes, frames, "faster-coco-eval")


def coco_library() -> str:
    """'' if COCO's score can be computed here, else what is missing."""
    try:
        load(COCO_LIBRARY)
    except MissingDependencyError as error:
        return str(error)
    return ""


def fgfa_map50(
    found: Sequence[Detections], truth: Sequence[Sequence[Box]], classes: Sequence[str]
) -> DetectionScore:
    """VID's mean average precision, with the threshold min(0.5, w·h / ((w + 10)(h + 10))).

    Sides and overlaps count whole pixels: a box from 3 to 5 is 3 wide.

    Args:
        found: One per frame.
        truth: Boxes per frame, in the same order.
    """
    frames = _arrays(found, truth, classes)
    scores = _vid_precisions(frames, classes)
    return _score("fgfa_map50", scores, classes, frames, "numpy")


def average_views(logits: Tensor) -> Tensor:
    """Class probabilities of a video from its views: logits averaged, then softmax.

    Args:
        logits: (..., V, C).
    """
    return logits.float().mean(-2).softmax(-1)


def top_k(scores: Tensor, labels: Tensor) -> RecognitionScore:
    """Top-1 and top-5 of videos.

    A label whose score ties with others ranks below them, so that a model with equal scores for all
    classes does not count as correct.

    Args:
        scores: One row per video, views already averaged, (V, C).
        labels: (V).
    """
    if scores.ndim != 2 or labels.shape != scores.shape[:1]:
        raise ConfigError(
            f"top-k needs scores (videos, classes) and one label per video, not "
            f"{tuple(scores.shape)} and {tuple(labels.shape)}"
        )
    if len(labels) == 0:
        return RecognitionScore(float("nan"), float("nan"), 0)
    own = scores.gather(1, labels[:, None])
    if not torch.isfinite(scores).all():
        raise ConfigError("scores hold NaN or Inf: check the model that made them")
    above = (scores >= own).sum(1) - 1  # classes that rank before the label
    top1, top5 = ((above < k).double().mean().item() for k in (1, 5))
    return RecognitionScore(top1, top5, len(labels))


@dataclass(frozen=True)
class _FrameArrays:
    boxes: precision.Floats
    scores: precision.Floats
    labels: np.ndarray
    truths: precision.Floats
    truth_labels: np.ndarray
    ignore: precision.Flags


def _arrays(
    found: Sequence[Detections], truth: Sequence[Sequence[Box]], classes: Sequence[str]
) -> list[_FrameArrays]:
    if len(found) != len(truth):
        raise ConfigError(f"{len(found)} frames of detections and {len(truth)} of boxes: give both")
    frames = []
    for detected, boxes in zip(found, truth, strict=True):
        frame = _FrameArrays(
            detected.boxes.detach().cpu().double().numpy(),
            detected.scores.detach().cpu().double().numpy(),
            detected.labels.detach().cpu().numpy(),
            np.array([(b.x1, b.y1, b.x2, b.y2) for b in boxes], float).reshape(-1, 4),
            np.array([b.label for b in boxes], int),
            np.array([b.ignore for b in boxes], bool),
        )
        if not (np.isfinite(frame.boxes).all() and np.isfinite(frame.scores).all()):
            raise ConfigError("detections hold NaN or Inf: check the model that made them")
        if not (
            np.isfinite(frame.truths).all() and (frame.truths[:, 2:] >= frame.truths[:, :2]).all()
        ):
            raise ConfigError(
                "boxes of the truth hold NaN, Inf or a right edge left of the left one"
            )
        for labels in (frame.labels, frame.truth_labels):
            if len(labels) and not (labels.min() >= 0 and labels.max() < len(classes)):
                raise ConfigError(
                    f"labels from {labels.min()} to {labels.max()}, but there are {len(classes)} "
                    "classes: give the classes the model was trained on"
                )
        frames.append(frame)
    return frames


def _vid_precisions(frames: list[_FrameArrays], classes: Sequence[str]) -> list[float | None]:
    """VID's average precision of each class; None for a class that does not occur."""
    matches: list[list[precision.Matches]] = [[] for _ in classes]
    for frame in frames:
        for label in np.union1d(frame.labels, frame.truth_labels).astype(int):
            own = np.flatnonzero(frame.labels == label)
            order = own[np.argsort(-frame.scores[own], kind="stable")]
            truths = frame.truth_labels == label
            matches[label].append(
                precision.match_vid(
                    frame.scores[order],
                    frame.boxes[order],
                    frame.truths[truths],
                    frame.ignore[truths],
                )
            )
    return [precision.vid_precision(found) for found in matches]


def _score(
    metric: str,
    scores: list[float | None],
    classes: Sequence[str],
    frames: list[_FrameArrays],
    backend: str,
) -> DetectionScore:
    occurring = [score for score in scores if score is not None]
    return DetectionScore(
        metric=metric,
        value=float(np.mean(occurring)) if occurring else float("nan"),
        per_class=dict(zip(classes, scores, strict=True)),
        frames=len(frames),
        objects=sum(int((~frame.ignore).sum()) for frame in frames),
        detections=sum(len(frame.scores) for frame in frames),
        backend=backend,
    )


def coco_precisions(
    frames: list[_FrameArrays], classes: Sequence[str], dataset_class: Any, evaluator_class: Any
) -> list[float | None]:
    """COCO's average precision of each class; None for a class that does not occur.

    Args:
        dataset_class: `COCO` of a library with the interface of pycocotools.
        evaluator_class: `COCOeval` of the same library.
    """
    images = [{"id": i} for i in range(1, len(frames) + 1)]
    categories = [{"id": c, "name": name} for c, name in enumerate(classes, start=1)]
    with redirect_stdout(io.StringIO()):  # the libraries print their progress
        sides = []
        for annotations in _annotations(frames):
            side = dataset_class()
            side.dataset = {"images": images, "categories": categories, "annotations": annotations}
            side.createIndex()
            sides.append(side)
        run = evaluator_class(*sides, "bbox")
        run.params.iouThrs = np.array([0.5])
        run.params.areaRng, run.params.areaRngLbl = [[0, 1e10]], ["all"]
        run.params.maxDets = [MAX_DETECTIONS]
        run.evaluate()
        run.accumulate()
    curves = np.asarray(run.eval["precision"])[0, :, :, 0, 0]  # (recalls, classes)
    return [None if (curve < 0).all() else float(curve.mean()) for curve in curves.T]


def _annotations(frames: list[_FrameArrays]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Truth and detections as lists of COCO annotations."""
    truth: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for i, frame in enumerate(frames, start=1):
        for box, label, ignore in zip(frame.truths, frame.truth_labels, frame.ignore, strict=True):
            truth.append({**_entry(i, box, label, len(truth)), "iscrowd": int(ignore)})
        for box, label, score in zip(frame.boxes, frame.labels, frame.scores, strict=True):
            found.append({**_entry(i, box, label, len(found)), "iscrowd": 0, "score": float(score)})
    return truth, found


def _entry(image: int, box: Any, label: int, before: int) -> dict[str, Any]:
    left, top, right, bottom = map(float, box)
    width, height = right - left, bottom - top
    return {
        "id": before + 1,  # the libraries take an id of 0 for no match
        "image_id": image,
        "category_id": int(label) + 1,
        "bbox": [left, top, width, height],
        "area": width * height,
    }
