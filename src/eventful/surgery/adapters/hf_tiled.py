"""Trunks of transformers whose blocks take each window as a sequence: RF-DETR, LW-DETR, Depth Pro.

The batch of such a block holds the windows of every frame. Here they are one sequence of tokens
per frame, and attention stays inside windows, except in the blocks that join them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from eventful.errors import UnsupportedError
from eventful.rules.spec import BlockSpec, linear_cost
from eventful.rules.step import Step
from eventful.surgery.adapter import BlockCall, Foreign, Method
from eventful.surgery.adapters.hf_base import AnnouncedStages, need, need_own_forward, patches_of
from eventful.surgery.adapters.hf_plain import HFPlain
from eventful.surgery.session import Session
from eventful.tokens.layout import TokenLayout, whole_windows


class HFTiled(HFPlain):
    """Windows as a batch; each row of the token grid is a window with its class token.

    The class tokens lie inside the grid, so they are not protected: they are updated when they are
    due for a refresh, or by context. Memory does not move with the picture.
    """

    def read_in(
        self, step: Step, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BlockCall:
        """See `Adapter`."""
        call = self.read(spec, args, kwargs)
        if spec.trunk in step.compact:
            return call
        frames = len(step.flushing)
        layout = step.layouts[spec.trunk]
        return replace(call, tokens=self.joined(spec, call.tokens, frames, layout))

    def write_in(self, step: Step, spec: BlockSpec, tokens: Tensor, args: tuple[Any, ...]) -> Any:
        """See `Adapter`."""
        if spec.trunk in step.compact:
            return tokens
        return self.cut(spec, tokens, step.layouts[spec.trunk])

    def windows(self, trunk: Foreign) -> int:
        """Windows down, and across, into which the model cuts a frame."""
        return 1

    def layout(self, trunk: Foreign, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`; the model itself fails on frames that its windows cannot share."""
        count, patch = self.windows(trunk), _patch(trunk)
        fits = whole_windows(size, patch, count)
        if fits != size:
            raise UnsupportedError(
                f"{type(trunk).__name__} cuts a frame into {count} x {count} windows of equal "
                f"size: height is a multiple of {count * patch[0]} px, width of "
                f"{count * patch[1]} px. {size[0]} x {size[1]} does not fit, {fits[0]} x "
                f"{fits[1]} does."
            )
        return super().layout(trunk, size)

    def default_size(self, trunk: Foreign) -> tuple[int, int]:
        """See `Adapter`; the size in a config need not fit the windows."""
        size = super().default_size(trunk)
        return whole_windows(size, _patch(trunk), self.windows(trunk))

    def joined(self, spec: BlockSpec, windows: Tensor, frames: int, layout: TokenLayout) -> Tensor:
        """The windows (B*W, S, D) of B frames as one sequence (B, N, D) per frame."""
        return windows.reshape(frames, -1, windows.shape[-1])

    def cut(self, spec: BlockSpec, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """The sequences (B, N, D) as windows (B*W, S, D)."""
        return tokens.unflatten(1, layout.grid).flatten(0, 1)


class HFRfDetr(HFTiled):
    """RF-DETR's DINOv2: every window has a copy of the class token; some blocks join windows."""

    name = "transformers RF-DETR"
    trunks: ClassVar = {"rf_detr": ("RfDetrDinov2Backbone",)}

    def spec(self, trunk: Foreign, block: Foreign) -> BlockSpec:
        """See `Adapter`."""
        count = trunk.config.num_windows**2
        inside = not block.global_attention and count > 1
        return replace(super().spec(trunk, block), tiling=(count, 1) if inside else None)

    def windows(self, trunk: Foreign) -> int:
        """See `HFTiled`."""
        return int(trunk.config.num_windows)

    def layout(self, trunk: Foreign, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        whole, windows = super().layout(trunk, size), self.windows(trunk)
        if windows == 1:
            return whole
        height, width = (side // windows for side in whole.grid)
        return TokenLayout((windows**2, 1 + height * width))

    def cut(self, spec: BlockSpec, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """See `HFTiled`."""
        return tokens if layout.prefix else super().cut(spec, tokens, layout)


class HFLwDetr(HFTiled):
    """LW-DETR's ViT: windows without class tokens, so that the tokens lie as in the picture."""

    name = "transformers LW-DETR"
    trunks: ClassVar = {"lw_detr": ("LwDetrViTBackbone",)}
    sized: ClassVar = {"embeddings.get_absolute_positions": False}

    def spec(self, trunk: Foreign, block: Foreign) -> BlockSpec:
        """See `Adapter`."""
        attention, mlp = need(block, "attention"), need(block, "intermediate")
        need_own_forward(block, attention)
        query, key, value = (need(attention, f"{name}_proj") for name in "qkv")
        side = self.windows(trunk)

        def qkv(x: Tensor, index: Tensor, positions: object) -> tuple[Tensor, Tensor, Tensor]:
            return query(x), key(x), value(x)

        return BlockSpec(
            module=block,
            dim=attention.o_proj.out_features,
            heads=attention.num_attention_heads,
            head_dim=attention.head_dim,
            scale=attention.scaling,
            norm1=block.layernorm_before,
            qkv=qkv,
            project=attention.o_proj,
            norm2=block.layernorm_after,
            mlp=mlp,
            qkv_cost=linear_cost(query, key, value),
            project_cost=linear_cost(attention.o_proj),
            mlp_cost=linear_cost(mlp),
            project_scale=block.gamma_1,
            mlp_scale=block.gamma_2,
            tiling=(side, side) if block.window and side > 1 else None,
        )

    def windows(self, trunk: Foreign) -> int:
        """See `HFTiled`."""
        return int(trunk.config.num_windows_side)

    def joined(self, spec: BlockSpec, windows: Tensor, frames: int, layout: TokenLayout) -> Tensor:
        """See `HFTiled`."""
        side, (height, width) = _side(spec), layout.grid
        cells = windows.reshape(frames, side, side, height // side, width // side, -1)
        return cells.transpose(2, 3).flatten(1, 4)

    def cut(self, spec: BlockSpec, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """See `HFTiled`."""
        side, (height, width) = _side(spec), layout.grid
        cells = tokens.unflatten(1, (side, height // side, side, width // side))
        return cells.transpose(2, 3).flatten(3, 4).flatten(0, 2)


def _patch(trunk: nn.Module) -> tuple[int, int]:
    """Height and width of a patch in pixels."""
    height, width = patches_of(trunk).stride
    return height, width


def _side(spec: BlockSpec) -> int:
    """Windows down, and across, of LW-DETR."""
    block: Foreign = spec.module
    return math.isqrt(block.num_windows)


class HFDepthPro(HFPlain):
    """The encoders of Depth Pro that see the whole picture, resized to a side of their own."""

    name = "transformers Depth Pro"
    trunks: ClassVar = {"depth_pro": ("DepthProImageEncoder", "DepthProFovEncoder")}
    layers = ("model.encoder.layer",)
    sized: ClassVar = {"model.embeddings.interpolate_pos_encoding": True}

    def spec(self, trunk: Foreign, block: nn.Module) -> BlockSpec:
        """See `Adapter`."""
        return super().spec(trunk.model, block)

    def layout(self, trunk: Foreign, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        side = trunk.model.config.image_size
        return super().layout(trunk.model, (side, side))

    def default_size(self, trunk: Foreign) -> tuple[int, int]:
        """See `Adapter`."""
        side = int(trunk.config.patch_size / min(trunk.config.scaled_images_ratios))
        return side, side


class HFDepthProPatches(HFTiled):
    """Depth Pro's encoder of patches: the picture at several sizes, cut into overlapping squares.

    Every square is a window of its own, with a class token; no block joins them.
    """

    name = "transformers Depth Pro, squares"
    trunks: ClassVar = {"depth_pro": ("DepthProPatchEncoder",)}
    layers = HFDepthPro.layers
    sized = HFDepthPro.sized
    default_size = HFDepthPro.default_size

    def spec(self, trunk: Foreign, block: nn.Module) -> BlockSpec:
        """See `Adapter`."""
        return replace(super().spec(trunk.model, block), tiling=(_ALL, 1))

    def layout(self, trunk: Foreign, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        config = trunk.config
        scales = zip(config.scaled_images_ratios, config.scaled_images_overlap_ratios, strict=True)
        squares = sum(_squares(size, config.patch_size, *scale) for scale in scales)
        inside = super().layout(trunk.model, (config.patch_size, config.patch_size))
        return TokenLayout((squares, inside.tokens))

    def joined(self, spec: BlockSpec, windows: Tensor, frames: int, layout: TokenLayout) -> Tensor:
        """See `HFTiled`; the squares of one place come together, those of all frames."""
        return windows.unflatten(0, (-1, frames)).transpose(0, 1).flatten(1, 2)

    def cut(self, spec: BlockSpec, tokens: Tensor, layout: TokenLayout) -> Tensor:
        """See `HFTiled`."""
        return tokens.unflatten(1, layout.grid).transpose(0, 1).flatten(0, 1)

    def prepare(self, trunk: Foreign, name: str, session: Session) -> dict[str, Method]:
        """See `Adapter`."""
        return {**super().prepare(trunk, name, session), "forward": Squares(trunk, name, session)}


class Squares(AnnouncedStages):
    """The forward of Depth Pro's encoder of patches, which looks at a few blocks' outputs."""

    def _taps(self, original: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        return set(self.trunk.intermediate_hook_ids)


_ALL = 1 << 30  # more windows than any grid has rows: each row is one


def _squares(size: tuple[int, int], side: int, ratio: float, overlap: float) -> int:
    """Into how many squares Depth Pro cuts a picture that it has resized by `ratio`."""
    height, width = (math.floor(length * ratio) for length in size)
    stride = int(side * (1 - overlap))
    return ((height - side) // stride + 1) * ((width - side) // stride + 1)
