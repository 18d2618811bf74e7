"""What the kernels for boxes and regions cannot serve, and why."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eventful.ops.reference.maps import MapLevels
from eventful.ops.triton.candidates import HIGHEST_LEVEL, MOST_LEVELS, MOST_STAGES
from eventful.ops.triton.nms import MOST_KEPT
from eventful.ops.triton.proposals import MOST_LEVELS as MOST_PYRAMID
from eventful.ops.triton.regions import MOST_MAPS
from eventful.ops.triton.row_checks import too_wide

_NO_GRADIENTS = "it has no gradients"
_APART = "a tensor is not contiguous"


def _trained(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(part.requires_grad for part in tensors)


def _whole(*tensors: Tensor | None) -> str | None:
    fine = all(part is None or part.is_contiguous() for part in tensors)
    return None if fine else _APART


def _suppress(boxes: Tensor, valid: Tensor, threshold: float) -> str | None:
    return _whole(boxes, valid)


def _keep_apart(
    boxes: Tensor, groups: Tensor, count: Tensor, threshold: float, limit: int
) -> str | None:
    if limit > MOST_KEPT:
        return f"more than {MOST_KEPT} kept boxes do not fit one program"
    return _whole(boxes, groups)


def _align_regions(
    maps: tuple[Tensor, ...], scales: object, boxes: Tensor, level: Tensor, output: int
) -> str | None:
    if len(maps) > MOST_MAPS:
        return f"it reads at most {MOST_MAPS} maps"
    if _trained(*maps):
        return _NO_GRADIENTS
    return too_wide(maps[0], "the maps") or _whole(*(part[:1] for part in maps), boxes, level)


def _level_logits(rows: Tensor, levels: MapLevels, slots: Tensor | None = None) -> str | None:
    if len(levels.sizes) > MOST_PYRAMID:
        return f"it reads at most {MOST_PYRAMID} levels"
    return _NO_GRADIENTS if _trained(rows) else _whole(rows, slots)


def _proposal_boxes(
    rows: Tensor,
    top: Tensor,
    index: Tensor,
    anchors: Tensor,
    levels: MapLevels,
    sizes: Tensor,
    slots: Tensor | None = None,
) -> str | None:
    reason = _level_logits(rows, levels, slots)
    return reason or _whole(top, index, anchors, sizes)


def _best_boxes(boxes: Tensor, scores: Tensor, kept: Tensor, limit: int) -> str | None:
    return _NO_GRADIENTS if _trained(boxes) else _whole(boxes, scores, kept)


def _region_levels(boxes: Tensor, valid: Tensor, first: int, last: int) -> str | None:
    if first < 0 or last > HIGHEST_LEVEL or last - first >= MOST_LEVELS:
        return f"it knows {MOST_LEVELS} levels in a row, from 0 to {HIGHEST_LEVEL}"
    return _whole(boxes, valid)


def _codes(codes: Tensor) -> str | None:
    """Codes (n, k, 4) may lie apart, those of one region not."""
    return _whole(codes[:1])


def _refine_boxes(boxes: Tensor, codes: Tensor, weights: object, sizes: Tensor) -> str | None:
    if _trained(boxes, codes):
        return _NO_GRADIENTS
    return _codes(codes) or _whole(boxes, sizes)


def _region_scores(
    logits: tuple[Tensor, ...],
    codes: Tensor,
    regions: tuple[Tensor, Tensor],
    weights: object,
    sizes: Tensor,
    threshold: float,
) -> str | None:
    if len(logits) > MOST_STAGES:
        return f"it averages at most {MOST_STAGES} stages"
    if _trained(*logits, codes, regions[0]):
        return _NO_GRADIENTS
    return too_wide(logits[0], "scores of classes") or _codes(codes) or _whole(*regions, sizes)


def _take_candidates(
    scores: Tensor, order: Tensor, boxes: Tensor, classes: int, shared: bool
) -> str | None:
    if _trained(boxes):
        return _NO_GRADIENTS
    return _whole(boxes, scores[:1], order[:1])


def _take_found(
    index: Tensor, count: Tensor, boxes: Tensor, scores: Tensor, labels: Tensor
) -> str | None:
    if _trained(boxes, scores):
        return _NO_GRADIENTS
    return _whole(index, count, boxes, scores[:1], labels)


REGION_CHECKS: dict[str, Callable[..., str | None]] = {
    "align_regions": _align_regions,
    "best_boxes": _best_boxes,
    "keep_apart": _keep_apart,
    "level_logits": _level_logits,
    "proposal_boxes": _proposal_boxes,
    "refine_boxes": _refine_boxes,
    "region_levels": _region_levels,
    "region_scores": _region_scores,
    "suppress": _suppress,
    "take_candidates": _take_candidates,
    "take_found": _take_found,
}
