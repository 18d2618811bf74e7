"""timm's VisionTransformerSAM: samvit_*, windowed blocks with some global ones between."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from eventful.rules.relative import linear_tables
from eventful.rules.spec import BlockSpec, linear_cost
from eventful.surgery.adapter import BlockCall, Mismatch, is_class, per_head
from eventful.surgery.adapters.origin import forward_of
from eventful.surgery.adapters.timm_trunk import TimmTrunk
from eventful.tokens.layout import TokenLayout

_PATH = "timm.models.vision_transformer_sam"


class TimmSAM(TimmTrunk):
    """Blocks over an image of tokens (B, H, W, D), with decomposed relative position."""

    name = "timm VisionTransformerSAM"
    resizing: ClassVar = {
        "forward_features": "resample_abs_pos_embed_nhwc",
        "forward_intermediates": "resample_abs_pos_embed_nhwc",
    }

    def matches(self, module: nn.Module) -> bool:
        """See `Adapter`."""
        return is_class(module, _PATH, "VisionTransformerSAM")

    def spec(self, trunk: nn.Module, block: Any) -> BlockSpec:
        """See `Adapter`."""
        if forward_of(block) != f"{_PATH}.Block":
            raise Mismatch("its forward is not that of timm's SAM block")
        attention = block.attn
        if forward_of(attention) != f"{_PATH}.Attention":
            raise Mismatch(f"its {type(attention).__name__} is not timm's SAM attention")
        if attention.rope is not None:
            raise Mismatch("its rotary position is that of a place in a window, padding included")
        heads = attention.num_heads

        def qkv(x: Tensor, index: Tensor, positions: Any) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = attention.qkv(x).chunk(3, dim=-1)
            return per_head(attention.q_norm, q, heads), per_head(attention.k_norm, k, heads), v

        return BlockSpec(
            module=block,
            dim=attention.proj.out_features,
            heads=heads,
            head_dim=attention.head_dim,
            scale=attention.scale,
            norm1=block.norm1,
            qkv=qkv,
            project=lambda o: block.ls1(attention.proj(o)),
            norm2=block.norm2,
            mlp=lambda y: block.ls2(block.mlp(y)),
            qkv_cost=linear_cost(attention.qkv),
            project_cost=linear_cost(attention.proj),
            mlp_cost=linear_cost(block.mlp),
            window=(block.window_size, block.window_size) if block.window_size else None,
            relative=partial(linear_tables, attention) if attention.use_rel_pos else None,
        )

    def read(self, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """See `Adapter`."""
        call = super().read(spec, args, kwargs)
        if call.tokens.dim() == 4:
            call.tokens = call.tokens.flatten(1, 2)
        return call

    def write(self, tokens: Tensor, layout: TokenLayout | None, args: tuple[Any, ...]) -> Any:
        """See `Adapter`."""
        return tokens if layout is None else tokens.unflatten(1, layout.grid)
