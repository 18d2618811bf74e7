"""Models by name on the command line: `timm:NAME`, `hf:NAME`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from eventful.errors import UnsupportedError
from eventful.surgery import libraries


def build(name: str, *, size: int | None = None, weightless: bool = False) -> nn.Module:
    """A model with random weights, in eval mode.

    Args:
        name: `timm:NAME`, or `hf:NAME` with a model type (`vit`), a name on the hub, or the
            path of a config.
        size: frame size to build it for, if the family lets one choose.
        weightless: on the meta device, where shapes are all that is needed.
    """
    family, _, rest = name.partition(":")
    if family == "timm" and rest:
        return _timm(rest, size, weightless)
    if family == "hf" and rest:
        return _hf(rest, size, weightless)
    raise UnsupportedError(
        f"{name!r} names no model: write timm:NAME (timm:vit_small_patch16_224) or hf:NAME, where "
        "NAME is a model type (hf:dinov2), a name on the hub, or the path of a config.json."
    )


def _place(weightless: bool) -> Any:
    return torch.device("meta") if weightless else nullcontext()


def _timm(name: str, size: int | None, weightless: bool) -> nn.Module:
    timm = libraries.load("timm")
    if not timm.is_model(name):
        close = timm.list_models(f"*{name.split('_')[0]}*")[:8]
        raise UnsupportedError(
            f"timm has no model {name!r}. Some it has: {', '.join(close) or 'none'}."
        )
    options = {} if size is None else {"img_size": size}
    try:
        with _place(weightless):
            return cast(nn.Module, timm.create_model(name, pretrained=False, **options).eval())
    except (TypeError, NotImplementedError):
        # Some families take no img_size, some constructors need real tensors.
        return cast(nn.Module, timm.create_model(name, pretrained=False).eval())


def _hf(name: str, size: int | None, weightless: bool) -> nn.Module:
    transformers = libraries.load("transformers")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    try:
        if name in known and not Path(name).exists():
            config = transformers.AutoConfig.for_model(name)
        else:
            # Else transformers would ask whether to run code of a repository on the hub.
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"transformers cannot find a config for {name!r} ({str(error).splitlines()[0]}). Pass "
            "a model type such as vit or dinov2, or the path of a config.json."
        ) from None
    if size is not None and hasattr(config, "image_size"):
        config.image_size = size
    with _place(weightless):
        return cast(nn.Module, transformers.AutoModel.from_config(config).eval())
