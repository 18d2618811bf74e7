"""From the outputs of box heads to detections: scores of classes, refined boxes, and a choice."""

from __future__ import annotations

import torch
from torch import Tensor

from eventful.ops.reference.boxes import Weights, box_rows, clip_each, decode_boxes


def refine_boxes(boxes: Tensor, codes: Tensor, weights: Weights, sizes: Tensor) -> Tensor:
    """Regions (B, K, 4) moved by the first of their codes (B * K, k, 4), inside their images.

    Args:
        weights: of the codes, see `decode_boxes`.
        sizes: (B, 2), height and width of each image.
    """
    refined = decode_boxes(boxes.flatten(0, 1), codes[:, 0], weights)
    return clip_each(refined.view(boxes.shape), sizes)


def region_scores(
    logits: tuple[Tensor, ...],
    codes: Tensor,
    regions: tuple[Tensor, Tensor],
    weights: Weights,
    sizes: Tensor,
    threshold: float,
) -> tuple[Tensor, Tensor]:
    """Scores of each region for each class, and its boxes.

    Args:
        logits: (B * K, classes + 1) of one stage or several, whose softmax is averaged; the last
            class is background.
        codes: (B * K, k, 4) of the last stage; k is 1 or the number of classes.
        regions: boxes (B, K, 4) that the codes are relative to, and the mask (B, K) of those that
            count.
        weights: of the codes, see `decode_boxes`.
        sizes: (B, 2), height and width of each image.
        threshold: a score that is not above it becomes -inf.

    Returns:
        Scores (B, K * classes), -inf also where a number of the region is not finite; and boxes
        (B, K * k, 4), cut off at the borders of the images.
    """
    boxes, valid = regions
    total = logits[0].softmax(dim=1)
    for part in logits[1:]:
        total = total + part.softmax(dim=1)
    scores = (total / len(logits)).view(*valid.shape, -1)
    refined = decode_boxes(boxes.flatten(0, 1), codes, weights).view(*valid.shape, -1, 4)
    return candidates(refined, scores, valid, sizes, threshold)


def candidates(
    boxes: Tensor, scores: Tensor, valid: Tensor, sizes: Tensor, threshold: float
) -> tuple[Tensor, Tensor]:
    """`region_scores` of boxes (B, K, k, 4) and scores (B, K, classes + 1)."""
    fine = valid & boxes.isfinite().flatten(2).all(dim=2) & scores.isfinite().all(dim=2)
    scores = scores[..., :-1]
    candidate = fine[..., None] & (scores > threshold)
    masked = torch.where(candidate, scores, -torch.inf).flatten(1)
    return masked, clip_each(boxes.flatten(1, 2), sizes)


def take_candidates(
    scores: Tensor, order: Tensor, boxes: Tensor, classes: int, shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes and classes of sorted candidates, as `keep_apart` takes them.

    Args:
        scores: (B, n), falling; -inf where there is no candidate.
        order: (B, n) the place of each one among the scores (B, K * classes) before the sort.
        boxes: (B, K * k, 4); k is 1 if all classes of a region have one `shared` box, else
            `classes`.

    Returns:
        Boxes (B, n, 4), classes (B, n), and how many candidates there are, (B,).
    """
    row = order // classes if shared else order
    count = (scores > -torch.inf).sum(dim=1)
    return box_rows(boxes, row), order % classes, count


def take_found(
    index: Tensor, count: Tensor, boxes: Tensor, scores: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of N candidates of each image those at `index` (B, n), as many as `count` (B,) says.

    Args:
        boxes: (B, N, 4).
        scores: (B, N).
        labels: (B, N).

    Returns:
        Boxes (B, n, 4), scores (B, n) and labels (B, n); zero from the count on.
    """
    empty = torch.arange(index.shape[1], device=index.device) >= count[:, None]
    return (
        box_rows(boxes, index).masked_fill(empty[..., None], 0),
        scores.gather(1, index).masked_fill(empty, 0),
        labels.gather(1, index).masked_fill(empty, 0),
    )
