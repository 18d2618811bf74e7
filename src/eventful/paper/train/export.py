"""Trained models as files that `eventful.models.loading.load_model` reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from eventful.models.key_formats import KeyReport
from eventful.models.loading import Converted, save
from eventful.models.vitdet import ViTDet
from eventful.models.vivit import ViViT


def save_model(
    model: ViTDet | ViViT,
    path: Path,
    *,
    classes: Sequence[str] = (),
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights and the configuration of a model, whole or not at all.

    Args:
        classes: their names.
        dtype: of the weights in the file; None for their own.
    """
    name = "vitdet" if isinstance(model, ViTDet) else "vivit"
    state = {key: value.detach().to("cpu", dtype) for key, value in model.state_dict().items()}
    save(Converted(name, model.config.to_dict(), state, KeyReport("own")), path, classes)
