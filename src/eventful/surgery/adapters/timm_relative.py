"""timm's models with a bias by relative position: beit*, beitv2*, vit_relpos_*, vit_srelpos_*."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from eventful.rules.spec import BiasTable, BlockSpec
from eventful.surgery.adapter import BlockCall, Foreign, Mismatch, is_class, usual_spec
from eventful.surgery.adapters.origin import forward_of, known_attention
from eventful.surgery.adapters.timm_eva import joined_bias_qkv, qkv_cost, scaled
from eventful.surgery.adapters.timm_trunk import TimmTrunk, timm_spec
from eventful.tokens.layout import TokenLayout

_BEIT = "timm.models.beit"
_RELPOS = "timm.models.vision_transformer_relpos"
_TABLES = ("RelPosBias", "RelPosMlp")


class TimmBeit(TimmTrunk):
    """BEiT: a table of biases in every block, or one for all."""

    name = "timm Beit"
    resizing: ClassVar = {}

    def matches(self, module: nn.Module) -> bool:
        """See `Adapter`."""
        return is_class(module, _BEIT, "Beit")

    def spec(self, trunk: Foreign, block: Foreign) -> BlockSpec:
        """See `Adapter`."""
        attention = known_attention(block, [f"{_BEIT}.Block"], [f"{_BEIT}.Attention"])
        heads = attention.num_heads
        width = attention.proj.in_features // heads
        own = attention.relative_position_bias_table is not None
        parts = [attention._get_rel_pos_bias] if own else []
        parts += [] if trunk.rel_pos_bias is None else [trunk.rel_pos_bias]

        def bias(layout: TokenLayout) -> Tensor:
            total: Tensor = sum(part() for part in parts)
            return total[0] if total.dim() == 4 else total

        return replace(
            usual_spec(block, attention, heads, width, joined_bias_qkv(attention)),
            project=lambda o: scaled(block.gamma_1, attention.proj(o)),
            mlp=lambda y: scaled(block.gamma_2, block.mlp(y)),
            bias=bias if parts else None,
            qkv_cost=qkv_cost(attention),
        )

    def read(self, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """See `Adapter`; the shared bias is part of the spec."""
        return BlockCall(args[0])


class TimmRelPos(TimmTrunk):
    """ViTs with a bias by relative position, from a table or from a small network."""

    name = "timm VisionTransformerRelPos"
    adds_positions = False
    resizing: ClassVar = {}

    def matches(self, module: nn.Module) -> bool:
        """See `Adapter`."""
        return is_class(module, _RELPOS, "VisionTransformerRelPos")

    def spec(self, trunk: Foreign, block: Foreign) -> BlockSpec:
        """See `Adapter`."""
        blocks = [f"{_RELPOS}.RelPosBlock", f"{_RELPOS}.ResPostRelPosBlock"]
        attention = known_attention(block, blocks, [f"{_RELPOS}.RelPosAttention"])
        spec = replace(timm_spec(block, attention), bias=_bias(trunk, attention))
        if forward_of(block) == blocks[1]:
            return replace(
                spec,
                norm1=nn.Identity(),
                norm2=nn.Identity(),
                project=lambda o: block.norm1(attention.proj(o)),
                mlp=lambda y: block.norm2(block.mlp(y)),
            )
        return replace(
            spec,
            project=lambda o: block.ls1(attention.proj(o)),
            mlp=lambda y: block.ls2(block.mlp(y)),
        )

    def read(self, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """See `Adapter`; the shared bias is part of the spec."""
        return BlockCall(args[0])


def _bias(trunk: Foreign, attention: Foreign) -> BiasTable | None:
    """The bias of a block: its own, else the one that all blocks share."""
    table = attention.rel_pos if attention.rel_pos is not None else trunk.shared_rel_pos
    if table is None:
        return None
    if type(table).__name__ not in _TABLES:
        raise Mismatch(f"its {type(table).__name__} is not timm's {' or '.join(_TABLES)}")

    def bias(layout: TokenLayout) -> Tensor:
        made: Tensor = table.get_bias()[0]
        return made

    return bias
