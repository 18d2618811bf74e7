"""Losses of the heads, on sampled candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.models.vitdet import boxes as box
from eventful.models.vitdet.frames import Target
from eventful.models.vitdet.rpn import Predictions

BoxLoss = Literal["l1", "giou"]


@dataclass(frozen=True)
class Sampling:
    """How many candidates of an image are trained on, and how they are labelled.

    Attributes:
        count: candidates of one image.
        positive: largest share of foreground among them.
        low: IoU below which a candidate is background.
        high: IoU from which it is foreground; between the two it is ignored.
        rescue: the best candidate of each object is foreground, whatever its IoU.
        ignore: a candidate that is not foreground is ignored, too, from this share of its area on
            that lies in one box to be ignored.
    """

    count: int
    positive: float
    low: float
    high: float
    rescue: bool = False
    ignore: float = 0.5

    def match(self, target: Target, candidates: Tensor) -> box.Matches:
        """Candidates (N, 4) against the objects and the places to be ignored of an image."""
        overlap = box.iou(target.boxes.to(candidates), candidates)
        found = box.match(overlap, self.low, self.high, rescue=self.rescue)
        if target.ignored is None or not len(target.ignored):
            return found
        spared = box.covered(candidates, target.ignored.to(candidates)) >= self.ignore
        spared &= found.label != box.FOREGROUND
        return box.Matches(found.index, found.label.masked_fill(spared, box.IGNORED))

    def draw(self, label: Tensor) -> tuple[Tensor, Tensor]:
        """Indices of a random choice among the foreground, and among the background."""
        foreground = (label == box.FOREGROUND).nonzero()[:, 0]
        background = (label == box.BACKGROUND).nonzero()[:, 0]
        positives = min(len(foreground), int(self.count * self.positive))
        negatives = min(len(background), self.count - positives)
        return _some(foreground, positives), _some(background, negatives)


RPN_SAMPLING = Sampling(256, 0.5, 0.3, 0.7, rescue=True)


def _some(index: Tensor, count: int) -> Tensor:
    return index[torch.randperm(len(index), device=index.device)[:count]]


def rpn_losses(
    found: Predictions, targets: Sequence[Target], sampling: Sampling = RPN_SAMPLING
) -> dict[str, Tensor]:
    """Objectness by cross entropy, boxes by L1, both over all sampled anchors."""
    anchors, coder = torch.cat(found.anchors), box.BoxCoder()
    logits, codes = torch.cat(found.logits, dim=1), torch.cat(found.codes, dim=1)
    objectness, distance = logits.sum() * 0, codes.sum() * 0
    for image, target in enumerate(targets):
        with torch.no_grad():
            matches = sampling.match(target, anchors)
            foreground, background = sampling.draw(matches.label)
        chosen = torch.cat([foreground, background])
        truth = (torch.arange(len(chosen), device=chosen.device) < len(foreground)).float()
        objectness = objectness + F.binary_cross_entropy_with_logits(
            logits[image, chosen], truth, reduction="sum"
        )
        if len(foreground):
            goal = coder.encode(anchors[foreground], target.boxes[matches.index[foreground]])
            distance = distance + (codes[image, foreground] - goal).abs().sum()
    share = 1.0 / (sampling.count * max(len(targets), 1))
    return {"rpn_objectness": objectness * share, "rpn_box": distance * share}


@dataclass(frozen=True)
class Sampled:
    """Candidates of one image with their training targets.

    Attributes:
        boxes: (n, 4).
        labels: (n,) class; the number of classes is background.
        goals: (n, 4) boxes of their objects; undefined for background.
    """

    boxes: Tensor
    labels: Tensor
    goals: Tensor


@torch.no_grad()
def label_candidates(
    candidates: Tensor, target: Target, sampling: Sampling, classes: int, *, choose: bool = True
) -> Sampled:
    """Match candidates to an image's objects and leave out those to be ignored.

    Args:
        choose: also sample them, with the objects themselves among them.
    """
    if choose:
        candidates = torch.cat([candidates, target.boxes.to(candidates)])
    matches = sampling.match(target, candidates)
    if choose:
        chosen = torch.cat(sampling.draw(matches.label))
    else:
        chosen = (matches.label != box.IGNORED).nonzero()[:, 0]
    candidates = candidates[chosen]
    matches = box.Matches(matches.index[chosen], matches.label[chosen])
    if not len(target.boxes):
        return Sampled(candidates, torch.full_like(matches.index, classes), candidates)
    labels = target.labels[matches.index].clone()
    labels[matches.label != box.FOREGROUND] = classes
    return Sampled(candidates, labels, target.boxes[matches.index].to(candidates))


def box_losses(
    logits: Tensor,
    codes: Tensor,
    sampled: Sequence[Sampled],
    coder: box.BoxCoder,
    *,
    loss: BoxLoss = "l1",
) -> dict[str, Tensor]:
    """Class by cross entropy; boxes of foreground candidates by L1 on codes, or by GIoU.

    Args:
        logits: (n, classes + 1), background last.
        codes: (n, classes or 1, 4).
    """
    labels = torch.cat([part.labels for part in sampled])
    boxes, goals = (torch.cat([getattr(p, name) for p in sampled]) for name in ("boxes", "goals"))
    if not len(labels):
        return {"class": logits.sum() * 0, "box": codes.sum() * 0}
    foreground = (labels < logits.shape[1] - 1).nonzero()[:, 0]
    column = labels[foreground] if codes.shape[1] > 1 else torch.zeros_like(foreground)
    chosen, reference, goal = codes[foreground, column], boxes[foreground], goals[foreground]
    if loss == "giou":
        distance = box.giou_loss(coder.decode(reference, chosen), goal)
    else:
        distance = (chosen - coder.encode(reference, goal)).abs()
    return {
        "class": F.cross_entropy(logits, labels),
        "box": distance.sum() / len(labels) + codes.sum() * 0,
    }
