"""A detector's heads as they were with tensors of as many rows as there are boxes: the oracle."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eventful import ops
from eventful.models.vitdet import Detections, Placement, ViTDet, boxes, regions
from eventful.models.vitdet.heads import BOX_POOL, MASK_POOL, HeadConfig
from eventful.models.vitdet.rpn import RPN, Predictions

Sizes = list[tuple[int, int]]


def literal_proposals(rpn: RPN, found: Predictions, sizes: Sizes) -> list[Tensor]:
    """The best boxes of each image, one image after the other, in tensors of their own size."""
    before, after = rpn._counts()
    made = []
    for image, size in enumerate(sizes):
        candidates, scores, levels = [], [], []
        parts = zip(found.anchors, found.logits, found.codes, strict=True)
        for level, (anchors, logits, codes) in enumerate(parts):
            top, index = logits[image].topk(min(before, logits.shape[1]))
            candidates.append(rpn.coder.decode(anchors[index], codes[image, index]))
            scores.append(top)
            levels.append(torch.full((len(index),), level, device=index.device))
        part, score, level = (torch.cat(some) for some in (candidates, scores, levels))
        fine = part.isfinite().all(dim=1) & score.isfinite()
        part = boxes.clip(part, size)
        fine &= boxes.nonempty(part)
        part, score, level = part[fine], score[fine], level[fine]
        kept = regions.grouped_nms(part, score, level, rpn.nms_threshold)
        made.append(part[kept[:after]])
    return made


def literal_pick(
    config: HeadConfig, found: Tensor, scores: Tensor, size: tuple[int, int]
) -> Detections:
    """The detections of one image, from boxes (n, classes or 1, 4) and scores."""
    fine = found.isfinite().flatten(1).all(dim=1) & scores.isfinite().all(dim=1)
    found, scores = boxes.clip(found[fine], size), scores[fine, :-1]
    row, label = (scores > config.score_threshold).nonzero(as_tuple=True)
    found = found[row, label if found.shape[1] > 1 else torch.zeros_like(label)]
    every = Detections(found, scores[row, label], label)
    kept = regions.grouped_nms(found, every.scores, label, config.nms_threshold)
    return every[kept[: config.detections]]


def literal_regions(maps: list[Tensor], image: int, found: Tensor, output: int) -> Tensor:
    level = boxes.pyramid_level(found, 2, 5)
    pooled = maps[0].new_zeros(len(found), maps[0].shape[1], output, output)
    for number, features in enumerate(maps[:4], start=2):
        rows = (level == number).nonzero()[:, 0]
        own = torch.full_like(rows, image)
        pooled[rows] = ops.roi_align(features, found[rows], own, output, 2.0**-number)
    return pooled


def literal_detections(
    model: ViTDet, pixels: Tensor, placements: list[Placement]
) -> list[Detections]:
    """What the detector finds, one image after the other."""
    heads, maps = model.heads, model.features(pixels)
    sizes = [place.content for place in placements]
    made = []
    proposals = literal_proposals(model.rpn, model.rpn(maps), sizes)
    for image, (proposal, place) in enumerate(zip(proposals, placements, strict=True)):
        total, refined = 0, proposal[:, None]
        for stage in heads.stages:
            logits, codes = stage(literal_regions(maps, image, proposal, BOX_POOL))
            refined = stage.coder.decode(proposal, codes)
            total = total + logits.softmax(dim=1)
            proposal = boxes.clip(refined[:, 0], place.content)
        found = literal_pick(heads.config, refined, total / len(heads.stages), place.content)
        if heads.mask is not None:
            masks = heads.mask(literal_regions(maps, image, found.boxes, MASK_POOL))
            own = masks[torch.arange(len(found)), found.labels].float().sigmoid()
            found = replace(found, masks=own)
        made.append(found.back(place))
    return made
