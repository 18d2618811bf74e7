"""How pictures are normalised, and of what size: as given, or as a model or its processor says."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eventful.errors import ConfigError
from eventful.tokens.layout import whole_windows

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_ADVICE = "pass normalize=(mean, std), an image processor, or 'none' for pixels from 0 to 1"


@dataclass(frozen=True)
class Normalization:
    """Pixels from 0 to 1 become (pixel - mean) / std, for each channel."""

    mean: tuple[float, ...] = IMAGENET[0]
    std: tuple[float, ...] = IMAGENET[1]

    def __post_init__(self) -> None:
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ConfigError(
                f"normalize: mean {self.mean} and std {self.std} are not three numbers each, the "
                f"latter above 0; {_ADVICE}."
            )


def choose_normalization(normalize: Any, model: Any = None) -> Normalization:
    """What `normalize` and `model` of `eventful.read` come to.

    Args:
        normalize: None for what the model says, or ImageNet's values without a model; "none" for
            pixels from 0 to 1; a pair (mean, std); a model, or an image processor of transformers.
    """
    if normalize is None:
        return Normalization() if model is None else _of_model(model)
    if isinstance(normalize, str):
        if normalize == "none":
            return Normalization((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        raise ConfigError(f"normalize={normalize!r} is not known; {_ADVICE}.")
    if isinstance(normalize, Sequence):
        if len(normalize) != 2:
            raise ConfigError(f"normalize: expected a pair (mean, std); {_ADVICE}.")
        return Normalization(_three(normalize[0]), _three(normalize[1]))
    return _of_model(normalize)


def model_normalization(model: Any) -> Normalization:
    """As a model says; ImageNet's values, with which most are trained, where it does not."""
    try:
        return choose_normalization(None, model)
    except ConfigError:
        return Normalization()


def input_size(model: Any) -> tuple[int, int] | None:
    """Height and width of the pictures that a model, or an image processor, takes; None if open."""
    embedding = getattr(model, "patch_embed", None)
    config = getattr(model, "config", None)
    sizes = (
        getattr(embedding, "img_size", None),
        (_settings(model) or {}).get("input_size"),
        getattr(config, "image_size", None),
        getattr(getattr(config, "vision_config", None), "image_size", None),
        getattr(getattr(config, "backbone_config", None), "image_size", None),
        getattr(model, "image_size", None),  # torchvision
        getattr(model, "crop_size", None) if getattr(model, "do_center_crop", True) else None,
        getattr(model, "size", None),
    )
    found = next((found for size in sizes if (found := _height_width(size)) is not None), None)
    return None if found is None else _in_windows(found, getattr(config, "backbone_config", None))


def _in_windows(size: tuple[int, int], backbone: Any) -> tuple[int, int]:
    """A size that RF-DETR and LW-DETR can cut into windows; that of a config need not fit."""
    count = getattr(backbone, "num_windows_side", getattr(backbone, "num_windows", None))
    patch = _height_width(getattr(backbone, "patch_size", None))
    return size if count is None or patch is None else whole_windows(size, patch, int(count))


def _of_model(model: Any) -> Normalization:
    """As timm's `pretrained_cfg` says, or an image processor, or the one a config names."""
    for says in (_settings(model), _attributes(model), _processor_file(model)):
        if says is None:
            continue
        if says.get("do_normalize") is False:
            return choose_normalization("none")
        mean = says.get("mean") or says.get("image_mean")
        std = says.get("std") or says.get("image_std")
        if mean is not None and std is not None:
            return Normalization(_three(mean), _three(std))
    raise ConfigError(
        f"{type(model).__name__} does not say how its pictures are normalised; {_ADVICE}."
    )


def _settings(model: Any) -> Mapping[str, Any] | None:
    """Settings of a model of timm."""
    for name in ("pretrained_cfg", "default_cfg"):
        settings = getattr(model, name, None)
        if settings is not None:
            return settings if isinstance(settings, Mapping) else vars(settings)
    return None


def _attributes(model: Any) -> Mapping[str, Any] | None:
    """Settings of an image processor, which are its attributes, or of a config that has them."""
    for owner in (model, getattr(model, "image_processor", None), getattr(model, "config", None)):
        if getattr(owner, "image_mean", None) is not None:
            names = ("image_mean", "image_std", "do_normalize")
            return {name: getattr(owner, name, None) for name in names}
    return None


def _processor_file(model: Any) -> Mapping[str, Any] | None:
    """Settings of the image processor beside a model's weights, where they are on this machine."""
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not isinstance(name, str) or not name:
        return None
    path: Any = Path(name) / "preprocessor_config.json"
    hub = sys.modules.get("huggingface_hub")  # loaded with any model of transformers
    if not path.is_file() and hub is not None and not Path(name).exists():
        path = hub.try_to_load_from_cache(name, "preprocessor_config.json")
    if not isinstance(path, str | Path) or not Path(path).is_file():
        return None
    settings = json.loads(Path(path).read_text(encoding="utf-8"))
    return settings if isinstance(settings, Mapping) else None


def _height_width(size: Any) -> tuple[int, int] | None:
    """A size as libraries write it: 224, (224, 224), (3, 224, 224), {"height": 224, ...}."""
    if isinstance(size, Mapping) or hasattr(size, "height"):
        get = size.get if isinstance(size, Mapping) else lambda name: getattr(size, name, None)
        edge = get("shortest_edge")
        pair: tuple[Any, ...] = (
            (edge, edge) if get("height") is None else (get("height"), get("width"))
        )
    elif isinstance(size, int):
        pair = (size, size)
    elif isinstance(size, Sequence) and len(size) in (2, 3) and not isinstance(size, str):
        pair = tuple(size[-2:])
    else:
        return None
    height, width = pair
    if not isinstance(height, int) or not isinstance(width, int) or min(height, width) < 1:
        return None
    return height, width


def _three(values: Any) -> tuple[float, ...]:
    """Three numbers, from a sequence or from one number for all channels."""
    try:
        found = tuple(float(value) for value in values)
    except TypeError:
        return (float(values),) * 3
    return found * 3 if len(found) == 1 else found
