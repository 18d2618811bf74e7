"""Loads the models to evaluate from files, each once per process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from eventful.errors import CheckpointError
from eventful.models.loading import load_model
from eventful.models.vitdet.model import ViTDet, ViTDetConfig
from eventful.models.vivit.model import ViViT, ViViTConfig


@dataclass(frozen=True)
class Weights:
    """A file of weights and how to run them.

    Attributes:
        size: side of the frames, of a detector; None for its own.
        dtype: name of the type of the weights.
    """

    path: Path
    size: int | None = None
    dtype: str = "float32"

    def vitdet_config(self) -> ViTDetConfig:
        """Configuration of the detector; tensors are not read."""
        config = self._config("vitdet", "a whole ViTDet", "eventful evaluate vivit")
        if self.size is not None:
            config["backbone"] = {**config["backbone"], "size": self.size}
        return ViTDetConfig.from_dict(config)

    def vivit_config(self) -> ViViTConfig:
        """Configuration of the recogniser; tensors are not read."""
        return ViViTConfig.from_dict(self._config("vivit", "a ViViT", "eventful evaluate vitdet"))

    def vitdet(self, device: str) -> ViTDet:
        """The detector."""
        self.vitdet_config()
        model = _load(self, device)
        assert isinstance(model, ViTDet)
        return model

    def vivit(self, device: str) -> ViViT:
        """The recogniser of actions."""
        self.vivit_config()
        model = _load(self, device)
        assert isinstance(model, ViViT)
        return model

    def _config(self, model: str, needed: str, other: str) -> dict[str, Any]:
        about = _about(self.path)
        if about["model"] != model:
            raise CheckpointError(
                f"{self.path} holds a {about['model']}, and {needed} is needed. For other models "
                f"there is `{other}`."
            )
        return dict(about["config"])


def _about(path: Path) -> dict[str, Any]:
    advice = (
        "A model of your own becomes a file that can be evaluated with eventful.save_model(model, "
        "path), published weights with `eventful weights convert`"
    )
    if not path.is_file():
        raise CheckpointError(f"{path} is not there. {advice}.")
    try:
        with safe_open(str(path), framework="pt") as file:
            about: dict[str, Any] | None = json.loads(
                (file.metadata() or {}).get("eventful", "null")
            )
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file ({error}). {advice}."
        ) from error
    if about is None:
        raise CheckpointError(f"{path} does not name its model. {advice}.")
    return about


@lru_cache(maxsize=2)
def _load(weights: Weights, device: str) -> nn.Module:
    overrides = {} if weights.size is None else {"size": weights.size}
    model = load_model(weights.path, **overrides)
    return model.to(device, getattr(torch, weights.dtype)).eval()
