"""Transformers of transformers that get rotary position beside their tokens, or make their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from eventful.rules.spec import BlockSpec, linear_cost
from eventful.rules.step import Step
from eventful.surgery.adapter import BlockCall, Foreign, per_head, refuse
from eventful.surgery.adapters.hf_base import find, need, need_own_forward
from eventful.surgery.adapters.hf_plain import HFPlain
from eventful.tokens.layout import TokenLayout


class HFRotary(HFPlain):
    """Tables of (cos, sin) for the tokens, or for all but those ahead of them."""

    name = "transformers MLCD, Sapiens 2, Step 3"
    adds_positions = False
    trunks: ClassVar = {
        "mlcd": ("MLCDVisionModel",),
        "sapiens2": ("Sapiens2Model", "Sapiens2Backbone"),
        "step3p7": ("Step3p7VisionModel",),
    }
    layers = ("model.layer", "encoder.layers", "layers")
    sized: ClassVar = {}

    def spec(self, trunk: nn.Module, block: nn.Module) -> BlockSpec:
        """See `Adapter`."""
        found = super().spec(trunk, block)
        attention = need(block, "attention", "self_attn")
        query, key, value = (need(attention, f"{name}_proj") for name in "qkv")
        size, heads = found.head_dim, found.heads
        norms = [find(attention, f"{name}_norm") or nn.Identity() for name in "qk"]

        def qkv(x: Tensor, index: Tensor, rotary: Tables) -> tuple[Tensor, Tensor, Tensor]:
            parts = [
                per_head(norm, layer(x), layer.out_features // size)
                for norm, layer in zip(norms, (query, key), strict=True)
            ]
            q, k = (rotary.rotate(part, index) for part in parts)
            return q, _every_head(k, heads, size), _every_head(value(x), heads, size)

        scales = {
            field: getattr(block, name)
            for field, name in (("project_scale", "lambda_1"), ("mlp_scale", "lambda_2"))
            if find(block, name) is not None
        }
        return replace(found, qkv=qkv, **scales)

    def read_in(
        self, step: Step, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BlockCall:
        """See `Adapter`; the layers of one frame share the tables."""
        given = kwargs.get("position_embeddings")
        if given is None:  # by its place
            given = next(arg for arg in args if isinstance(arg, tuple | list))
        call = self.read(spec, tuple(arg for arg in args if arg is not given), kwargs)
        tokens = step.layouts[spec.trunk].tokens
        rotary = step.shared(("rotary", spec.trunk), lambda: Tables.of(given, tokens))
        return replace(call, positions=rotary)


class Tables(tuple[Tensor, Tensor]):
    """(cos, sin) of all tokens, each (N, d); keeps the rows that were gathered last."""

    _last: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def of(cls, given: Any, tokens: int) -> Tables:
        """Tables for `tokens` tokens; those ahead of the first row are not rotated."""
        cos, sin = (table.reshape(-1, table.shape[-1]) for table in given)
        ahead = tokens - len(cos)
        if ahead > 0:
            cos = torch.cat([cos.new_ones(ahead, cos.shape[1]), cos])
            sin = torch.cat([sin.new_zeros(ahead, sin.shape[1]), sin])
        return cls((cos, sin))

    def rotate(self, tokens: Tensor, index: Tensor) -> Tensor:
        """Rotate the heads of q or k (B, M, H*d) of the tokens at `index` (B, M)."""
        if self._last is None or self._last[0] is not index:
            cos, sin = (table.float() for table in self)
            self._last = (index, cos[index][:, :, None], sin[index][:, :, None])
        _, cos, sin = self._last  # (B, M, 1, d)
        x = tokens.unflatten(-1, (-1, cos.shape[-1])).float()  # (B, M, H, d)
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (x * cos + turned * sin).flatten(-2).type_as(tokens)


def _every_head(tokens: Tensor, heads: int, size: int) -> Tensor:
    """(B, M, h*d) to (B, M, H*d): keys or values that several heads share, once for each."""
    copies = heads * size // tokens.shape[-1]
    if copies == 1:
        return tokens
    return tokens.unflatten(-1, (-1, size)).repeat_interleave(copies, dim=-2).flatten(-2)


class HFVJepa(HFPlain):
    """V-JEPA 2's encoder: clips, with rotary position in time, height and width.

    The clips of a stream have the same number of frames as the model was made for.
    """

    name = "transformers V-JEPA 2"
    adds_positions = False
    trunks: ClassVar = {"vjepa2": ("VJEPA2Encoder",)}
    layers = ("layer",)
    sized: ClassVar = {}

    def spec(self, trunk: nn.Module, block: Foreign) -> BlockSpec:
        """See `Adapter`."""
        attention = need(block, "attention")
        need_own_forward(block, attention)
        query, key, value = (need(attention, name) for name in ("query", "key", "value"))
        heads, size = attention.num_attention_heads, attention.attention_head_size

        def qkv(x: Tensor, index: Tensor, positions: object) -> tuple[Tensor, Tensor, Tensor]:
            places = attention.get_position_ids(x, masks=index)
            q, k = (
                attention.apply_rotary_embeddings(
                    layer(x).unflatten(-1, (heads, size)).transpose(1, 2), places
                )
                for layer in (query, key)
            )
            return q.transpose(1, 2).flatten(-2), k.transpose(1, 2).flatten(-2), value(x)

        return BlockSpec(
            module=block,
            dim=attention.proj.out_features,
            heads=heads,
            head_dim=size,
            scale=attention.scaling,
            norm1=block.norm1,
            qkv=qkv,
            project=attention.proj,
            norm2=block.norm2,
            mlp=block.mlp,
            qkv_cost=linear_cost(query, key, value),
            project_cost=linear_cost(attention.proj),
            mlp_cost=linear_cost(block.mlp),
        )

    def read(self, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """See `Adapter`."""
        refuse(args[1] if len(args) > 1 else kwargs.get("position_mask"), "position_mask")
        return super().read(spec, args[:1], kwargs)

    def write(self, tokens: Tensor, layout: TokenLayout | None, args: tuple[Any, ...]) -> Any:
        """See `Adapter`."""
        return tokens, None

    def layout(self, trunk: Foreign, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        config = trunk.config
        height, width = (side // config.patch_size for side in size)
        return TokenLayout((config.frames_per_clip // config.tubelet_size * height, width))

    def default_size(self, trunk: Foreign) -> tuple[int, int]:
        """See `Adapter`."""
        return trunk.config.crop_size, trunk.config.crop_size
