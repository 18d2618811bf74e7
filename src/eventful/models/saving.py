"""Models of this package as files that `eventful.load` and every command reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eventful.errors import ConfigError
from eventful.models.key_formats import KeyReport
from eventful.models.loading import Converted, save
from eventful.models.vitdet import ViTDet
from eventful.models.vitdet.backbone import ViTDetBackbone
from eventful.models.vivit import ViViT


def save_model(
    model: nn.Module,
    path: str | Path,
    *,
    classes: Sequence[str] = (),
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights and the configuration of a model, whole or not at all.

    `eventful.load(path)` builds the model again, and `eventful evaluate`, `train` and `visualize`
    take the file.

    Args:
        model: a ViTDet, a ViTDetBackbone or a ViViT of this package, converted or not.
        path: ends in `.safetensors`.
        classes: their names; those that `model.classes` holds if none are given.
        dtype: of the weights in the file; None for their own.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ConfigError(f"{path} should end in .safetensors, which is what is written.")
    name, config = _described(model)
    state = {key: value.detach().to("cpu", dtype) for key, value in model.state_dict().items()}
    named = tuple(classes or getattr(model, "classes", ()))
    count = _count_of(model)
    if named and count is not None and len(named) != count:
        raise ConfigError(f"{len(named)} names for {count} classes; give one for each.")
    save(Converted(name, config, state, KeyReport("own")), path, named)


def _count_of(model: nn.Module) -> int | None:
    """The number of classes; None for a backbone, which has none."""
    if isinstance(model, ViTDet):
        return model.config.heads.classes
    return model.config.classes if isinstance(model, ViViT) else None


def _described(model: nn.Module) -> tuple[str, dict[str, Any]]:
    """What a file calls the model, and the values to build it from."""
    if isinstance(model, ViTDet):
        return "vitdet", model.config.to_dict()
    if isinstance(model, ViViT):
        return "vivit", model.config.to_dict()
    if isinstance(model, ViTDetBackbone):
        return "vitdet-backbone", asdict(model.config)
    raise ConfigError(
        f"save_model writes a ViTDet, a ViTDetBackbone or a ViViT of eventful.models, not a "
        f"{type(model).__module__}.{type(model).__qualname__}. For another model, keep its weights "
        "with safetensors.torch.save_model, and build it with the library it comes from."
    )
