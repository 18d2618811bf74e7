"""A small detection head for any ViT: every place of its feature map predicts the box around it.

One scale and no anchors (Tian et al., FCOS, 2019), with scores that are trained to be the overlap
of the box they stand for (Li et al., Generalized Focal Loss, 2020). It needs nothing of the
backbone but its map, so a frozen backbone's maps can be kept and the head trained on them alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful.models.vitdet import boxes as box
from eventful.models.vitdet.frames import Detections, Target
from eventful.models.vitdet.pyramid import ChannelNorm, ConvNorm
from eventful.models.vitdet.regions import grouped_nms

_MOST_GROWTH = math.log(100.0)  # of a side, in patches


@dataclass(frozen=True)
class PointHeadConfig:
    """Sizes of the head.

    Attributes:
        dim: channels of the backbone's map.
        patch: pixels on a side of one of its places.
        classes: object classes.
        channels: width of the head.
        depth: 3x3 convolutions on the doubled map.
        radius: distance from an object's centre, in places of the doubled map, within which a
            place is trained to find it.
        score_threshold: detections below it are dropped.
        candidates: places that enter NMS.
        detections: largest number of results.
    """

    dim: int = 384
    patch: int = 14
    classes: int = 1
    channels: int = 192
    depth: int = 3
    radius: float = 1.5
    score_threshold: float = 0.02
    nms_threshold: float = 0.6
    candidates: int = 600
    detections: int = 100


@dataclass(frozen=True)
class Points:
    """Predictions of the head at every place.

    Attributes:
        places: (n, 2) their centres as x, y in pixels.
        logits: (B, n, classes).
        boxes: (B, n, 4) in pixels.
    """

    places: Tensor
    logits: Tensor
    boxes: Tensor


class PointHead(nn.Module):
    """Maps (B, D, h, w) to objects, on a map of twice the resolution."""

    def __init__(self, config: PointHeadConfig) -> None:
        super().__init__()
        self.config = config
        width = config.channels
        self.stem = nn.Sequential(
            ChannelNorm(config.dim),
            nn.ConvTranspose2d(config.dim, width, kernel_size=2, stride=2),
            ChannelNorm(width),
            nn.GELU(),
        )
        self.tower = nn.Sequential(
            *(ConvNorm(width, width, 3, relu=True) for _ in range(config.depth))
        )
        self.scores = nn.Conv2d(width, config.classes, 1)
        self.sides = nn.Conv2d(width, 4, 1)
        rare = -math.log(99.0)  # initial score of one in a hundred
        for layer, bias in ((self.scores, rare), (self.sides, 0.0)):
            nn.init.normal_(layer.weight, std=0.01)
            assert layer.bias is not None
            nn.init.constant_(layer.bias, bias)

    @property
    def stride(self) -> float:
        """Pixels between places of the doubled map."""
        return self.config.patch / 2

    def forward(self, features: Tensor) -> Points:
        """Predictions at every place, row by row."""
        x = self.tower(self.stem(features))
        logits = self.scores(x).flatten(2).transpose(1, 2).float()
        sides = self.sides(x).flatten(2).transpose(1, 2).float()
        reach = self.config.patch * sides.clamp(max=_MOST_GROWTH).exp()
        places = self._places((x.shape[2], x.shape[3]), x.device)
        low, high = places - reach[..., :2], places + reach[..., 2:]
        return Points(places, logits, torch.cat([low, high], dim=-1))

    def _places(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        y, x = (torch.arange(length, device=device) for length in grid)
        y, x = torch.meshgrid(y, x, indexing="ij")
        return (torch.stack([x, y], dim=-1).reshape(-1, 2) + 0.5) * self.stride

    def losses(self, features: Tensor, targets: Sequence[Target]) -> dict[str, Tensor]:
        """The loss of the scores and that of the boxes, each a number to add up.

        A place inside an ignored box does not count as background.
        """
        found = self(features)
        score, distance = found.logits.sum() * 0, found.boxes.sum() * 0
        positive = 0
        for image, target in enumerate(targets):
            owner = assign(found.places, target.boxes, self.config.radius * self.stride)
            rows = (owner >= 0).nonzero()[:, 0]
            goal, mine = target.boxes[owner[rows]], found.boxes[image, rows]
            quality = torch.zeros_like(found.logits[image])
            if len(rows):
                distance = distance + box.giou_loss(mine, goal).sum()
                quality[rows, target.labels[owner[rows]]] = box.paired_iou(mine.detach(), goal)
            counts = torch.ones_like(owner, dtype=torch.bool)
            if target.ignored is not None:
                counts = ~_inside(found.places, target.ignored).any(dim=1) | (owner >= 0)
            score = score + _quality_loss(found.logits[image], quality)[counts].sum()
            positive += len(rows)
        return {"score": score / max(positive, 1), "box": distance / max(positive, 1)}

    @torch.no_grad()
    def detect(self, features: Tensor, size: tuple[int, int]) -> list[Detections]:
        """Objects in each frame of `size` (height, width) pixels, best first."""
        found, config = self(features), self.config
        results = []
        for logits, boxes in zip(found.logits, found.boxes, strict=True):
            best, index = logits.sigmoid().flatten().topk(min(config.candidates, logits.numel()))
            place, label = index // config.classes, index % config.classes
            candidates = Detections(box.clip(boxes[place], size), best, label)
            candidates = candidates[
                (candidates.scores > config.score_threshold) & box.nonempty(candidates.boxes)
            ]
            kept = grouped_nms(
                candidates.boxes, candidates.scores, candidates.labels, config.nms_threshold
            )
            results.append(candidates[kept[: config.detections]])
        return results


def assign(places: Tensor, boxes: Tensor, radius: float) -> Tensor:
    """The object (n,) each place is trained to find, -1 for none.

    A place belongs to a box it lies in, near its centre; of several to the smallest. The place
    nearest to a centre belongs to that box even if it lies beside it.
    """
    if not len(boxes):
        return torch.full((len(places),), -1, device=places.device)
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    away = (places[:, None] - centres[None]).abs().amax(dim=-1)  # (n, m)
    fits = _inside(places, boxes) & (away <= radius)
    fits[away.argmin(dim=0), torch.arange(len(boxes), device=boxes.device)] = True
    cost = torch.where(fits, box.area(boxes)[None], math.inf)
    smallest, owner = cost.min(dim=1)
    return torch.where(smallest.isfinite(), owner, -1)


def _inside(places: Tensor, boxes: Tensor) -> Tensor:
    """Mask (n, m) of places (n, 2) inside boxes (m, 4)."""
    low = places[:, None] - boxes[None, :, :2]
    high = boxes[None, :, 2:] - places[:, None]
    return (torch.cat([low, high], dim=-1) > 0).all(dim=-1)


def _quality_loss(logits: Tensor, quality: Tensor) -> Tensor:
    """Cross entropy against the overlap, weighted by the squared error of the score."""
    entropy = F.binary_cross_entropy_with_logits(logits, quality, reduction="none")
    return (entropy * (quality - logits.sigmoid()).abs().square()).sum(dim=-1)
