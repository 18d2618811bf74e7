"""The region heads: box heads, alone (Faster R-CNN) or in a cascade, and the mask head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful.errors import ConfigError
from eventful.models.vitdet import boxes as box
from eventful.models.vitdet.frames import Detections, Targets
from eventful.models.vitdet.losses import (
    BoxLoss,
    Sampled,
    Sampling,
    box_losses,
    label_candidates,
)
from eventful.models.vitdet.pyramid import ConvNorm
from eventful.models.vitdet.regions import grouped_nms, pool_regions

CASCADE_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
CASCADE_IOU = (0.5, 0.6, 0.7)
BOX_POOL, MASK_POOL = 7, 14


@dataclass(frozen=True)
class HeadConfig:
    """The heads on the regions; the defaults are those of the paper's VID detector.

    Attributes:
        classes: object classes, without background.
        stages: box heads one after the other: 1 is Faster R-CNN, 3 the cascade.
        shared_boxes: boxes do not depend on the class (as in the cascade).
        masks: a mask head.
        convs: convolutions ahead of the linear layer of a box head.
        hidden: width of that layer.
        score_threshold: detections below it are dropped.
        samples: regions of an image that are trained on.
        box_loss: on the boxes of foreground regions.
        box_loss_weight: its factor.
    """

    classes: int = 30
    stages: int = 1
    shared_boxes: bool = False
    masks: bool = False
    convs: int = 4
    hidden: int = 1024
    score_threshold: float = 0.05
    nms_threshold: float = 0.5
    detections: int = 100
    samples: int = 128
    positive: float = 0.25
    box_loss: BoxLoss = "giou"
    box_loss_weight: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.stages <= len(CASCADE_IOU):
            raise ConfigError(f"{self.stages} box stages; a cascade has 1 to 3.")
        if self.stages > 1 and not self.shared_boxes:
            raise ConfigError("A cascade refines one box per region: give shared_boxes=True.")
        if self.classes < 1:
            raise ConfigError(f"{self.classes} classes; a detector needs at least one.")
        if self.box_loss not in get_args(BoxLoss):
            raise ConfigError(f"box_loss is one of {', '.join(get_args(BoxLoss))}.")


class BoxStage(nn.Module):
    """Regions (n, C, 7, 7) to class logits (n, classes + 1) and box codes (n, classes or 1, 4)."""

    def __init__(self, channels: int, config: HeadConfig, coder: box.BoxCoder) -> None:
        super().__init__()
        self.coder = coder
        outputs = 1 if config.shared_boxes else config.classes
        self.convs = nn.ModuleList(
            ConvNorm(channels, channels, 3, relu=True) for _ in range(config.convs)
        )
        self.fc = nn.Linear(channels * BOX_POOL**2, config.hidden)
        self.scores = nn.Linear(config.hidden, config.classes + 1)
        self.deltas = nn.Linear(config.hidden, 4 * outputs)
        nn.init.kaiming_uniform_(self.fc.weight, a=1)
        nn.init.trunc_normal_(self.scores.weight, std=0.01)
        nn.init.trunc_normal_(self.deltas.weight, std=0.001)
        for layer in (self.fc, self.scores, self.deltas):
            nn.init.zeros_(layer.bias)

    def forward(self, regions: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        for conv in self.convs:
            regions = conv(regions)
        hidden = F.relu(self.fc(regions.flatten(1)))
        return self.scores(hidden).float(), self.deltas(hidden).float().unflatten(1, (-1, 4))


class MaskHead(nn.Module):
    """Regions (n, C, 14, 14) to mask logits (n, classes, 28, 28)."""

    def __init__(self, channels: int, classes: int, convs: int = 4) -> None:
        super().__init__()
        self.convs = nn.ModuleList(ConvNorm(channels, channels, 3, relu=True) for _ in range(convs))
        self.upsample = nn.ConvTranspose2d(channels, channels, 2, stride=2)
        self.predictor = nn.Conv2d(channels, classes, 1)
        nn.init.trunc_normal_(self.predictor.weight, std=0.001)

    def forward(self, regions: Tensor) -> Tensor:
        """See the class."""
        for conv in self.convs:
            regions = conv(regions)
        logits: Tensor = self.predictor(F.relu(self.upsample(regions)))
        return logits


class RegionHeads(nn.Module):
    """Proposals to detections, through one box stage or several."""

    def __init__(self, channels: int, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.stages = nn.ModuleList(
            BoxStage(channels, config, box.BoxCoder(CASCADE_WEIGHTS[i]))
            for i in range(config.stages)
        )
        self.mask = MaskHead(channels, config.classes) if config.masks else None

    def forward(
        self, maps: Sequence[Tensor], proposals: list[Tensor], sizes: Sequence[tuple[int, int]]
    ) -> list[Detections]:
        """Detections of each image from the maps p2 to p5."""
        counts = [len(part) for part in proposals]
        total: Tensor | None = None
        refined = torch.cat(proposals)[:, None]
        for stage in self._box_stages():
            logits, refined = self._refine(stage, maps, proposals)
            scores = logits.softmax(dim=1)
            total = scores if total is None else total + scores
            boxes = zip(refined.split(counts), sizes, strict=True)
            proposals = [box.clip(part[:, 0], size) for part, size in boxes]
        assert total is not None
        scored = (total / len(self.stages)).split(counts)
        found = [
            self._pick(*parts) for parts in zip(refined.split(counts), scored, sizes, strict=True)
        ]
        return found if self.mask is None else self._masked(maps, found)

    def losses(
        self,
        maps: Sequence[Tensor],
        proposals: box.Padded,
        targets: Targets,
        sizes: Tensor,
    ) -> dict[str, Tensor]:
        """Class and box losses of every stage; `sizes` (B, 2) as height and width."""
        config, losses = self.config, {}
        for number, stage in enumerate(self._box_stages()):
            overlap = CASCADE_IOU[number]
            sampling = Sampling(config.samples, config.positive, overlap, overlap)
            sampled = label_candidates(
                proposals, targets, sampling, config.classes, choose=number == 0
            )
            logits, codes = stage(self._regions(maps, list(sampled.boxes)))
            found = box_losses(logits, codes, sampled, stage.coder, loss=config.box_loss)
            suffix = f"_{number}" if len(self.stages) > 1 else ""
            losses[f"class{suffix}"] = found["class"]
            losses[f"box{suffix}"] = found["box"] * config.box_loss_weight
            if number + 1 < len(self.stages):
                proposals = self._next(stage, codes, sampled, sizes)
        return losses

    def _box_stages(self) -> list[BoxStage]:
        return [cast(BoxStage, stage) for stage in self.stages]

    def _regions(self, maps: Sequence[Tensor], boxes: list[Tensor]) -> Tensor:
        """Pooled regions; each stage of a cascade sends back its share of the gradient."""
        regions = pool_regions(maps[:4], boxes, BOX_POOL)
        share = 1.0 / len(self.stages)
        if not self.training or share == 1:
            return regions
        return regions * share + regions.detach() * (1 - share)

    def _refine(
        self, stage: BoxStage, maps: Sequence[Tensor], proposals: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Logits (n, classes + 1) and boxes (n, classes or 1, 4) of all images."""
        logits, codes = stage(self._regions(maps, proposals))
        return logits, stage.coder.decode(torch.cat(proposals), codes)

    @torch.no_grad()
    def _next(self, stage: BoxStage, codes: Tensor, sampled: Sampled, sizes: Tensor) -> box.Padded:
        """The candidates of the next stage of training: refined, without empty boxes."""
        refined = stage.coder.decode(sampled.boxes.flatten(0, 1), codes)[:, 0]
        clipped = box.clip_each(refined.unflatten(0, sampled.valid.shape), sizes)
        return box.Padded.where(sampled.valid & box.nonempty(clipped), clipped)

    def _pick(self, boxes: Tensor, scores: Tensor, size: tuple[int, int]) -> Detections:
        """The detections of one image, from boxes (n, classes or 1, 4) and scores."""
        config = self.config
        fine = boxes.isfinite().flatten(1).all(dim=1) & scores.isfinite().all(dim=1)
        boxes, scores = box.clip(boxes[fine], size), scores[fine, :-1]
        row, label = (scores > config.score_threshold).nonzero(as_tuple=True)
        boxes = boxes[row, label if boxes.shape[1] > 1 else torch.zeros_like(label)]
        found = Detections(boxes, scores[row, label], label)
        kept = grouped_nms(boxes, found.scores, label, config.nms_threshold)
        return found[kept[: config.detections]]

    def _masked(self, maps: Sequence[Tensor], found: list[Detections]) -> list[Detections]:
        assert self.mask is not None
        regions = pool_regions(maps[:4], [part.boxes for part in found], MASK_POOL)
        labels = torch.cat([part.labels for part in found])
        every = torch.arange(len(labels), device=labels.device)
        masks = self.mask(regions)[every, labels].float().sigmoid()
        parts = masks.split([len(part) for part in found])
        return [
            Detections(part.boxes, part.scores, part.labels, mask)
            for part, mask in zip(found, parts, strict=True)
        ]
