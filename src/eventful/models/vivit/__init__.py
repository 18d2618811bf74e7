"""ViViT: actions in video, by a spatial and a temporal transformer (Arnab et al., 2021)."""

from eventful.models.vivit.model import (
    SpatialModel,
    TemporalModel,
    ViViT,
    ViViTConfig,
    steps,
    vivit_b,
    vivit_b_epic,
    vivit_b_kinetics,
)
from eventful.models.vivit.views import average_views, classify_views, prepare, spatial_vectors

__all__ = [
    "SpatialModel",
    "TemporalModel",
    "ViViT",
    "ViViTConfig",
    "average_views",
    "classify_views",
    "prepare",
    "spatial_vectors",
    "steps",
    "vivit_b",
    "vivit_b_epic",
    "vivit_b_kinetics",
]
