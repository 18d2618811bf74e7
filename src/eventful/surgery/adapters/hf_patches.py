"""Vision towers of transformers that take patches with their grid: Qwen-VL and SigLIP 2 NaFlex."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from eventful.errors import UnsupportedError
from eventful.rules.spec import BlockSpec, linear_cost
from eventful.rules.step import Step
from eventful.surgery.adapter import BlockCall, Foreign, Method, refuse
from eventful.surgery.adapters.constants import is_own
from eventful.surgery.adapters.hf_base import HFAdapter, find, need, need_own_forward
from eventful.surgery.adapters.hf_plain import HFPlain
from eventful.surgery.adapters.rotary import SingleRotary
from eventful.surgery.session import Session
from eventful.tokens.layout import TokenLayout

_DRY_RUN = 448  # pixels; these towers take frames of any size


class HFQwen2Vision(HFAdapter):
    """Qwen2-VL and Qwen2.5-VL: rotary position, windows that end at the border.

    The sequence runs window by window, in a window by the cells that are merged into one image
    token, in a cell row by row. The sequences of several frames follow one another.
    """

    name = "transformers Qwen2-VL, Qwen2.5-VL"
    adds_positions = False
    trunks: ClassVar = {
        "qwen2_vl": ("Qwen2VisionTransformerPretrainedModel",),
        "qwen2_5_vl": ("Qwen2_5_VisionTransformerPretrainedModel",),
        "glm4v": ("Glm4vVisionModel",),
    }
    layers = ("blocks",)
    grids: ClassVar = {
        "image_grid_thw": "pixel_values",
        "video_grid_thw": "pixel_values_videos",
        "grid_thw": "hidden_states",
    }

    def spec(self, trunk: nn.Module, block: nn.Module) -> BlockSpec:
        """See `Adapter`."""
        attention = need(block, "attn")
        need_own_forward(block, attention)
        project, mlp = need(attention, "proj"), need(block, "mlp")
        heads = need(attention, "num_heads")
        linear = need(attention, "qkv")

        def qkv(
            x: Tensor, index: Tensor, positions: SingleRotary | None
        ) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = linear(x).chunk(3, dim=-1)
            if positions is not None:  # the model rotates in fp32
                q, k = (positions.rotate(part, index) for part in (q, k))
            return q, k, v

        return BlockSpec(
            module=block,
            dim=project.out_features,
            heads=heads,
            head_dim=project.in_features // heads,
            scale=need(attention, "scaling"),
            norm1=need(block, "norm1"),
            qkv=qkv,
            project=project,
            norm2=need(block, "norm2"),
            mlp=mlp,
            qkv_cost=linear_cost(linear),
            project_cost=linear_cost(project),
            mlp_cost=linear_cost(mlp),
            window=_window(trunk, block),
            window_pads=False,
        )

    def layout(self, trunk: Foreign, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        side = int(trunk.config.patch_size)
        return TokenLayout((size[0] // side, size[1] // side))

    def default_size(self, trunk: Foreign) -> tuple[int, int]:
        """See `Adapter`."""
        cell = int(trunk.config.patch_size) * int(trunk.config.spatial_merge_size)
        side = _DRY_RUN // cell * cell
        return side, side

    def read_in(
        self, step: Step, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BlockCall:
        """See `Adapter`."""
        tokens = self.read(spec, args[:1], kwargs).tokens
        places, positions = step.cache[_SEQUENCE, spec.trunk].places, kwargs["position_embeddings"]
        if spec.trunk not in step.compact:
            tokens = _by_frame(tokens, len(step.flushing))[:, places]
        rotary = step.shared(
            (_SEQUENCE, "rotary", spec.trunk),  # all frames have the positions of the first
            lambda: SingleRotary(table[places] for table in positions),
        )
        return BlockCall(tokens, rotary)

    def write_in(self, step: Step, spec: BlockSpec, tokens: Tensor, args: tuple[Any, ...]) -> Any:
        """See `Adapter`."""
        if spec.trunk in step.compact:
            return tokens
        return tokens[:, step.cache[_SEQUENCE, spec.trunk].order].flatten(0, 1)

    def prepare(self, trunk: Foreign, name: str, session: Session) -> dict[str, Method]:
        """See `Adapter`."""
        return {**super().prepare(trunk, name, session), "forward": Tower(trunk, name, session)}


class HFQwen3Vision(HFQwen2Vision):
    """Qwen3-VL and Qwen3.5: position embeddings are added, too, and some layers are tapped."""

    name = "transformers Qwen3-VL, Qwen3.5"
    adds_positions = True
    trunks: ClassVar = {
        "qwen3_vl": ("Qwen3VLVisionModel",),
        "qwen3_vl_moe": ("Qwen3VLMoeVisionModel",),
        "qwen3_5": ("Qwen3_5VisionModel",),
        "qwen3_5_moe": ("Qwen3_5MoeVisionModel",),
    }


_SEQUENCE = "sequence"  # in `Step.cache`, with the name of a trunk: its `TokenSequence`


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """How a tower's sequence of tokens runs through their grid.

    Attributes:
        order: (N,) place in the grid, row by row, of each token of the sequence.
        places: (N,) place in the sequence of each token of the grid.
    """

    order: Tensor
    places: Tensor

    @classmethod
    def of(cls, trunk: Foreign, grid: tuple[int, int]) -> TokenSequence:
        """Of a tower's sequence for one frame."""
        (height, width), merge = grid, int(trunk.config.spatial_merge_size)
        down, across = height // merge, width // merge
        device = next(trunk.parameters()).device
        raster = torch.arange(height * width, device=device).view(down, merge, across, merge)
        cells = raster.transpose(1, 2).reshape(down * across, merge * merge)
        side = _side(trunk)
        if side is not None:
            y, x = torch.arange(down, device=device), torch.arange(across, device=device)
            window = y[:, None] // side * -(-across // side) + x // side
            cells = cells[window.flatten().argsort(stable=True)]
        order = cells.flatten()
        return cls(order, order.argsort())


@dataclass
class Tower:
    """A Qwen tower's forward, which first notes in the step how its sequence runs.

    It also notes the layers whose outputs the tower merges into image tokens of their own.
    """

    trunk: Foreign
    name: str
    session: Session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The tower's own forward."""
        step = self.session.step
        if step is not None:
            for given in ("cu_seqlens", "window_index", "cu_window_seqlens"):
                refuse(kwargs.get(given), given)
            grid = step.layouts[self.name].grid
            step.cache[_SEQUENCE, self.name] = step.constant(
                (_SEQUENCE, self.name, grid), lambda: TokenSequence.of(self.trunk, grid)
            )
            tapped = find(self.trunk, "deepstack_visual_indexes") or ()
            step.taps.setdefault(self.name, set()).update(tapped)
        return type(self.trunk).forward(self.trunk, *args, **kwargs)


def _by_frame(tokens: Tensor, frames: int) -> Tensor:
    """Sequences one after another (B * N, D) as (B, N, D)."""
    if len(tokens) % frames:
        raise UnsupportedError(
            f"The model made {len(tokens)} tokens of {frames} frames. A stream needs one sequence "
            "of tokens per frame, all of the same length."
        )
    return tokens.unflatten(0, (frames, -1))


def _side(trunk: Foreign) -> int | None:
    """Side of a window in cells; None for a tower without windows."""
    if find(trunk, "fullatt_block_indexes") is None:
        return None
    return int(trunk.window_size // trunk.spatial_merge_size // trunk.patch_size)


def _window(trunk: Foreign, block: nn.Module) -> tuple[int, int] | None:
    """Window of a block in tokens; None for global attention."""
    side = _side(trunk)
    index = next((i for i, one in enumerate(trunk.blocks) if one is block), None)
    if side is None or index is None or index in trunk.fullatt_block_indexes:
        return None
    tokens = side * int(trunk.spatial_merge_size)
    return tokens, tokens


class HFSiglip2(HFPlain):
    """SigLIP 2 NaFlex: frames of any aspect ratio as patches (B, h * w, C), with a mask."""

    name = "transformers SigLIP 2 NaFlex"
    trunks: ClassVar = {"siglip2": ("Siglip2VisionModel",)}
    grids: ClassVar = {"spatial_shapes": "pixel_values"}
    sized: ClassVar = {}

    def layout(self, trunk: Foreign, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        side = int(trunk.config.patch_size)
        return TokenLayout((size[0] // side, size[1] // side))

    def default_size(self, trunk: Foreign) -> tuple[int, int]:
        """See `Adapter`."""
        side = int(trunk.config.num_patches**0.5) * int(trunk.config.patch_size)
        return side, side

    def read_in(
        self, step: Step, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BlockCall:
        """See `Adapter`; the blocks of one frame share a mask, which is looked at once."""
        tokens, *rest = args if args else (kwargs["hidden_states"],)
        mask = rest[0] if rest else kwargs.get("attention_mask")
        if isinstance(mask, Tensor):
            given = mask  # kept in the step, so that no other mask gets its id
            _, all_ = step.shared(("mask", id(given)), lambda: (given, _allows_all(given)))
            mask = None if all_ else given
        return self.read(spec, (tokens,), {**kwargs, "attention_mask": mask})

    def prepare(self, trunk: Foreign, name: str, session: Session) -> dict[str, Method]:
        """See `Adapter`."""
        made = super().prepare(trunk, name, session)
        method = "resize_positional_embeddings"
        if is_own(trunk.embeddings, method, self.library):
            made[f"embeddings.{method}"] = ResizedPositions(trunk.embeddings, name, session)
        return made


@dataclass
class ResizedPositions:
    """SigLIP 2's position embeddings, resized once in a stream: all its frames have one grid."""

    module: Foreign
    trunk: str
    session: Session

    def __call__(self, table: Tensor, spatial_shapes: Tensor, max_length: int) -> Tensor:
        """Take what the method takes, return what it returns."""
        resize = type(self.module).resize_positional_embeddings
        step = self.session.step
        if step is None:
            return resize(table, spatial_shapes, max_length)
        weight = self.module.position_embedding.weight
        version = None if weight.is_inference() else weight._version
        key = (id(self.module), id(weight), version, table.dtype, table.device, max_length)
        rows: Tensor = step.constant(
            (*key, step.layouts[self.trunk].grid),
            lambda: resize(table, spatial_shapes[:1], max_length),
        )
        return rows.expand(len(spatial_shapes), -1, -1)


def _allows_all(mask: Tensor) -> bool:
    """Whether a mask lets every token look at every other."""
    return bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())
