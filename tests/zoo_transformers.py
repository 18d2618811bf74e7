"""Tiny random models of transformers, one for each thing their adapters must get right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from eventful.surgery.libraries import load

transformers = load("transformers")

SIDE = 32  # 4 x 4 patches of 8 x 8
WIDE = (24, 48)  # 3 x 6 patches
TINY = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
PATCHES = {"image_size": SIDE, "patch_size": 8}
MLP = {"intermediate_size": 48}


@dataclass(frozen=True)
class Entry(zoo.Entry):
    """As in `zoo`, with the arguments and results of transformers."""

    size: tuple[int, int] = (SIDE, SIDE)
    output: Callable[[Any], Tensor] = lambda result: result.last_hidden_state
    call: Callable[[Callable[..., Any], Tensor], Any] = lambda run, frame: run(pixel_values=frame)


def interpolated(run: Callable[..., Any], frame: Tensor) -> Any:
    """A call with a frame of another size than the model's own."""
    return run(pixel_values=frame, interpolate_pos_encoding=True)


def joined_maps(result: Any) -> Tensor:
    """The feature maps of a backbone as one tensor, the batch first."""
    return torch.stack(result.feature_maps, dim=1)


def spread(model: nn.Module) -> nn.Module:
    """Random weights under which attention is far from uniform and every part matters."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            leaf = name.rpartition(".")[2]
            if "lambda1" in leaf:  # layer scale
                weight.normal_(mean=0.5, std=0.1)
            elif leaf == "weight" and "norm" in name:
                weight.normal_(mean=1.0, std=0.2)
            elif leaf == "weight" and "position_embedding" not in name:
                weight.normal_(std=weight[0].numel() ** -0.5)
            elif leaf == "bias":
                weight.normal_(std=0.2)
            else:  # position embeddings, special tokens, tables of relative position
                weight.normal_(std=0.5)
    return model.eval()


def build(kind: str, config: Any, **options: Any) -> nn.Module:
    """A model by its class name; options may name an `attn_implementation`."""
    return spread(getattr(transformers, kind)._from_config(config, **options))


def config(kind: str, **options: Any) -> Any:
    """A config by its class name, tiny."""
    return getattr(transformers, kind)(**{**TINY, **PATCHES, **options})


def model(kind: str, config_kind: str, **options: Any) -> Callable[..., nn.Module]:
    """A maker of models; it takes what `build` takes."""
    return lambda **more: build(kind, config(config_kind, **options), **more)


def yolos_config(**options: Any) -> Any:
    """YOLOS with 3 detection tokens, made for frames of 4 x 6 patches."""
    return config(
        "YolosConfig", **MLP, **{"image_size": [32, 48], "num_detection_tokens": 3} | options
    )


def vitdet_config(**options: Any) -> Any:
    """ViTDet: 4 x 6 patches, windows of 3 x 3 that do not fit, global attention in the middle."""
    settings = {
        "pretrain_image_size": SIDE,
        "window_size": 3,
        "window_block_indices": [0, 2],
        "use_relative_position_embeddings": True,
        "mlp_ratio": 2,
    }
    return config("VitDetConfig", **settings | options)


def sam_config(**options: Any) -> Any:
    """SAM's encoder: 5 x 5 patches, windows of 3 x 3 that do not fit."""
    settings = {
        "image_size": 40,
        "output_channels": 16,
        "window_size": 3,
        "global_attn_indexes": [1],
        "mlp_dim": 48,
    }
    return config("SamVisionConfig", **settings | options)


def sam_model(**options: Any) -> nn.Module:
    """The whole of SAM, as small as it goes."""
    prompts = {"hidden_size": 32, "image_size": 40, "patch_size": 8, "mask_input_channels": 16}
    decoder = {
        "hidden_size": 32,
        "mlp_dim": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 16,
    }
    whole = transformers.SamConfig(
        vision_config=sam_config(output_channels=32, num_pos_feats=16).to_dict(),
        prompt_encoder_config=prompts,
        mask_decoder_config=decoder,
    )
    return build("SamModel", whole, **options)


def depth_anything(**options: Any) -> nn.Module:
    """DepthAnything over a DINOv2 backbone of which two of three layers are tapped."""
    backbone = config("Dinov2Config", mlp_ratio=2, reshape_hidden_states=False)
    backbone.out_features = ["stage1", "stage3"]
    whole = transformers.DepthAnythingConfig(
        backbone_config=backbone,
        patch_size=8,
        reassemble_hidden_size=32,
        reassemble_factors=[2, 1],
        neck_hidden_sizes=[16, 16],
        fusion_hidden_size=16,
        head_in_index=-1,
        head_hidden_size=8,
    )
    return build("DepthAnythingForDepthEstimation", whole, **options)


def clip_model(**options: Any) -> nn.Module:
    """CLIP with both towers."""
    text = {**TINY, **MLP, "vocab_size": 50, "max_position_embeddings": 8, "eos_token_id": 49}
    whole = transformers.CLIPConfig(
        text_config=text, vision_config={**TINY, **PATCHES, **MLP}, projection_dim=16
    )
    return build("CLIPModel", whole, **options)


ZOO: dict[str, Entry] = {
    "vit": Entry(model("ViTModel", "ViTConfig", **MLP), WIDE, call=interpolated),
    "vit_own_size": Entry(model("ViTModel", "ViTConfig", **MLP)),
    "deit": Entry(model("DeiTModel", "DeiTConfig", **MLP)),
    "dinov2": Entry(model("Dinov2Model", "Dinov2Config", mlp_ratio=2), WIDE),
    "dinov2_swiglu": Entry(model("Dinov2Model", "Dinov2Config", use_swiglu_ffn=True)),
    "dinov2_registers": Entry(
        model("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", mlp_ratio=2), WIDE
    ),
    "dinov2_backbone": Entry(
        model("Dinov2Backbone", "Dinov2Config", out_features=["stem", "stage2"]),
        output=joined_maps,
    ),
    "dinov3": Entry(model("DINOv3ViTModel", "DINOv3ViTConfig", num_register_tokens=2, **MLP), WIDE),
    "dinov3_gated": Entry(
        model("DINOv3ViTModel", "DINOv3ViTConfig", use_gated_mlp=True, hidden_act="silu", **MLP)
    ),
    "dinov3_backbone": Entry(
        model(
            "DINOv3ViTBackbone",
            "DINOv3ViTConfig",
            num_register_tokens=2,
            out_features=["stage1", "stage3"],
            **MLP,
        ),
        WIDE,
        output=joined_maps,
    ),
    "clip_vision": Entry(model("CLIPVisionModel", "CLIPVisionConfig", **MLP)),
    "siglip_vision": Entry(
        model("SiglipVisionModel", "SiglipVisionConfig", **MLP), WIDE, call=interpolated
    ),
    "yolos": Entry(lambda **more: build("YolosModel", yolos_config(), **more), (40, 32)),
    "yolos_plain": Entry(
        lambda **more: build("YolosModel", yolos_config(use_mid_position_embeddings=False), **more),
        (32, 48),
    ),
    "vitdet": Entry(lambda **more: build("VitDetModel", vitdet_config(), **more), (32, 56)),
    "vitdet_backbone": Entry(
        lambda **more: build(
            "VitDetBackbone", vitdet_config(out_features=["stage1", "stage3"]), **more
        ),
        (32, 56),
        output=joined_maps,
    ),
    "vitdet_plain": Entry(
        lambda **more: build(
            "VitDetModel",
            vitdet_config(use_relative_position_embeddings=False, window_block_indices=[]),
            **more,
        ),
        (32, 40),
    ),
    "sam_encoder": Entry(lambda **more: build("SamVisionModel", sam_config(), **more), (40, 40)),
    "depth_anything": Entry(depth_anything, WIDE, output=lambda result: result.predicted_depth),
}
