"""The region heads: box heads, alone (Faster R-CNN) or in a cascade, and the mask head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful import ops
from eventful.errors import ConfigError
from eventful.models.vitdet import boxes as box
from eventful.models.vitdet.box_step import run_stage
from eventful.models.vitdet.found import Found
from eventful.models.vitdet.frames import Targets
from eventful.models.vitdet.kept_regions import RegionMemory
from eventful.models.vitdet.losses import (
    BoxLoss,
    Sampled,
    Sampling,
    box_losses,
    label_candidates,
)
from eventful.models.vitdet.pyramid import ChannelNorm, ConvNorm
from eventful.models.vitdet.regions import pool_regions
from eventful.models.vitdet.updated import REACH_MAPS, SCALES, UpdatedMaps
from eventful.rules.local import HeadMemory, plain_parts

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

    @property
    def macs(self) -> int:
        """Operations of one region."""
        once = sum(layer.weight.numel() for layer in (self.fc, self.scores, self.deltas))
        return once + BOX_POOL**2 * sum(p.numel() for p in self.convs.parameters() if p.dim() == 4)

    def forward(self, regions: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        for conv in self.convs:
            regions = conv(regions)
        return self.ends(F.relu(self.fc(regions.flatten(1))))

    def ends(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and box codes of hidden vectors (n, hidden)."""
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


_PARTS = (
    nn.ModuleList, BoxStage, ConvNorm, ChannelNorm, nn.Linear, MaskHead, nn.ConvTranspose2d,
    nn.Conv2d,
)  # fmt: skip


class RegionHeads(nn.Module):
    """Proposals to detections, through one box stage or several.

    Args:
        regions: most proposals of an image in use.
    """

    def __init__(self, channels: int, config: HeadConfig, regions: int = 1000) -> None:
        super().__init__()
        self.config, self.regions = config, regions
        self.stages = nn.ModuleList(
            BoxStage(channels, config, box.BoxCoder(CASCADE_WEIGHTS[i]))
            for i in range(config.stages)
        )
        self.mask = MaskHead(channels, config.classes) if config.masks else None

    def forward(self, maps: Sequence[Tensor], proposals: box.Padded, sizes: Tensor) -> Found:
        """Detections of each image from the maps p2 to p5; `sizes` (B, 2) as height and width."""
        return self._detect(maps, in_use(proposals), sizes, None)

    def step_forward(
        self, memory: HeadMemory, maps: Sequence[Tensor], proposals: box.Padded, sizes: Tensor
    ) -> Found | None:
        """`forward` in a step: on the host regions that nothing changed in keep their outputs.

        On a device all of them are computed: their number is fixed there.
        """
        if not isinstance(maps, UpdatedMaps) or not plain_parts(self, _PARTS):
            return None
        if not memory.state.reversible:
            places, used = proposals.valid.shape[1], proposals.valid.sum(dim=1)
            for number, stage in enumerate(self._box_stages()):
                memory.note(f"stage {number}", stage.macs, places, used)
            return self._detect(maps, in_use(proposals), sizes, None, memory)
        changed = memory.follow(maps.name, maps.changed)
        moved = ops.changed_pixels(changed, maps.levels, SCALES, REACH_MAPS)
        return self._detect(maps, proposals, sizes, RegionMemory(memory, moved, maps.levels))

    def step_bytes(self, grid: tuple[int, int], dtype: torch.dtype) -> int:
        """Bytes held for one stream on the host."""
        config = self.config
        numbers = 4 + config.classes + 1 + 4 * (1 if config.shared_boxes else config.classes)
        return 4 * numbers * self.regions * config.stages + 8

    def _detect(
        self,
        maps: Sequence[Tensor],
        proposals: box.Padded,
        sizes: Tensor,
        kept: RegionMemory | None,
        device: HeadMemory | None = None,
    ) -> Found:
        stages = self._box_stages()
        logits: list[Tensor] = []
        for number, stage in enumerate(stages):

            def compute(regions: box.Padded, stage: BoxStage = stage) -> tuple[Tensor, Tensor]:
                made: tuple[Tensor, Tensor] = stage(self._regions(maps, regions))
                return made

            name = f"stage {number}"
            if device is not None:
                scores, codes = run_stage(stage, device, name, self._regions(maps, proposals))
            elif kept is None:
                scores, codes = compute(proposals)
            else:
                scores, codes = kept.stage(name, proposals, compute, stage.macs)
            logits.append(scores)
            if number + 1 < len(stages):
                moved = ops.refine_boxes(proposals.boxes, codes, stage.coder.weights, sizes)
                proposals = box.Padded(moved, proposals.valid)
        scores, boxes = ops.region_scores(
            tuple(logits),
            codes,
            (proposals.boxes, proposals.valid),
            stages[-1].coder.weights,
            sizes,
            self.config.score_threshold,
        )
        found = self._pick(scores, boxes)
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
            logits, codes = stage(self._regions(maps, box.Padded(sampled.boxes, sampled.valid)))
            found = box_losses(logits, codes, sampled, stage.coder, loss=config.box_loss)
            suffix = f"_{number}" if len(self.stages) > 1 else ""
            losses[f"class{suffix}"] = found["class"]
            losses[f"box{suffix}"] = found["box"] * config.box_loss_weight
            if number + 1 < len(self.stages):
                proposals = self._next(stage, codes, sampled, sizes)
        return losses

    def _box_stages(self) -> list[BoxStage]:
        return [cast(BoxStage, stage) for stage in self.stages]

    def _regions(self, maps: Sequence[Tensor], found: box.Padded) -> Tensor:
        """Pooled regions; each stage of a cascade sends back its share of the gradient."""
        regions = pool_regions(maps[:4], found, BOX_POOL)
        share = 1.0 / len(self.stages)
        if not self.training or share == 1:
            return regions
        return regions * share + regions.detach() * (1 - share)

    @torch.no_grad()
    def _next(self, stage: BoxStage, codes: Tensor, sampled: Sampled, sizes: Tensor) -> box.Padded:
        """The candidates of the next stage of training: refined, without empty boxes."""
        refined = stage.coder.decode(sampled.boxes.flatten(0, 1), codes)[:, 0]
        clipped = box.clip_each(refined.unflatten(0, sampled.valid.shape), sizes)
        return box.Padded.where(sampled.valid & box.nonempty(clipped), clipped)

    def _pick(self, scores: Tensor, boxes: Tensor) -> Found:
        """The detections from what `ops.region_scores` gives."""
        config = self.config
        # Of equal scores the earlier region goes first, and of one region the earlier class.
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        most = _used(scores, -torch.inf)
        scores, order = scores[:, :most], order[:, :most]
        chosen, labels, count = ops.take_candidates(
            scores, order, boxes, config.classes, config.shared_boxes
        )
        kept, number = ops.keep_apart(
            chosen, labels, count, config.nms_threshold, config.detections
        )
        return Found.of(kept, number, chosen, scores, labels)

    def _masked(self, maps: Sequence[Tensor], found: Found) -> Found:
        assert self.mask is not None
        places = found.scores.shape[1]
        used = in_use(box.Padded(found.boxes, found.valid))
        logits = self.mask(pool_regions(maps[:4], used, MASK_POOL))
        some = used.valid.shape[1]
        label = found.labels[:, :some].flatten()[:, None, None, None]
        own = logits.gather(1, label.expand(-1, 1, *logits.shape[2:]))[:, 0]
        masks = own.float().sigmoid().unflatten(0, used.valid.shape)
        masks = masks.masked_fill(~used.valid[..., None, None], 0)
        masks = F.pad(masks, (0, 0, 0, 0, 0, places - some))
        return Found(found.boxes, found.scores, found.labels, found.counts, masks)


def in_use(found: box.Padded) -> box.Padded:
    """Without the last places that no image uses: on a CPU, where it costs no wait."""
    some = _used(found.valid, False)
    return box.Padded(found.boxes[:, :some].contiguous(), found.valid[:, :some].contiguous())


def _used(values: Tensor, none: float) -> int:
    """The most places of an image in (B, n) that do not hold `none`; at least 1.

    On a device, and in an exported step, all places: the host does not know what they hold.
    """
    if values.device.type != "cpu" or ops.fixed_shapes():
        return values.shape[1]
    return max(1, int((values != none).sum(dim=1).max()))
