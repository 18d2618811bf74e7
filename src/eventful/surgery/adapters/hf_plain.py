"""Plain vision transformers of transformers: ViT, DINOv2, DINOv3, CLIP, SigLIP, YOLOS and more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from eventful.rules.spec import BlockSpec, linear_cost
from eventful.rules.step import Step
from eventful.surgery.adapter import BlockCall, Foreign, Method, Mismatch
from eventful.surgery.adapters.hf_base import HFAdapter, find, need, need_own_forward
from eventful.surgery.adapters.rotary import Rotary
from eventful.surgery.session import Session
from eventful.tokens.layout import TokenLayout


class HFPlain(HFAdapter):
    """Global attention, class, distillation and register tokens, layer scale, gated MLPs."""

    name = "transformers ViT"
    trunks: ClassVar = {
        "vit": ("ViTModel",),
        "deit": ("DeiTModel",),
        "dinov2": ("Dinov2Model", "Dinov2Backbone"),
        "dinov2_with_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersBackbone"),
        "aimv2": ("Aimv2VisionModel",),
        "clip": ("CLIPVisionModel", "CLIPVisionTransformer"),
        "siglip": ("SiglipVisionModel", "SiglipVisionTransformer"),
        "owlvit": ("OwlViTVisionTransformer",),
        "owlv2": ("Owlv2VisionTransformer",),
        "vitpose_backbone": ("VitPoseBackbone",),
    }
    layers: ClassVar[Sequence[str]] = ("layers", "encoder.layers", "encoder.layer")
    sized: ClassVar = {"embeddings.interpolate_pos_encoding": True}

    def spec(self, trunk: nn.Module, block: nn.Module) -> BlockSpec:
        """See `Adapter`."""
        attention = need(block, "attention", "self_attn")
        core = find(attention, "attention") or attention
        need_own_forward(block, attention, core)
        if find(block, "num_experts") not in (None, 1):
            raise Mismatch("its MLP has experts, which the caller chooses by `dataset_index`")
        query, key, value = (
            need(core, f"{name[0]}_proj", name) for name in ("query", "key", "value")
        )
        out = need(attention, "o_proj", "out_proj", "output.dense")
        heads = need(core, "num_attention_heads", "num_heads", "config.num_attention_heads")
        head_dim = need(core, "head_dim", "attention_head_size")
        norm1 = need(block, "layernorm_before", "layer_norm1", "norm1", "rms_norm1")
        norm2 = need(block, "layernorm_after", "layer_norm2", "norm2", "rms_norm2")
        scale1, scale2 = (find(block, f"layer_scale{i}") or nn.Identity() for i in (1, 2))
        feed = find(block, "mlp", "ffn") or nn.Sequential(
            need(block, "intermediate"), need(block, "output.dense")
        )
        prefix, _ = special_tokens(trunk)

        def qkv(
            x: Tensor, index: Tensor, positions: Rotary | None
        ) -> tuple[Tensor, Tensor, Tensor]:
            q, k = query(x), key(x)
            if positions is not None:
                q, k = (positions.rotate(part, index, prefix) for part in (q, k))
            return q, k, value(x)

        return BlockSpec(
            module=block,
            dim=norm1.weight.shape[0],
            heads=heads,
            head_dim=head_dim,
            scale=find(core, "scaling", "scale") or head_dim**-0.5,
            norm1=norm1,
            qkv=qkv,
            project=lambda o: scale1(out(o)),
            norm2=norm2,
            mlp=lambda y: scale2(feed(y)),
            qkv_cost=linear_cost(query, key, value),
            project_cost=linear_cost(out),
            mlp_cost=linear_cost(feed),
        )

    def layout(self, trunk: Foreign, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        prefix, suffix = special_tokens(trunk)
        return replace(super().layout(trunk, size), prefix=prefix, suffix=suffix)


class HFDinov3(HFPlain):
    """DINOv3: rotary position in place of added position embeddings."""

    name = "transformers DINOv3"
    adds_positions = False
    trunks: ClassVar = {"dinov3_vit": ("DINOv3ViTModel", "DINOv3ViTBackbone")}
    layers: ClassVar[Sequence[str]] = ("model.layer", "layer", "encoder.layer")
    sized: ClassVar = {"rope_embeddings.forward": True}

    def read(self, spec: BlockSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """See `Adapter`."""
        call = super().read(spec, args, kwargs)
        positions = kwargs["position_embeddings"]
        return replace(
            call, positions=positions if isinstance(positions, Rotary) else Rotary(positions)
        )

    def prepare(self, trunk: Foreign, name: str, session: Session) -> dict[str, Method]:
        """See `Adapter`."""
        made = super().prepare(trunk, name, session)
        tables = made.get("rope_embeddings.forward")
        made["rope_embeddings.forward"] = SharedRotary(trunk.rope_embeddings, session, tables)
        return made


@dataclass
class SharedRotary:
    """DINOv3's rotary embedding, giving the layers of one frame a shared `Rotary` in a stream.

    Attributes:
        tables: computes the tables once; None for the module's own forward.
    """

    module: nn.Module
    session: Session
    tables: Method | None

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The tables of (cos, sin)."""
        run = self.tables or partial(type(self.module).forward, self.module)
        tables: tuple[Tensor, Tensor] = run(*args, **kwargs)
        return tables if self.session.step is None else Rotary(tables)


class HFYolos(HFPlain):
    """YOLOS: detection tokens after the patches, position embeddings added between layers."""

    name = "transformers YOLOS"
    trunks: ClassVar = {"yolos": ("YolosModel",)}
    sized: ClassVar = {
        "embeddings.interpolation.forward": False,
        "encoder.interpolation.forward": False,
    }

    def prepare(self, trunk: Foreign, name: str, session: Session) -> dict[str, Method]:
        """See `Adapter`."""
        made = super().prepare(trunk, name, session)
        if trunk.config.use_mid_position_embeddings:
            path = "encoder.interpolation.forward"
            tables = made.get(path)
            made[path] = PositionsBetween(trunk.encoder.interpolation, name, session, tables)
        return made


@dataclass
class PositionsBetween:
    """YOLOS' position embeddings between layers; in a stream, those of the selected tokens.

    Attributes:
        tables: computes the tables once; None for the module's own forward.
    """

    module: nn.Module
    trunk: str
    session: Session
    tables: Method | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The position embeddings, to be indexed by layer."""
        run = self.tables or partial(type(self.module).forward, self.module)
        tables: Tensor = run(*args, **kwargs)
        step = self.session.step
        return tables if step is None else SelectedPositions(tables, self.trunk, step)


@dataclass
class SelectedPositions:
    """The position embeddings that YOLOS' encoder indexes by layer, after that layer has run.

    Attributes:
        tables: (L - 1, 1, N, D), added after each layer but the last.
    """

    tables: Tensor
    trunk: str
    step: Step

    def __getitem__(self, layer: int) -> Tensor:
        rows = self.tables[layer]
        # Counted for all N tokens even where only some rows are added: a record has one N per
        # addition.
        self.step.record.positions[f"{self.trunk} after {layer}"] = (rows.shape[1], rows.shape[2])
        if self.trunk in self.step.compact:
            rows = rows[0][self.step.compact[self.trunk]]
        return rows


def special_tokens(trunk: Foreign) -> tuple[int, int]:
    """How many special tokens there are before and after the patches."""

    def count(name: str) -> int:
        tokens = find(trunk, f"embeddings.{name}")
        return 0 if tokens is None else tokens.shape[1] if tokens.dim() > 1 else 1

    before = ("cls_token", "class_embedding", "distillation_token", "register_tokens")
    return sum(map(count, before)), count("detection_tokens")
