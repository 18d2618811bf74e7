"""The complete ViTDet: backbone, pyramid, proposals and heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from eventful.errors import ConfigError, FrameError
from eventful.models.blocks import Resize
from eventful.models.vitdet import boxes as box
from eventful.models.vitdet.backbone import BackboneConfig, ViTDetBackbone
from eventful.models.vitdet.found import Found
from eventful.models.vitdet.frames import Placement, Target, Targets, prepare
from eventful.models.vitdet.heads import CASCADE_IOU, HeadConfig, RegionHeads
from eventful.models.vitdet.losses import rpn_losses
from eventful.models.vitdet.pyramid import SimpleFeaturePyramid
from eventful.models.vitdet.rpn import RPN
from eventful.models.vitdet.updated import UpdatedMaps


@dataclass(frozen=True)
class ViTDetConfig:
    """A whole detector.

    Attributes:
        channels: width of the pyramid and the heads.
        candidates: regions of each level that are compared with one another, in training and in
            use.
        proposals: regions that reach the heads, in training and in use.
        short_edge: what `prepare` makes of the short edge at `trained_size`; other sizes scale it.
    """

    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    heads: HeadConfig = field(default_factory=HeadConfig)
    channels: int = 256
    proposals: tuple[int, int] = (1000, 300)
    short_edge: int = 640
    candidates: tuple[int, int] = (2000, 1000)

    def __post_init__(self) -> None:
        object.__setattr__(self, "candidates", tuple(self.candidates))
        object.__setattr__(self, "proposals", tuple(self.proposals))

    @property
    def short_side(self) -> int:
        """What the short edge of a frame becomes at the backbone's size."""
        return max(1, round(self.short_edge * self.backbone.size / self.backbone.trained_size))

    def to_dict(self) -> dict[str, Any]:
        """As values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ViTDetConfig:
        """The inverse of `to_dict`."""
        parts = {
            "backbone": BackboneConfig(**data["backbone"]),
            "heads": HeadConfig(**data["heads"]),
        }
        return cls(**{**data, **parts})


class ViTDet(nn.Module):
    """A detector of objects in frames.

    Convert it whole: the backbone becomes eventful, and a `Stream` of it takes and returns what
    the model does.
    """

    def __init__(self, config: ViTDetConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = ViTDetBackbone(config.backbone)
        self.pyramid = SimpleFeaturePyramid(config.backbone.dim, config.channels, lends=True)
        self.rpn = RPN(config.channels, keep_before=config.candidates, keep_after=config.proposals)
        self.heads = RegionHeads(config.channels, config.heads, config.proposals[1])

    def prepare(self, frame: Tensor) -> tuple[Tensor, Placement]:
        """An RGB frame (3, H, W) from 0 to 255 as pixels (1, 3, size, size), and where it lies."""
        like, config = self.backbone.pos_embed, self.config
        pixels, placement = prepare(frame.to(like.device), config.backbone.size, config.short_side)
        return pixels.to(like.dtype), placement

    def features(self, pixels: Tensor) -> list[Tensor]:
        """The maps p2 to p6."""
        maps = self._maps(pixels)
        # Whoever takes them away must not see the next frame change them.
        return [part.clone() for part in maps] if isinstance(maps, UpdatedMaps) else maps

    def _maps(self, pixels: Tensor) -> list[Tensor]:
        """`features`; in a stream these may be its memory."""
        least = 2 * self.config.backbone.patch
        if pixels.dim() != 4 or not len(pixels) or min(pixels.shape[2:]) < least:
            raise FrameError(
                f"A detector takes frames (B, 3, height, width) of at least {least} px, got "
                f"{tuple(pixels.shape)}; `prepare` makes them of a video's."
            )
        maps: list[Tensor] = self.pyramid(self.backbone(pixels))
        return maps

    def forward(self, pixels: Tensor, placements: Sequence[Placement] | None = None) -> Found:
        """Detections of each frame: a sequence of `Detections`, made when the first is asked for.

        Args:
            pixels: (B, 3, H, W), normalised and padded, as `prepare` makes them.
            placements: where the frames lie in the pixels. With them boxes are cut off at the
                frame's borders and come back in its own pixels.
        """
        sizes = _sizes(pixels, placements)
        found = self.detect(self._maps(pixels), sizes)
        return found if placements is None else found.back(placements)

    def detect(self, maps: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> Found:
        """Detections from the maps p2 to p6, in their pixels, inside `sizes` (height, width)."""
        each = box.table(sizes, maps[0].device)
        found: Found = self.heads(maps, self.rpn.propose(self.rpn(maps), each), each)
        return found

    def losses(
        self,
        pixels: Tensor,
        targets: Sequence[Target],
        placements: Sequence[Placement] | None = None,
    ) -> dict[str, Tensor]:
        """Losses of the proposal network and of the box heads, each a number to add up.

        Ignored regions of a target contribute no loss, unless an object lies there. The mask
        head has no loss.
        """
        if len(targets) != len(pixels):
            raise ConfigError(
                f"{len(targets)} targets for {len(pixels)} frames; pass one for each."
            )
        sizes = _sizes(pixels, placements)
        return self._map_losses(self.features(pixels), targets, sizes)

    def head_losses(
        self, image: Tensor, targets: Sequence[Target], placements: Sequence[Placement]
    ) -> dict[str, Tensor]:
        """The same from what the backbone made of the pixels, (B, D, h, w)."""
        return self._map_losses(
            self.pyramid(image), targets, [place.content for place in placements]
        )

    def _map_losses(
        self, maps: list[Tensor], targets: Sequence[Target], sizes: list[tuple[int, int]]
    ) -> dict[str, Tensor]:
        found, device = self.rpn(maps), maps[0].device
        padded = Targets.of(targets, device)
        each = box.table(sizes, device)
        proposals = self.rpn.propose(found, each)
        return rpn_losses(found, padded) | self.heads.losses(maps, proposals, padded, each)


def _sizes(pixels: Tensor, placements: Sequence[Placement] | None) -> list[tuple[int, int]]:
    if placements is None:
        return [(pixels.shape[-2], pixels.shape[-1])] * len(pixels)
    if len(placements) != len(pixels):
        raise ConfigError(f"{len(placements)} placements for {len(pixels)} frames; pass one each.")
    return [place.content for place in placements]


def vitdet_b(
    num_classes: int = 30,
    size: int = 1024,
    *,
    cascade: bool = False,
    rel_pos_resize: Resize | None = None,
) -> ViTDet:
    """ViTDet-B with random weights, in eval mode.

    Args:
        num_classes: 30 for VID, 80 for COCO.
        size: side of the frames; 672 is the paper's smaller one.
        cascade: detectron2's COCO Cascade Mask R-CNN in place of the paper's Faster R-CNN.
        rel_pos_resize: by default `linear` with the cascade, as in detectron2, else `bicubic`, as
            the paper's authors have it.
    """
    resize = rel_pos_resize or ("linear" if cascade else "bicubic")
    return ViTDet(detector_config(num_classes, size, cascade, resize)).eval()


def detector_config(
    num_classes: int, size: int, cascade: bool, resize: Resize, **backbone: Any
) -> ViTDetConfig:
    """The published head settings around a backbone; `backbone` overrides ViTDet-B's sizes."""
    trunk = BackboneConfig(size=size, rel_pos_resize=resize, **backbone)
    if not cascade:
        return ViTDetConfig(trunk, HeadConfig(num_classes))
    heads = HeadConfig(
        num_classes,
        stages=len(CASCADE_IOU),
        shared_boxes=True,
        masks=True,
        samples=512,
        box_loss="l1",
        box_loss_weight=1.0,
    )
    return ViTDetConfig(trunk, heads, proposals=(1000, 1000), short_edge=trunk.trained_size)
