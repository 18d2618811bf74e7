"""ViTDet: a plain ViT backbone with a detector on top (Li et al., 2022)."""

from eventful.models.vitdet.backbone import BackboneConfig, ViTDetBackbone
from eventful.models.vitdet.found import Found
from eventful.models.vitdet.frames import Detections, Placement, Target, paste_masks, prepare
from eventful.models.vitdet.heads import HeadConfig
from eventful.models.vitdet.model import ViTDet, ViTDetConfig, vitdet_b

__all__ = [
    "BackboneConfig",
    "Detections",
    "Found",
    "HeadConfig",
    "Placement",
    "Target",
    "ViTDet",
    "ViTDetBackbone",
    "ViTDetConfig",
    "paste_masks",
    "prepare",
    "vitdet_b",
]
