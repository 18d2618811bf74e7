"""timm's VisionTransformer: vit_*, deit*, *_dinov2*, *clip*, *siglip* and their kin."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from eventful.rules.spec import BlockSpec, linear_cost
from eventful.surgery.adapter import Mismatch, is_class, per_head
from eventful.surgery.adapters.origin import forward_of
from eventful.surgery.adapters.timm_trunk import TimmTrunk

_PATH = "timm.models.vision_transformer"
# Older versions keep it beside the model.
_ATTENTION = ("timm.layers.attention.Attention", f"{_PATH}.Attention")


class TimmViT(TimmTrunk):
    """Global attention, optional class and register tokens, layer scale, q/k norm."""

    name = "timm VisionTransformer"

    def matches(self, module: nn.Module) -> bool:
        """See `Adapter`."""
        return is_class(module, _PATH, "VisionTransformer")

    def spec(self, trunk: nn.Module, block: Any) -> BlockSpec:
        """See `Adapter`."""
        origin = forward_of(block)
        if origin not in (f"{_PATH}.Block", f"{_PATH}.ResPostBlock"):
            raise Mismatch("its forward is not that of timm's Block: attention, then MLP")
        attention = block.attn
        if forward_of(attention) not in _ATTENTION:
            raise Mismatch(f"its {type(attention).__name__} is not timm's plain softmax attention")
        if getattr(attention, "gate", None) is not None:
            raise Mismatch("its attention output is gated by the block's input")
        heads = attention.num_heads
        attention_norm = getattr(attention, "norm", nn.Identity())

        def qkv(x: Tensor, index: Tensor, positions: Any) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = attention.qkv(x).chunk(3, dim=-1)
            return per_head(attention.q_norm, q, heads), per_head(attention.k_norm, k, heads), v

        def project(o: Tensor) -> Tensor:
            return attention.proj(attention_norm(o))

        post_norm = origin == f"{_PATH}.ResPostBlock"
        norms = (nn.Identity(), nn.Identity()) if post_norm else (block.norm1, block.norm2)
        scales = (None, None) if post_norm else (_gamma(block.ls1), _gamma(block.ls2))
        after = (block.norm1, block.norm2) if post_norm else (nn.Identity(), nn.Identity())
        return BlockSpec(
            module=block,
            dim=attention.proj.out_features,
            heads=heads,
            head_dim=attention.head_dim,
            scale=attention.scale,
            norm1=norms[0],
            qkv=qkv,
            project=lambda o: after[0](project(o)),
            norm2=norms[1],
            mlp=lambda y: after[1](block.mlp(y)),
            qkv_cost=linear_cost(attention.qkv),
            project_cost=linear_cost(attention.proj),
            mlp_cost=linear_cost(block.mlp),
            project_scale=scales[0],
            mlp_scale=scales[1],
        )


def _gamma(scale: nn.Module) -> Tensor | None:
    """The factors of a layer scale; None where there is none."""
    if isinstance(scale, nn.Identity):
        return None
    if type(scale).__name__ != "LayerScale":
        raise Mismatch(f"its {type(scale).__name__} is not timm's LayerScale")
    gamma = scale.gamma
    assert isinstance(gamma, Tensor)
    return gamma
