"""Windowed transformers of transformers: ViTDet and SAM's image encoder."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from eventful.rules.relative import linear_tables
from eventful.rules.spec import BlockSpec, linear_cost
from eventful.surgery.adapter import BlockCall, Method, Mismatch, packed_qkv
from eventful.surgery.adapters.hf_base import (
    AnnouncedStages,
    HFAdapter,
    find,
    need,
    need_own_forward,
)
from eventful.surgery.session import Session
from eventful.tokens.layout import TokenLayout


class HFVitDet(HFAdapter):
    """ViTDet: layers take (B, D, h, w) and return it as the only entry of a tuple."""

    name = "transformers ViTDet"
    trunks: ClassVar = {"vitdet": ("VitDetModel", "VitDetBackbone")}
    layers = ("encoder.layer",)
    sized: ClassVar = {"embeddings.get_absolute_positions": False}

    def spec(self, trunk: nn.Module, block: nn.Module) -> BlockSpec:
        """See `Adapter`."""
        if find(block, "residual") is not None:
            raise Mismatch("its residual bottleneck mixes neighbouring tokens by convolution")
        return _spec(block)

    def read(self, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """See `Adapter`."""
        image, *options = args
        kwargs = {"output_attentions": any(options), **kwargs}
        tokens = image if image.dim() == 3 else image.flatten(2).transpose(1, 2)
        return super().read(spec, (tokens,), kwargs)

    def write(self, tokens: Tensor, layout: TokenLayout | None, args: tuple[Any, ...]) -> Any:
        """See `Adapter`."""
        if layout is None:
            return (tokens,)
        return (tokens.transpose(1, 2).unflatten(2, layout.grid),)

    def prepare(self, trunk: nn.Module, name: str, session: Session) -> dict[str, Method]:
        """See `Adapter`."""
        announced = AnnouncedStages(trunk, name, session)
        return {**super().prepare(trunk, name, session), "forward": announced}


class HFSam(HFAdapter):
    """SAM's image encoder: layers take and return (B, h, w, D)."""

    name = "transformers SAM"
    trunks: ClassVar = {"sam": ("SamVisionEncoder",)}
    layers = ("layers",)

    def spec(self, trunk: nn.Module, block: nn.Module) -> BlockSpec:
        """See `Adapter`."""
        return _spec(block)

    def read(self, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """See `Adapter`."""
        image, *rest = args
        tokens = image if image.dim() == 3 else image.flatten(1, 2)
        return super().read(spec, (tokens, *rest), kwargs)

    def write(self, tokens: Tensor, layout: TokenLayout | None, args: tuple[Any, ...]) -> Any:
        """See `Adapter`."""
        return tokens if layout is None else tokens.unflatten(1, layout.grid)


def _spec(block: nn.Module) -> BlockSpec:
    """Both families pad windows after the first norm, so a padding token is qkv(0)."""
    attention = need(block, "attention", "attn")
    need_own_forward(block, attention)
    norm1, norm2 = need(block, "layer_norm1", "norm1"), need(block, "layer_norm2", "norm2")
    mlp, project = need(block, "mlp"), need(attention, "proj")
    side = need(block, "window_size")
    heads = need(attention, "num_attention_heads", "num_heads")

    return BlockSpec(
        module=block,
        dim=project.out_features,
        heads=heads,
        head_dim=project.in_features // heads,
        scale=attention.scale,
        norm1=norm1,
        qkv=packed_qkv(attention.qkv),
        project=project,
        norm2=norm2,
        mlp=mlp,
        qkv_cost=linear_cost(attention.qkv),
        project_cost=linear_cost(project),
        mlp_cost=linear_cost(mlp),
        window=(side, side) if side else None,
        relative=partial(linear_tables, attention)
        if find(attention, "rel_pos_h") is not None
        else None,
    )
