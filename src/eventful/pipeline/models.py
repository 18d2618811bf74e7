"""Models by name, with the names of their labels."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from eventful.modelspec.opening import open_named
from eventful.modelspec.size import Size
from eventful.paper.data.imagenet import NAMES as VID_NAMES
from eventful.surgery import libraries


@dataclass(frozen=True)
class OpenedModel:
    """A model by name, in eval mode.

    Attributes:
        classes: names of its labels, in their order; empty where it has none.
        random: its weights are random.
    """

    name: str
    model: nn.Module
    classes: tuple[str, ...]
    random: bool = False


def open_model(name: str, *, weights: str | None = None, size: Size | None = None) -> OpenedModel:
    """The model that a user named: see `eventful.modelspec.opening.open_named`."""
    opened = open_named(name, weights=weights, size=size)
    return OpenedModel(name, opened.model, label_names(opened.model), opened.random)


def label_names(model: nn.Module) -> tuple[str, ...]:
    """Names of a model's labels, as far as they are known; `class 3` where they are not."""
    given: Sequence[str] = getattr(model, "classes", None) or ()
    if given:
        return tuple(given)
    config: Any = getattr(model, "config", None)
    heads = getattr(config, "heads", None)
    count = getattr(heads, "classes", None) or getattr(config, "classes", None)
    if count is None and hasattr(config, "id2label"):
        named = {int(key): str(value) for key, value in config.id2label.items()}
        return tuple(named.get(i, f"class {i}") for i in range(max(named, default=-1) + 1))
    count = count or getattr(model, "num_classes", None) or 0
    if heads is not None and count == len(VID_NAMES):
        return tuple(VID_NAMES)
    if heads is not None and count == 1:
        return ("person",)
    if heads is None and count == 1000:
        return _imagenet_names()
    return tuple(f"class {i}" for i in range(count))


def _imagenet_names() -> tuple[str, ...]:
    """Those of ImageNet-1k, if timm is installed."""
    if "timm" not in sys.modules:
        return tuple(f"class {i}" for i in range(1000))
    info = libraries.load("timm.data").ImageNetInfo()
    return tuple(info.index_to_description(i).split(",")[0] for i in range(1000))
