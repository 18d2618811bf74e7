"""Action recognition: runs a ViViT on the views of a video under one variant, and scores it.

The spatial model treats each view as a video of its own and is reset before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from eventful.cost.counting import count_backbone
from eventful.models.shapes import temporal_blocks
from eventful.models.vivit.model import ViViTConfig, steps
from eventful.models.vivit.views import prepare
from eventful.paper.data.records import Video
from eventful.paper.data.views import EPIC_VIEWS, KINETICS_VIEWS, ViewPlan
from eventful.paper.evaluate.contenders import contender, dense_macs
from eventful.paper.evaluate.metrics import average_views, top_k
from eventful.paper.evaluate.models import Weights
from eventful.paper.evaluate.runs import VideoResult
from eventful.paper.evaluate.variants import Variant
from eventful.paper.evaluate.workers import Tick


@dataclass(frozen=True)
class ActionJob:
    """Run a ViViT over the views of a video."""

    weights: Weights
    variant: Variant
    plan: ViewPlan

    def length(self, video: Video) -> int:
        """See `Job`."""
        return len(self.plan) * self.plan.frames

    def run(self, video: Video, device: str, tick: Tick) -> VideoResult:
        """See `Job`."""
        model = self.weights.vivit(device)
        step = contender(model.spatial, self.variant, self.plan.size)
        temporal = count_backbone(temporal_blocks(model)).total
        dense = dense_macs(model.spatial, self.plan.size) * model.config.steps + temporal
        dtype = model.classifier.weight.dtype
        logits, macs = [], []
        for view in self.plan.cut(video.frames):
            step.reset()
            clip = prepare(view.pixels.permute(0, 2, 3, 1).to(device)).to(dtype)
            vectors, cost = [], temporal
            for part in steps(clip, model.config.tubelet):
                vectors.append(step(part))
                cost += step.macs
            with torch.no_grad():
                logits.append(model.classify(torch.stack(vectors, dim=1))[0].float())
            macs.append(cost)
            tick(self.plan.frames)
        tensors = {
            "logits": torch.stack(logits),
            "label": torch.tensor([-1 if video.label is None else video.label]),
            "macs": torch.tensor(macs, dtype=torch.int64),
        }
        return VideoResult(tensors, {"name": video.name, "dense_macs": dense * len(macs)})


def view_plan(
    data_format: str, config: ViViTConfig, size: int | None, views: tuple[int, int]
) -> ViewPlan:
    """The views of a dataset for a model.

    Args:
        data_format: of the data; Kinetics is read with a stride of two, as its weights were
            trained.
        size: side of the crops; None for the model's own.
        views: temporal and spatial ones.
    """
    usual = KINETICS_VIEWS if data_format.startswith("kinetics") else EPIC_VIEWS
    temporal, spatial = views
    return replace(
        usual,
        frames=config.frames,
        temporal=temporal,
        spatial=spatial,
        size=size or config.size,
    )


def score(results: Iterable[VideoResult]) -> dict[str, Any]:
    """Top-1 and top-5 in percent, and the mean cost of a video; needs at least one result."""
    scores, labels = [], []
    macs = dense = 0
    for result in results:
        scores.append(average_views(result.tensors["logits"]))
        labels.append(result.tensors["label"])
        macs += int(result.tensors["macs"].sum())
        dense += result.facts["dense_macs"]
    count = len(scores)
    found = top_k(torch.stack(scores), torch.cat(labels))
    return {
        "top1": 100 * found.top1,
        "top5": 100 * found.top5,
        "operations": macs / count / 1e12,
        "dense_operations": dense / count / 1e12,
        "videos": count,
        "detail": {},
    }
