"""Adapters: the only files that know timm, transformers and torchvision."""

from __future__ import annotations

from eventful.errors import ConfigError
from eventful.surgery.adapter import Adapter, BlockCall, Mismatch
from eventful.surgery.adapters.hf_plain import HFDinov3, HFPlain, HFYolos
from eventful.surgery.adapters.hf_windowed import HFSam, HFVitDet
from eventful.surgery.adapters.own_vit import OwnViT
from eventful.surgery.adapters.timm_eva import TimmEva, TimmEvaRotary
from eventful.surgery.adapters.timm_sam import TimmSAM
from eventful.surgery.adapters.timm_vit import TimmViT
from eventful.surgery.adapters.torchvision_vit import TorchvisionViT

_ADAPTERS: list[Adapter] = [
    TimmViT(),
    TimmEva(),
    TimmEvaRotary(),
    TimmSAM(),
    TorchvisionViT(),
    HFPlain(),
    HFDinov3(),
    HFYolos(),
    HFVitDet(),
    HFSam(),
    OwnViT(),
]


def register_adapter(adapter: Adapter) -> Adapter:
    """Add a model family. The adapter registered last is tried first and may override others."""
    if not isinstance(adapter, Adapter):
        raise ConfigError(
            f"register_adapter takes an object of a subclass of eventful.Adapter, got {adapter!r}; "
            "e.g. register_adapter(MyAdapter())."
        )
    _ADAPTERS.insert(0, adapter)
    return adapter


def adapters() -> tuple[Adapter, ...]:
    """The known adapters, in the order in which they are tried."""
    return tuple(_ADAPTERS)


__all__ = ["Adapter", "BlockCall", "Mismatch", "adapters", "register_adapter"]
