"""Average precision in plain numpy: which detections count, and the area under their curve.

Two rules of matching, each with the curve its benchmark uses. Both take one class of one frame at
a time, detections in falling order of score.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

RECALLS = np.linspace(0.0, 1.0, 101)  # COCO reads precision off at these
COCO_IOU = 0.5
COCO_AREA = 1e10  # COCO leaves out detections that find nothing and are larger, or inside out
TOLERANCE = 10.0  # pixels by which VID widens a small box in each direction


@dataclass(frozen=True)
class Matches:
    """Detections of one class in one frame, in falling order of score.

    Args:
        correct: Found an object nobody had found before.
        ignored: Found something that is to be ignored, so neither right nor wrong.
        objects: Objects there were to find.
    """

    scores: Floats
    correct: Flags
    ignored: Flags
    objects: int


def overlaps(boxes: Floats, others: Floats, *, pixel: float = 0.0, covered: Flags) -> Floats:
    """Intersection over union of (K, 4) with (L, 4) corners: (K, L).

    Args:
        pixel: 1 where the right and bottom pixel belong to the box (VID), 0 where not (COCO).
        covered: Of the others (L), whether to divide by the area of the first box alone: how much
            of it they cover. COCO does so for crowds.
    """
    corner = np.maximum(boxes[:, None, :2], others[None, :, :2])
    far = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    shared = np.clip(far - corner + pixel, 0, None).prod(-1)
    area = (boxes[:, 2:] - boxes[:, :2] + pixel).prod(-1)[:, None]
    other = (others[:, 2:] - others[:, :2] + pixel).prod(-1)[None, :]
    union = np.where(covered[None, :], area, area + other - shared)
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def match_coco(scores: Floats, boxes: Floats, truths: Floats, ignore: Flags) -> Matches:
    """COCO's rule at IoU 0.5: the best object still free, an ignored one only failing that."""
    iou = overlaps(_from_sides(boxes), _from_sides(truths), covered=ignore)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    outside = (area < 0) | (area > COCO_AREA)
    correct, ignored = np.zeros(len(boxes), bool), np.zeros(len(boxes), bool)
    free = ~ignore
    for k in range(len(boxes)):
        best = _last_best(np.where(free, iou[k], -1.0))
        if best is not None and iou[k, best] >= COCO_IOU:
            correct[k], free[best] = True, False
        else:
            ignored[k] = bool((iou[k, ignore] >= COCO_IOU).any()) or outside[k]
    return Matches(scores, correct, ignored, int((~ignore).sum()))


def match_vid(scores: Floats, boxes: Floats, truths: Floats, ignore: Flags) -> Matches:
    """VID's rule: each box has its own threshold, lower for small ones.

    min(0.5, w·h / ((w + 10)(h + 10))), sides and overlaps counting whole pixels. The best among
    the free objects whose threshold is met. Objects to be ignored are no part of the benchmark;
    they are treated as by `match_coco`.
    """
    iou = overlaps(boxes, truths, pixel=1.0, covered=ignore)
    threshold = vid_thresholds(truths)
    correct, ignored = np.zeros(len(boxes), bool), np.zeros(len(boxes), bool)
    free = ~ignore
    for k in range(len(boxes)):
        met = free & (iou[k] >= threshold)
        if met.any():
            best = int(np.argmax(np.where(met, iou[k], -1.0)))
            correct[k], free[best] = True, False
        else:
            ignored[k] = bool((iou[k, ignore] >= COCO_IOU).any())
    return Matches(scores, correct, ignored, int((~ignore).sum()))


def vid_thresholds(truths: Floats) -> Floats:
    """The IoU each box (L, 4) asks for."""
    sides = truths[:, 2:] - truths[:, :2] + 1.0
    return np.minimum(0.5, sides.prod(-1) / (sides + TOLERANCE).prod(-1))


def coco_precision(matches: list[Matches]) -> float | None:
    """Mean of the falling precision at 101 recalls; None where there is nothing to find."""
    curve = _curve(matches)
    if curve is None:
        return None
    recall, precision = curve
    # The first point that reaches each recall; none does beyond the last.
    at = np.searchsorted(recall, RECALLS, side="left")
    return float(np.append(precision, 0.0)[at].mean())


def vid_precision(matches: list[Matches]) -> float | None:
    """Area under the falling precision; None where there is nothing to find."""
    curve = _curve(matches)
    if curve is None:
        return None
    recall, precision = curve
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def _from_sides(boxes: Floats) -> Floats:
    """Corners (K, 4) as COCO's code sees them: it is given left and width and adds them up.

    2.1 + (7.7 - 2.1) is not 7.7, which matters where an overlap lies at the threshold.
    """
    corner = boxes[:, :2]
    return np.concatenate([corner, corner + (boxes[:, 2:] - corner)], axis=1)


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


def _last_best(values: Floats) -> int | None:
    """Where the largest value is that is not negative; the last of equals, as in COCO's code."""
    if not len(values) or values.max() < 0:
        return None
    return len(values) - 1 - int(np.argmax(values[::-1]))
