"""ImageNet VID's average precision: which detections are correct, and the area under the curve.

The matching takes one class of one frame at a time, detections in falling order of score.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

IGNORE_IOU = 0.5  # share of a detection inside an ignored box at which it is left out
TOLERANCE = 10.0  # pixels by which VID widens a small box in each direction


@dataclass(frozen=True)
class Matches:
    """Detections of one class in one frame, in falling order of score.

    Args:
        correct: Matched an object that no detection of a higher score had matched.
        ignored: Lies in an ignored box, so counts as neither right nor wrong.
        objects: Number of objects in the truth.
    """

    scores: Floats
    correct: Flags
    ignored: Flags
    objects: int


def overlaps(boxes: Floats, others: Floats, *, covered: Flags) -> Floats:
    """Intersection over union of (K, 4) with (L, 4) corners: (K, L).

    The right and bottom pixel belong to a box, so one from 3 to 5 is 3 wide.

    Args:
        covered: Of the others (L), whether to divide by the area of the first box alone: how much
            of it they cover. COCO does so for crowds.
    """
    corner = np.maximum(boxes[:, None, :2], others[None, :, :2])
    far = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    shared = np.clip(far - corner + 1.0, 0, None).prod(-1)
    area = (boxes[:, 2:] - boxes[:, :2] + 1.0).prod(-1)[:, None]
    other = (others[:, 2:] - others[:, :2] + 1.0).prod(-1)[None, :]
    union = np.where(covered[None, :], area, area + other - shared)
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def match_vid(scores: Floats, boxes: Floats, truths: Floats, ignore: Flags) -> Matches:
    """VID's rule: each box has its own threshold, lower for small ones.

    min(0.5, w·h / ((w + 10)(h + 10))), sides and overlaps counting whole pixels. The best among
    the free objects whose threshold is met. Ignored objects are not part of the benchmark; they are
    treated as COCO treats crowds.
    """
    iou = overlaps(boxes, truths, covered=ignore)
    threshold = vid_thresholds(truths)
    correct, ignored = np.zeros(len(boxes), bool), np.zeros(len(boxes), bool)
    free = ~ignore
    for k in range(len(boxes)):
        met = free & (iou[k] >= threshold)
        if met.any():
            best = int(np.argmax(np.where(met, iou[k], -1.0)))
            correct[k], free[best] = True, False
        else:
            ignored[k] = bool((iou[k, ignore] >= IGNORE_IOU).any())
    return Matches(scores, correct, ignored, int((~ignore).sum()))


def vid_thresholds(truths: Floats) -> Floats:
    """The IoU that a match with each box (L, 4) needs."""
    sides = truths[:, 2:] - truths[:, :2] + 1.0
    return np.minimum(0.5, sides.prod(-1) / (sides + TOLERANCE).prod(-1))


def vid_precision(matches: list[Matches]) -> float | None:
    """Area under the falling precision; None where there is nothing to find."""
    curve = _curve(matches)
    if curve is None:
        return None
    recall, precision = curve
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def _curve(matches: list[Matches]) -> tuple[Floats, Floats] | None:
    """Recall and the best precision from there on, point by point down the scores."""
    objects = sum(found.objects for found in matches)
    if not objects:
        return None
    scores = np.concatenate([found.scores for found in matches])
    correct = np.concatenate([found.correct for found in matches])
    counted = ~np.concatenate([found.ignored for found in matches])
    order = np.argsort(-scores, kind="stable")
    right = np.cumsum(correct[order])
    total = np.cumsum(counted[order])
    precision = right / np.maximum(total, 1)
    falling = np.maximum.accumulate(precision[::-1])[::-1]
    return right / objects, falling
