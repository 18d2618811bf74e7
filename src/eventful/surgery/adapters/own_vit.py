"""This package's own models: ViTDet's backbone and ViViT's spatial model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from eventful.rules.spec import BlockSpec, linear_cost
from eventful.surgery.adapter import Adapter, Mismatch, is_class
from eventful.surgery.adapters.constants import SizedMethod, is_own
from eventful.surgery.adapters.origin import forward_of
from eventful.surgery.session import Session
from eventful.tokens.layout import TokenLayout

_BLOCKS = "eventful.models.blocks"
_TRUNKS = {
    "eventful.models.vitdet.backbone": "ViTDetBackbone",
    "eventful.models.vivit.model": "SpatialModel",
}


class OwnViT(Adapter):
    """Blocks that take (tokens, grid) and return tokens."""

    name = "eventful ViTDet and ViViT"
    library = "eventful"  # a subclass elsewhere may run its own loop

    def matches(self, module: nn.Module) -> bool:
        """See `Adapter`."""
        return any(is_class(module, path, name) for path, name in _TRUNKS.items())

    def blocks(self, trunk: Any) -> Sequence[tuple[str, nn.Module]]:
        """See `Adapter`."""
        return [(f"blocks.{name}", block) for name, block in trunk.blocks.named_children()]

    def spec(self, trunk: nn.Module, block: Any) -> BlockSpec:
        """See `Adapter`."""
        if forward_of(block) != f"{_BLOCKS}.Block":
            raise Mismatch("its forward is not that of eventful.models.blocks.Block")
        attention = block.attn
        if forward_of(attention) != f"{_BLOCKS}.Attention":
            raise Mismatch(f"its {type(attention).__name__} is not that of eventful.models.blocks")
        if attention.pool != 1:
            raise Mismatch("its keys are pooled already; convert the model with Config(pool=...)")

        def qkv(x: Tensor, index: Tensor, positions: Any) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = attention.qkv(x).chunk(3, dim=-1)
            return q, k, v

        dim = attention.proj.out_features
        return BlockSpec(
            module=block,
            dim=dim,
            heads=attention.heads,
            head_dim=dim // attention.heads,
            scale=attention.scale,
            norm1=block.norm1,
            qkv=qkv,
            project=attention.proj,
            norm2=block.norm2,
            mlp=block.mlp,
            qkv_cost=linear_cost(attention.qkv),
            project_cost=linear_cost(attention.proj),
            mlp_cost=linear_cost(block.mlp),
            window=(block.window, block.window) if block.window else None,
            relative=attention.tables if attention.rel_pos_h is not None else None,
        )

    def layout(self, trunk: Any, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        return TokenLayout(trunk.grid(size), prefix=trunk.special_tokens)

    def default_size(self, trunk: Any) -> tuple[int, int]:
        """See `Adapter`."""
        return trunk.config.size, trunk.config.size

    def prepare(self, trunk: nn.Module, name: str, session: Session) -> dict[str, Any]:
        """See `Adapter`."""
        if not is_own(trunk, "tables", self.library):
            return {}
        return {"tables": SizedMethod(trunk, "tables", session)}
