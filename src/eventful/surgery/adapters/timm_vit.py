"""timm's VisionTransformer: vit_*, deit*, *_dinov2*, *clip*, *siglip* and similar."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from eventful.rules.spec import BlockSpec
from eventful.surgery.adapter import Foreign, Mismatch, is_class
from eventful.surgery.adapters.origin import forward_of, known_attention
from eventful.surgery.adapters.timm_parallel import differential, scaling_spec, things_spec
from eventful.surgery.adapters.timm_trunk import TimmTrunk, timm_spec

_PATH = "timm.models.vision_transformer"
_BLOCKS = (f"{_PATH}.Block", f"{_PATH}.ResPostBlock")
# Older versions of timm define it beside the model.
_ATTENTION = ("timm.layers.attention.Attention", f"{_PATH}.Attention")
_DIFFERENTIAL = "timm.layers.diff_attention.DiffAttention"
_SCALING = (f"{_PATH}.ParallelScalingBlock", f"{_PATH}.DiffParallelScalingBlock")
_THINGS = f"{_PATH}.ParallelThingsBlock"


class TimmViT(TimmTrunk):
    """Global attention, optional class and register tokens, layer scale, q/k norm."""

    name = "timm VisionTransformer"

    def matches(self, module: nn.Module) -> bool:
        """See `Adapter`."""
        return is_class(module, _PATH, "VisionTransformer")

    def spec(self, trunk: nn.Module, block: Foreign) -> BlockSpec:
        """See `Adapter`."""
        if forward_of(block) in _SCALING:
            return scaling_spec(block)
        if forward_of(block) == _THINGS:
            return things_spec(block, _ATTENTION)
        attention = known_attention(block, _BLOCKS, (*_ATTENTION, _DIFFERENTIAL))
        attention_norm = getattr(attention, "norm", nn.Identity())

        def project(o: Tensor) -> Tensor:
            return attention.proj(attention_norm(o))

        post_norm = forward_of(block) == f"{_PATH}.ResPostBlock"
        norms = (nn.Identity(), nn.Identity()) if post_norm else (block.norm1, block.norm2)
        scales = (None, None) if post_norm else (_gamma(block.ls1), _gamma(block.ls2))
        after = (block.norm1, block.norm2) if post_norm else (nn.Identity(), nn.Identity())
        spec = replace(
            timm_spec(block, attention),
            norm1=norms[0],
            project=lambda o: after[0](project(o)),
            norm2=norms[1],
            mlp=lambda y: after[1](block.mlp(y)),
            project_scale=scales[0],
            mlp_scale=scales[1],
        )
        if forward_of(attention) == _DIFFERENTIAL:
            return differential(spec, attention, lambda o: after[0](attention.proj(o)))
        return spec


def _gamma(scale: nn.Module) -> Tensor | None:
    """The factors of a layer scale; None where there is none."""
    if isinstance(scale, nn.Identity):
        return None
    if type(scale).__name__ != "LayerScale":
        raise Mismatch(f"its {type(scale).__name__} is not timm's LayerScale")
    gamma = scale.gamma
    assert isinstance(gamma, Tensor)
    return gamma
