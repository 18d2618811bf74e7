"""timm's VisionTransformerSAM: samvit_*, most blocks windowed, some global."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from eventful.rules.relative import linear_tables
from eventful.rules.spec import BlockSpec
from eventful.surgery.adapter import BlockCall, Foreign, Mismatch, is_class
from eventful.surgery.adapters.origin import known_attention
from eventful.surgery.adapters.timm_trunk import TimmTrunk, timm_spec
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

    def spec(self, trunk: nn.Module, block: Foreign) -> BlockSpec:
        """See `Adapter`."""
        attention = known_attention(block, [f"{_PATH}.Block"], [f"{_PATH}.Attention"])
        if attention.rope is not None:
            raise Mismatch("its rotary position depends on the place in a window, with padding")
        return replace(
            timm_spec(block, attention),
            project=lambda o: block.ls1(attention.proj(o)),
            mlp=lambda y: block.ls2(block.mlp(y)),
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
