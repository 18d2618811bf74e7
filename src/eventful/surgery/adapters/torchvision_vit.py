"""torchvision's VisionTransformer: vit_b_16, vit_b_32, vit_l_16, vit_l_32, vit_h_14."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from eventful.cost.counting import LinearCost
from eventful.rules.spec import BlockSpec, linear_cost
from eventful.surgery.adapter import Adapter, Foreign, Mismatch, is_class, packed_qkv
from eventful.surgery.adapters.origin import forward_of
from eventful.tokens.layout import TokenLayout

_PATH = "torchvision.models.vision_transformer"
_ATTENTION = "torch.nn.modules.activation.MultiheadAttention"


class TorchvisionViT(Adapter):
    """Global attention by `nn.MultiheadAttention`, a class token, frames of one size."""

    name = "torchvision VisionTransformer"
    library = "torchvision"

    def matches(self, module: nn.Module) -> bool:
        """See `Adapter`."""
        return is_class(module, _PATH, "VisionTransformer")

    def blocks(self, trunk: Foreign) -> Sequence[tuple[str, nn.Module]]:
        """See `Adapter`."""
        layers = trunk.encoder.layers.named_children()
        return [(f"encoder.layers.{name}", block) for name, block in layers]

    def spec(self, trunk: nn.Module, block: Foreign) -> BlockSpec:
        """See `Adapter`."""
        if forward_of(block) != f"{_PATH}.EncoderBlock":
            raise Mismatch("its forward is not that of torchvision's EncoderBlock")
        attention = block.self_attention
        if forward_of(attention) != _ATTENTION:
            raise Mismatch(f"its {type(attention).__name__} is not torch's MultiheadAttention")
        weight, bias = attention.in_proj_weight, attention.in_proj_bias
        if weight is None:
            raise Mismatch("its keys or values are not as wide as its tokens")
        if attention.bias_k is not None or attention.add_zero_attn:
            raise Mismatch("its attention has keys that belong to no token")

        def packed(x: Tensor) -> Tensor:
            return F.linear(x, attention.in_proj_weight, attention.in_proj_bias)

        return BlockSpec(
            module=block,
            dim=attention.embed_dim,
            heads=attention.num_heads,
            head_dim=attention.head_dim,
            scale=attention.head_dim**-0.5,
            norm1=block.ln_1,
            qkv=packed_qkv(packed),
            project=attention.out_proj,
            norm2=block.ln_2,
            mlp=block.mlp,
            qkv_cost=LinearCost(weight.numel(), 0 if bias is None else bias.numel()),
            project_cost=linear_cost(attention.out_proj),
            mlp_cost=linear_cost(block.mlp),
        )

    def layout(self, trunk: Foreign, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        height, width = (side // trunk.patch_size for side in size)
        return TokenLayout((height, width), prefix=1)

    def default_size(self, trunk: Foreign) -> tuple[int, int]:
        """See `Adapter`."""
        return trunk.image_size, trunk.image_size
