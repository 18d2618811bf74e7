"""From the predictions at every anchor of a pyramid to the best boxes of each image.

The predictions of a pixel are one row of a map: the objectness of its A anchors, then 4 numbers
of a box code for each. Anchors are numbered pixel after pixel, the A of a pixel in turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eventful.ops.reference.boxes import box_rows, clip_each, decode_boxes, nonempty
from eventful.ops.reference.maps import MapLevels
from eventful.ops.reference.rows import held


def level_parts(rows: Tensor, levels: MapLevels) -> tuple[list[Tensor], list[Tensor]]:
    """Logits (B, n) and codes (B, n, 4) of each level, in fp32, of rows (B, P, 5 * A)."""
    anchors = rows.shape[2] // 5
    logits, codes = [], []
    for level in range(len(levels.sizes)):
        part = levels.part(rows, level).flatten(1, 2).float()
        logits.append(part[..., :anchors].flatten(1))
        codes.append(part[..., anchors:].reshape(len(part), -1, 4))
    return logits, codes


def level_logits(rows: Tensor, levels: MapLevels, slots: Tensor | None = None) -> Tensor:
    """Objectness of every anchor, one level beside the other: (B, levels, n) in fp32.

    n is that of the largest level; the others are filled up with -inf.

    Args:
        rows: (S, P, 5 * A) predictions.
        slots: (B,) the row of each image; without it image b has row b.
    """
    logits, _ = level_parts(held(rows, slots), levels)
    most = max(part.shape[1] for part in logits)
    shape = (len(logits[0]), len(logits), most)
    padded = torch.full(shape, -torch.inf, device=rows.device)
    for level, part in enumerate(logits):
        padded[:, level, : part.shape[1]] = part
    return padded


def proposal_boxes(
    rows: Tensor,
    top: Tensor,
    index: Tensor,
    anchors: Tensor,
    levels: MapLevels,
    sizes: Tensor,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The boxes of chosen anchors, inside their images.

    Args:
        rows: (S, P, 5 * A) predictions.
        top: (B, levels, n) logits of the chosen anchors.
        index: (B, levels, n) their numbers within their levels; anything where `top` is -inf.
        anchors: (P * A, 4) of all levels.
        sizes: (B, 2), height and width of each image.
        slots: (B,) the row of each image; without it image b has row b.

    Returns:
        Boxes (B, levels, n, 4), zero where there is none, and the mask of those that are one.
    """
    return boxes_inside(decoded_boxes(rows, top, index, anchors, levels, slots), top, sizes)


def decoded_boxes(
    rows: Tensor,
    top: Tensor,
    index: Tensor,
    anchors: Tensor,
    levels: MapLevels,
    slots: Tensor | None = None,
) -> Tensor:
    """The boxes (B, levels, n, 4) of chosen anchors as predicted; see `proposal_boxes`."""
    _, codes = level_parts(held(rows, slots), levels)
    count = rows.shape[2] // 5
    number = torch.stack(
        [index[:, level] + count * first for level, first in enumerate(levels.offsets)], dim=1
    ).masked_fill(top == -torch.inf, 0)
    chosen = box_rows(torch.cat(codes, dim=1), number.flatten(1))
    decoded = decode_boxes(anchors[number].flatten(0, 2), chosen.flatten(0, 1))
    return decoded.view(*index.shape, 4)


def boxes_inside(boxes: Tensor, scores: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Boxes (B, levels, n, 4) cut off at the borders of images of `sizes` (B, 2), and a mask.

    Those that are not finite, have a score (B, levels, n) that is not, or are empty, become zero.
    """
    valid = boxes.isfinite().all(dim=-1) & scores.isfinite()
    clipped = clip_each(boxes.flatten(1, 2), sizes).view_as(boxes)
    valid = valid & nonempty(clipped)
    return torch.where(valid[..., None], clipped, clipped.new_zeros(())), valid


def best_boxes(boxes: Tensor, scores: Tensor, kept: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """The first `limit` of the `kept` boxes of each image by score.

    Args:
        boxes: (B, N, 4).
        scores: (B, N), finite where kept; of equal ones the earlier box goes first.
        kept: (B, N) mask.

    Returns:
        Boxes (B, n, 4) with n = min(limit, N), zero where there is none, and their mask (B, n).
    """
    order = scores.masked_fill(~kept, -torch.inf).argsort(dim=1, descending=True, stable=True)
    order = order[:, :limit]
    valid = kept.gather(1, order)
    chosen = box_rows(boxes, order)
    return torch.where(valid[..., None], chosen, chosen.new_zeros(())), valid
