"""Losses of the heads, on sampled candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.models.vitdet import boxes as box
from eventful.models.vitdet.frames import Targets
from eventful.models.vitdet.rpn import PredictionRows, Predictions

BoxLoss = Literal["l1", "giou"]

_MOST_PAIRS = 1 << 25  # of a candidate and an object, compared at once
_NO_CLASS = -100  # of a place without a candidate


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

    def match(
        self, targets: Targets, candidates: Tensor, valid: Tensor | None = None
    ) -> box.Matches:
        """Candidates of each image against its objects and the places to be ignored.

        Args:
            candidates: (B, N, 4), or (N, 4) that all images share.
            valid: (B, N) mask of those that count; the others are ignored.
        """
        images = len(targets.labels)
        pairs = candidates.shape[-2] * max(targets.labels.shape[1], targets.ignored.shape[1])
        step = max(1, _MOST_PAIRS // max(1, pairs))
        parts = []
        for start in range(0, images, step):
            some = slice(start, start + step)
            own = candidates if candidates.dim() == 2 else candidates[some]
            parts.append(self._match(targets[some], own))
        label = torch.cat([part.label for part in parts])
        if valid is not None:
            label = label.masked_fill(~valid, box.IGNORED)
        return box.Matches(torch.cat([part.index for part in parts]), label)

    def _match(self, targets: Targets, candidates: Tensor) -> box.Matches:
        # Places without an object hold empty boxes, which overlap and cover nothing.
        overlap = box.iou(targets.objects.boxes, candidates)
        found = box.match(overlap, self.low, self.high, rescue=self.rescue)
        if not targets.ignored.shape[1]:
            return found
        spared = box.covered(candidates, targets.ignored) >= self.ignore
        spared &= found.label != box.FOREGROUND
        return box.Matches(found.index, found.label.masked_fill(spared, box.IGNORED))

    def draw(self, label: Tensor) -> tuple[Tensor, Tensor]:
        """A random choice among the foreground, filled up from the background.

        Args:
            label: (B, N).

        Returns:
            Indices (B, `count` or N), the foreground first, and a mask of those that are drawn:
            where there are too few candidates, the last indices mean nothing.
        """
        keys = torch.rand(label.shape, device=label.device)
        slots = min(self.count, label.shape[1])
        most = min(int(self.count * self.positive), slots)
        none = keys.new_full((), -1.0)
        first, foreground = torch.where(label == box.FOREGROUND, keys, none).topk(most)
        second, background = torch.where(label == box.BACKGROUND, keys, none).topk(slots)
        positives = (first >= 0).sum(dim=1, keepdim=True)
        slot = torch.arange(slots, device=label.device)
        taken = torch.where(slot < positives, slot, slot - positives + most)
        index = torch.cat([foreground, background], dim=1).gather(1, taken)
        return index, torch.cat([first, second], dim=1).gather(1, taken) >= 0


RPN_SAMPLING = Sampling(256, 0.5, 0.3, 0.7, rescue=True)


def rpn_losses(
    found: Predictions | PredictionRows, targets: Targets, sampling: Sampling = RPN_SAMPLING
) -> dict[str, Tensor]:
    """Objectness by cross entropy, boxes by L1, both over all sampled anchors."""
    anchors, coder = torch.cat(found.anchors), box.BoxCoder()
    logits, codes = torch.cat(found.logits, dim=1), torch.cat(found.codes, dim=1)
    with torch.no_grad():
        matches = sampling.match(targets, anchors)
        chosen, drawn = sampling.draw(matches.label)
        foreground = drawn & (matches.label.gather(1, chosen) == box.FOREGROUND)
        goals = box.rows(targets.objects.boxes, matches.index.gather(1, chosen))
        goals = coder.encode(anchors[chosen], goals)
    objectness = F.binary_cross_entropy_with_logits(
        logits.gather(1, chosen).masked_fill(~drawn, 0),
        foreground.float(),
        drawn.float(),
        reduction="sum",
    )
    distance = _distance(box.rows(codes, chosen), goals, foreground)
    share = 1.0 / (sampling.count * max(len(logits), 1))
    return {"rpn_objectness": objectness * share, "rpn_box": distance.sum() * share}


def _distance(codes: Tensor, goals: Tensor, mask: Tensor) -> Tensor:
    """L1 distance of codes (..., 4) where the mask (...) holds; elsewhere 0, with gradients 0."""
    outside = ~mask[..., None]
    return (codes.masked_fill(outside, 0) - goals.masked_fill(outside, 0)).abs()


@dataclass(frozen=True)
class Sampled:
    """Candidates of B images with their training targets.

    Attributes:
        boxes: (B, n, 4).
        valid: (B, n) mask of the places with a candidate; the others have no loss.
        labels: (B, n) class; the number of classes is background.
        goals: (B, n, 4) boxes of their objects; undefined for background.
    """

    boxes: Tensor
    valid: Tensor
    labels: Tensor
    goals: Tensor


@torch.no_grad()
def label_candidates(
    candidates: box.Padded,
    targets: Targets,
    sampling: Sampling,
    classes: int,
    *,
    choose: bool = True,
) -> Sampled:
    """Match candidates to the objects of their images and leave out those to be ignored.

    Args:
        choose: also sample them, with the objects themselves among them.
    """
    boxes, valid, objects = candidates.boxes, candidates.valid, targets.objects
    if choose:
        boxes = torch.cat([boxes, objects.boxes], dim=1)
        valid = torch.cat([valid, objects.valid], dim=1)
    matches = sampling.match(targets, boxes, valid)
    index, label, valid = matches.index, matches.label, matches.label != box.IGNORED
    if choose:
        chosen, valid = sampling.draw(label)
        boxes = box.rows(boxes, chosen)
        index, label = index.gather(1, chosen), label.gather(1, chosen)
    labels = targets.labels.gather(1, index).masked_fill(label != box.FOREGROUND, classes)
    taken = box.Padded.where(valid, boxes)
    return Sampled(taken.boxes, valid, labels, box.rows(objects.boxes, index))


def box_losses(
    logits: Tensor,
    codes: Tensor,
    sampled: Sampled,
    coder: box.BoxCoder,
    *,
    loss: BoxLoss = "l1",
) -> dict[str, Tensor]:
    """Class by cross entropy; boxes of foreground candidates by L1 on codes, or by GIoU.

    Both are means over all candidates.

    Args:
        logits: (B * n, classes + 1), background last.
        codes: (B * n, classes or 1, 4).
    """
    labels, valid = sampled.labels.flatten(), sampled.valid.flatten()
    boxes, goals = sampled.boxes.flatten(0, 1), sampled.goals.flatten(0, 1)
    foreground = valid & (labels < logits.shape[1] - 1)
    column = labels.clamp(max=codes.shape[1] - 1)[:, None]
    chosen = box.rows(codes, column)[:, 0]
    if loss == "giou":
        chosen = chosen.masked_fill(~foreground[:, None], 0)
        distance = box.giou_loss(coder.decode(boxes, chosen), goals).masked_fill(~foreground, 0)
    else:
        distance = _distance(chosen, coder.encode(boxes, goals), foreground)
    entropy = F.cross_entropy(
        logits, labels.masked_fill(~valid, _NO_CLASS), ignore_index=_NO_CLASS, reduction="sum"
    )
    count = valid.sum().clamp_min(1)
    return {"class": entropy / count, "box": distance.sum() / count}
