"""Adapters: the only files that know timm, transformers and torchvision."""

from __future__ import annotations

from eventful.errors import ConfigError
from eventful.surgery.adapter import Adapter, BlockCall, Mismatch
from eventful.surgery.adapters.hf_beit import HFBeit, HFData2Vec
from eventful.surgery.adapters.hf_clips import HFClips
from eventful.surgery.adapters.hf_dense import library_heads
from eventful.surgery.adapters.hf_other import HFLlama4, HFMgpstr, HFMolmo2, HFSpectrogram
from eventful.surgery.adapters.hf_patches import HFQwen2Vision, HFQwen3Vision, HFSiglip2
from eventful.surgery.adapters.hf_plain import HFDinov3, HFPlain, HFYolos
from eventful.surgery.adapters.hf_queries import HFEomt, HFEomtDinov3
from eventful.surgery.adapters.hf_refused import HFRefused
from eventful.surgery.adapters.hf_rotary import HFRotary, HFVJepa
from eventful.surgery.adapters.hf_tiled import (
    HFDepthPro,
    HFDepthProPatches,
    HFLwDetr,
    HFRfDetr,
)
from eventful.surgery.adapters.hf_windowed import HFSam, HFSam3, HFSamHQ, HFVitDet
from eventful.surgery.adapters.own_vit import OwnViT
from eventful.surgery.adapters.timm_eva import TimmEva, TimmEvaRotary
from eventful.surgery.adapters.timm_relative import TimmBeit, TimmRelPos
from eventful.surgery.adapters.timm_sam import TimmSAM
from eventful.surgery.adapters.timm_vit import TimmViT
from eventful.surgery.adapters.torchvision_vit import TorchvisionViT

_ADAPTERS: list[Adapter] = [
    TimmViT(),
    TimmEva(),
    TimmEvaRotary(),
    TimmSAM(),
    TimmBeit(),
    TimmRelPos(),
    TorchvisionViT(),
    HFPlain(),
    HFDinov3(),
    HFYolos(),
    HFMgpstr(),
    HFLlama4(),
    HFMolmo2(),
    HFSpectrogram(),
    HFBeit(),
    HFData2Vec(),
    HFRotary(),
    HFVJepa(),
    HFClips(),
    HFRfDetr(),
    HFLwDetr(),
    HFDepthPro(),
    HFDepthProPatches(),
    HFVitDet(),
    HFSam(),
    HFSamHQ(),
    HFSam3(),
    HFEomt(),
    HFEomtDinov3(),
    HFQwen2Vision(),
    HFQwen3Vision(),
    HFSiglip2(),
    HFRefused(),
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


__all__ = ["Adapter", "BlockCall", "Mismatch", "adapters", "library_heads", "register_adapter"]
