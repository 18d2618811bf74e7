"""This package's own models: ViTDet's backbone, ViViT's spatial model, the saliency model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from eventful.rules.spec import BlockSpec
from eventful.surgery.adapter import (
    Adapter,
    Foreign,
    Method,
    Mismatch,
    is_class,
    packed_qkv,
    usual_spec,
)
from eventful.surgery.adapters.constants import SizedMethod, is_own
from eventful.surgery.adapters.origin import known_attention
from eventful.surgery.session import Session
from eventful.tokens.layout import TokenLayout

_BLOCKS = "eventful.models.blocks"
_TRUNKS = {
    "eventful.models.focus": "FocusViT",
    "eventful.models.vitdet.backbone": "ViTDetBackbone",
    "eventful.models.vivit.model": "SpatialModel",
}


class OwnViT(Adapter):
    """Blocks that take (tokens, grid) and return tokens."""

    name = "eventful ViTDet, ViViT and FocusViT"
    library = "eventful"  # a subclass defined elsewhere may have its own loop

    def matches(self, module: nn.Module) -> bool:
        """See `Adapter`."""
        return any(is_class(module, path, name) for path, name in _TRUNKS.items())

    def blocks(self, trunk: Foreign) -> Sequence[tuple[str, nn.Module]]:
        """See `Adapter`."""
        return [(f"blocks.{name}", block) for name, block in trunk.blocks.named_children()]

    def spec(self, trunk: nn.Module, block: Foreign) -> BlockSpec:
        """See `Adapter`."""
        attention = known_attention(block, [f"{_BLOCKS}.Block"], [f"{_BLOCKS}.Attention"])
        if attention.pool != 1:
            raise Mismatch("its keys are pooled already; convert the model with Config(pool=...)")
        dim = attention.proj.out_features
        width = dim // attention.heads
        return replace(
            usual_spec(block, attention, attention.heads, width, packed_qkv(attention.qkv)),
            window=(block.window, block.window) if block.window else None,
            relative=attention.tables if attention.rel_pos_h is not None else None,
        )

    def layout(self, trunk: Foreign, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        return TokenLayout(trunk.grid(size), prefix=trunk.special_tokens)

    def default_size(self, trunk: Foreign) -> tuple[int, int]:
        """See `Adapter`."""
        return trunk.config.size, trunk.config.size

    def prepare(self, trunk: nn.Module, name: str, session: Session) -> dict[str, Method]:
        """See `Adapter`."""
        if not is_own(trunk, "tables", self.library):
            return {}
        return {"tables": SizedMethod(trunk, "tables", session)}
