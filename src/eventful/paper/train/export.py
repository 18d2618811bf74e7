"""Trained models as files that `eventful.models.loading.load_model` reads."""

from __future__ import annotations

from pathlib import Path

from eventful.models.key_formats import KeyReport
from eventful.models.loading import Converted, save
from eventful.models.vitdet import ViTDet
from eventful.models.vivit import ViViT


def save_model(model: ViTDet | ViViT, path: Path) -> None:
    """Write the weights and the configuration of a model, whole or not at all."""
    name = "vitdet" if isinstance(model, ViTDet) else "vivit"
    state = {key: value.detach().cpu() for key, value in model.state_dict().items()}
    save(Converted(name, model.config.to_dict(), state, KeyReport("own")), path)
