"""Transformers of transformers that get rotary position beside their tokens, or make their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from eventful.rules.spec import BlockSpec, linear_cost
from eventful.rules.step import Step
from eventful.surgery.adapter import BlockCall, Foreign, per_head, refuse, repeat_heads
from eventful.surgery.adapters.hf_base import find, need, need_own_forward
from eventful.surgery.adapters.hf_plain import HFPlain
from eventful.surgery.adapters.rotary import SingleRotary
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

        def qkv(x: Tensor, index: Tensor, rotary: SingleRotary) -> tuple[Tensor, Tensor, Tensor]:
            parts = [
                per_head(norm, layer(x), layer.out_features // size)
                for norm, layer in zip(norms, (query, key), strict=True)
            ]
            q, k = (rotary.rotate(part, index) for part in parts)
            return q, repeat_heads(k, heads, size), repeat_heads(value(x), heads, size)

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
        rotary = step.shared(("rotary", spec.trunk), lambda: _tables(given, tokens))
        return replace(call, positions=rotary)


def _tables(given: Any, tokens: int) -> SingleRotary:
    """The tables for `tokens` tokens; those ahead of the first row are not rotated."""
    rows = [table.reshape(-1, table.shape[-1]) for table in given]
    return SingleRotary.after(tokens - len(rows[0]), rows)


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
