"""Transformers of transformers that differ from a ViT in what their blocks return, or in frames."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from eventful.rules.spec import BlockSpec, linear_cost
from eventful.rules.step import Step
from eventful.surgery.adapter import BlockCall, Foreign, Method, Mismatch, packed_qkv, usual_spec
from eventful.surgery.adapters.hf_base import AnnouncedStages, need, need_own_forward
from eventful.surgery.adapters.hf_plain import HFPlain
from eventful.surgery.adapters.rotary import RotaryPairs, rotated_qkv
from eventful.surgery.session import Session
from eventful.tokens.layout import TokenLayout


class HFCollected(HFPlain):
    """Blocks that return a tuple, in a loop that collects their outputs without hooks."""

    entries: ClassVar[int] = 1  # of the tuple

    def write(self, tokens: Tensor, layout: TokenLayout | None, args: tuple[Any, ...]) -> Any:
        """See `Adapter`."""
        return (tokens, *[None] * (self.entries - 1))

    def prepare(self, trunk: nn.Module, name: str, session: Session) -> dict[str, Method]:
        """See `Adapter`."""
        announced = AnnouncedStages(trunk, name, session)
        return {**super().prepare(trunk, name, session), "forward": announced}


class HFMgpstr(HFCollected):
    """MGP-STR: a ViT whose blocks return their attention maps as well."""

    name = "transformers MGP-STR"
    trunks: ClassVar = {"mgp_str": ("MgpstrModel",)}
    layers = ("encoder.blocks",)
    entries = 2

    def spec(self, trunk: nn.Module, block: Foreign) -> BlockSpec:
        """See `Adapter`."""
        attention = need(block, "attn")
        need_own_forward(block, attention)
        size = attention.proj.in_features // attention.num_heads
        return usual_spec(block, attention, attention.num_heads, size, packed_qkv(attention.qkv))


class HFLlama4(HFCollected):
    """Llama 4's vision tower: rotary position, a class token after the patches."""

    name = "transformers Llama 4"
    trunks: ClassVar = {"llama4": ("Llama4VisionModel",)}
    layers = ("model.layers",)
    sized: ClassVar = {}

    def spec(self, trunk: nn.Module, block: Foreign) -> BlockSpec:
        """See `Adapter`."""
        attention = need(block, "self_attn")
        need_own_forward(block, attention)
        query, key, value = (need(attention, f"{name}_proj") for name in "qkv")
        return BlockSpec(
            module=block,
            dim=attention.o_proj.out_features,
            heads=attention.num_heads,
            head_dim=attention.head_dim,
            scale=attention.head_dim**-0.5,
            norm1=block.input_layernorm,
            qkv=rotated_qkv(query, key, value),
            project=attention.o_proj,
            norm2=block.post_attention_layernorm,
            mlp=block.mlp,
            qkv_cost=linear_cost(query, key, value),
            project_cost=linear_cost(attention.o_proj),
            mlp_cost=linear_cost(block.mlp),
        )

    def read_in(
        self, step: Step, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BlockCall:
        """See `Adapter`; the blocks of one frame share the table."""
        tokens = args[0] if args else kwargs["hidden_state"]
        call = self.read(spec, (tokens,), kwargs)

        def make() -> RotaryPairs:
            table = kwargs["freqs_ci"]
            turns = table.reshape(-1, table.shape[-1]).to(tokens.device)
            return RotaryPairs(part.repeat_interleave(2, -1) for part in (turns.real, turns.imag))

        return replace(call, positions=step.shared(("rotary", spec.trunk), make))

    def layout(self, trunk: Foreign, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        side = trunk.config.patch_size
        return TokenLayout((size[0] // side, size[1] // side), suffix=1)


class HFSpectrogram(HFPlain):
    """AST: a frame is a spectrogram (time, frequency), and its patches overlap."""

    name = "transformers AST"
    trunks: ClassVar = {"audio_spectrogram_transformer": ("ASTModel",)}

    def layout(self, trunk: Foreign, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        config = trunk.config
        times, tones = size
        grid = (
            (tones - config.patch_size) // config.frequency_stride + 1,
            (times - config.patch_size) // config.time_stride + 1,
        )
        return TokenLayout(grid, prefix=2)

    def default_size(self, trunk: Foreign) -> tuple[int, int]:
        """See `Adapter`."""
        return trunk.config.max_length, trunk.config.num_mel_bins


class HFMolmo2(HFPlain):
    """Molmo 2's vision tower: a frame comes as its patches (B, N, pixels)."""

    name = "transformers Molmo 2"
    trunks: ClassVar = {"molmo2": ("Molmo2VisionModel",)}
    layers = ("layers",)
    sized: ClassVar = {}

    def spec(self, trunk: Foreign, block: Foreign) -> BlockSpec:
        """See `Adapter`."""
        if trunk.config.num_key_value_heads != trunk.config.num_attention_heads:
            raise Mismatch("several heads of its attention share their keys")
        return super().spec(trunk, block)

    def layout(self, trunk: Foreign, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`; the model has one size."""
        height, width = (side // trunk.config.patch_size for side in trunk.config.image_size)
        return TokenLayout((height, width))
