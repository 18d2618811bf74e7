"""Detection: runs a ViTDet on a video under one variant, and scores its detections."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from eventful.errors import DataError
from eventful.models.vitdet.frames import Detections
from eventful.paper.data.records import Box, Video
from eventful.paper.evaluate.contenders import contender, dense_macs
from eventful.paper.evaluate.metrics import coco_library, coco_map50, fgfa_map50
from eventful.paper.evaluate.models import Weights
from eventful.paper.evaluate.padding import PaddingCounter
from eventful.paper.evaluate.runs import VideoResult
from eventful.paper.evaluate.variants import Variant
from eventful.paper.evaluate.workers import Tick

TICK = 8  # frames between two reports of progress


@dataclass(frozen=True)
class DetectionJob:
    """Run a ViTDet over a video.

    Attributes:
        frames: limit for each video; None for all.
        padding: also count which of the selected tokens are padding.
    """

    weights: Weights
    variant: Variant
    frames: int | None = None
    padding: bool = False

    def length(self, video: Video) -> int:
        """See `Job`."""
        try:
            return min(len(video), self.frames or len(video))
        except DataError:
            return 0

    def run(self, video: Video, device: str, tick: Tick) -> VideoResult:
        """See `Job`."""
        model = self.weights.vitdet(device)
        size = model.config.backbone.size
        step = contender(model, self.variant, size, maps=self.padding)
        counter = PaddingCounter(model.config.backbone.patch) if self.padding else None
        kept = FrameLog()
        for frame in islice(video, self.frames):
            pixels, placement = model.prepare(frame.pixels)
            (found,) = step(pixels, [placement])
            kept.add(found, frame.boxes, step.macs)
            if counter is not None and step.record is not None:
                counter.add(step.record, placement)
            if len(kept) % TICK == 0:
                tick(TICK)
        tick(len(kept) % TICK)
        facts: dict[str, Any] = {"name": video.name, "dense_macs": dense_macs(model, size)}
        if counter is not None:
            facts["padding"] = counter.summary()
        return VideoResult(kept.tensors(), facts)


class FrameLog:
    """Detections, truth and cost of every frame of a video."""

    def __init__(self) -> None:
        self.found: list[Detections] = []
        self.truth: list[Sequence[Box]] = []
        self.macs: list[int] = []

    def __len__(self) -> int:
        return len(self.macs)

    def add(self, found: Detections, truth: Sequence[Box], macs: int) -> None:
        """One more frame."""
        self.found.append(found.boxes_on_cpu())
        self.truth.append(truth)
        self.macs.append(macs)

    def tensors(self) -> dict[str, Tensor]:
        """For a `VideoResult`."""
        nothing = Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
        found = [*self.found, nothing]  # torch.cat needs one tensor at least
        objects = [box for frame in self.truth for box in frame]
        corners = [[box.x1, box.y1, box.x2, box.y2] for box in objects]
        return {
            "boxes": torch.cat([frame.boxes.float() for frame in found]),
            "scores": torch.cat([frame.scores.float() for frame in found]),
            "labels": torch.cat([frame.labels for frame in found]),
            "counts": torch.tensor([len(frame) for frame in self.found], dtype=torch.int64),
            "truth_boxes": torch.tensor(corners, dtype=torch.float64).reshape(-1, 4),
            "truth_labels": torch.tensor([box.label for box in objects], dtype=torch.int64),
            "truth_ignore": torch.tensor([box.ignore for box in objects], dtype=torch.bool),
            "truth_counts": torch.tensor([len(frame) for frame in self.truth], dtype=torch.int64),
            "macs": torch.tensor(self.macs, dtype=torch.int64),
        }


def score(results: Iterable[VideoResult], classes: Sequence[str]) -> dict[str, Any]:
    """Both mAP50s in percent, and the mean cost of a frame, from the results of all videos.

    COCO's is None where its library is missing.
    """
    found: list[Detections] = []
    truth: list[list[Box]] = []
    macs = dense = 0
    for result in results:
        found += found_in(result.tensors)
        truth += truth_in(result.tensors)
        macs += int(result.tensors["macs"].sum())
        dense += result.facts["dense_macs"] * len(result.tensors["macs"])
    scores = {"fgfa_map50": fgfa_map50(found, truth, classes)}
    if not coco_library():
        scores["coco_map50"] = coco_map50(found, truth, classes)
    return {
        **{name: _percent(score.value) for name, score in scores.items()},
        "operations": macs / max(len(found), 1) / 1e9,
        "dense_operations": dense / max(len(found), 1) / 1e9,
        "frames": len(found),
        "detail": {name: score.to_dict() for name, score in scores.items()},
    }


def _percent(value: float) -> float | None:
    """None if there was nothing to detect."""
    return None if math.isnan(value) else 100 * value


def found_in(tensors: dict[str, Tensor]) -> list[Detections]:
    """The detections of each frame, from the tensors of a `FrameLog`."""
    return Detections.split(
        tensors["boxes"], tensors["scores"], tensors["labels"], tensors["counts"].tolist()
    )


def truth_in(tensors: dict[str, Tensor]) -> list[list[Box]]:
    """The annotated boxes of each frame, from the tensors of a `FrameLog`."""
    counts = tensors["truth_counts"].tolist()
    names = ("truth_boxes", "truth_labels", "truth_ignore")
    frames = zip(*(tensors[name].split(counts) for name in names), strict=True)
    return [
        [
            Box(x1, y1, x2, y2, label, None, ignore)
            for (x1, y1, x2, y2), label, ignore in zip(
                boxes.tolist(), labels.tolist(), ignored.tolist(), strict=True
            )
        ]
        for boxes, labels, ignored in frames
    ]
