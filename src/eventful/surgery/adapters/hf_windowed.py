"""Windowed transformers of transformers: ViTDet and the image encoders of SAM, SAM-HQ and SAM 3."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from eventful.rules.relative import linear_tables
from eventful.rules.spec import BlockSpec, linear_cost
from eventful.rules.step import Step
from eventful.surgery.adapter import BlockCall, Foreign, Method, Mismatch, packed_qkv
from eventful.surgery.adapters.hf_base import (
    AnnouncedStages,
    HFAdapter,
    find,
    need,
    need_own_forward,
)
from eventful.surgery.adapters.rotary import RotaryPairs, rotated_qkv
from eventful.surgery.adapters.versions import sam3_rotary
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
    trunks: ClassVar = {
        "sam": ("SamVisionEncoder",),
        "got_ocr2": ("GotOcr2VisionEncoder",),
        "deepseek_ocr2": ("DeepseekOcr2SamVisionEncoder",),
        "pp_formulanet": ("PPFormulaNetVisionEncoder",),
        "slanext": ("SLANeXtVisionEncoder",),
    }
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


class HFSamHQ(HFSam):
    """SAM-HQ's image encoder, which also returns the outputs of blocks with global attention."""

    name = "transformers SAM-HQ"
    trunks: ClassVar = {"sam_hq": ("SamHQVisionEncoder",)}

    def watched(self, spec: BlockSpec, step: Step) -> bool:
        """See `Adapter`."""
        return not spec.windowed or super().watched(spec, step)


class HFSam3(HFSam):
    """SAM 3's image encoder: rotary position, counted from the corner of each window."""

    name = "transformers SAM 3"
    trunks: ClassVar = {"sam3": ("Sam3ViTModel",)}
    sized: ClassVar = {"embeddings._tile_position_embeddings": False}

    def spec(self, trunk: Foreign, block: Foreign) -> BlockSpec:
        """See `Adapter`."""
        attention, side = need(block, "attention"), block.window_size
        need_own_forward(block, attention, block.rotary_emb)
        if side and any(length % side for length in self._grid(trunk)):
            raise Mismatch("its windows reach over the border, and padding has a rotary position")
        query, key, value = (need(attention, f"{name}_proj") for name in "qkv")
        return BlockSpec(
            module=block,
            dim=attention.o_proj.out_features,
            heads=attention.num_attention_heads,
            head_dim=attention.head_dim,
            scale=attention.scaling,
            norm1=block.layer_norm1,
            qkv=rotated_qkv(query, key, value),
            project=attention.o_proj,
            norm2=block.layer_norm2,
            mlp=block.mlp,
            qkv_cost=linear_cost(query, key, value),
            project_cost=linear_cost(attention.o_proj),
            mlp_cost=linear_cost(block.mlp),
            window=(side, side) if side else None,
        )

    def read_in(
        self, step: Step, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BlockCall:
        """See `Adapter`; blocks with the same windows share one table of rotary position."""
        call = self.read(spec, args, kwargs)
        key = ("rotary", spec.trunk, spec.window)
        grid = step.layouts[spec.trunk].grid

        def make() -> tuple[Tensor, Tensor]:
            cos, sin = sam3_rotary(spec.module, call.tokens)
            return _over_grid(cos, grid, spec.window), _over_grid(sin, grid, spec.window)

        rotary = step.shared(key, lambda: RotaryPairs(step.constant(key, make)))
        return replace(call, positions=rotary)

    def _grid(self, trunk: Foreign) -> tuple[int, int]:
        return self.layout(trunk, self.default_size(trunk)).grid


def _over_grid(table: Tensor, grid: tuple[int, int], window: tuple[int, int] | None) -> Tensor:
    """The rows (S, d) of one window, repeated for every window of the grid: (N, d)."""
    if window is None:
        return table
    tall, wide = window
    return table.unflatten(0, window).repeat(grid[0] // tall, grid[1] // wide, 1).flatten(0, 1)


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
