"""Tiny random vision-language models of transformers: their vision towers in a stream."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from zoo_transformers import MLP, PATCHES, TINY, build, transformers

TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MERGED = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1, "in_channels": 3}


def features(run: Callable[..., Any], frame: Tensor, **options: Any) -> Any:
    """`get_image_features` of a model or of a stream."""
    if isinstance(run, functools.partial):  # a batch, with the streams to step
        return features(run.func, frame, **options, **run.keywords)
    call = getattr(run, "call", None)
    if call is None:
        return run.get_image_features(pixel_values=frame, **options)
    return call("get_image_features", pixel_values=frame, **options)


def joined(result: Any) -> Tensor:
    """The image tokens of all frames as one tensor, the batch first."""
    found = result.pooler_output
    return found if isinstance(found, Tensor) else torch.stack(list(found))


@dataclass(frozen=True)
class Entry(zoo.Entry):
    """As in `zoo`, with the arguments and results of vision-language models."""

    size: tuple[int, int] = (32, 32)
    output: Callable[[Any], Tensor] = joined
    call: Callable[[Callable[..., Any], Tensor], Any] = features


def cells(frame: Tensor, side: int, merge: int) -> Tensor:
    """Frames (B, C, H, W) as patches (B, h * w, C * side * side), cell by cell of merge x merge."""
    batch, channels, height, width = frame.shape
    down, across = height // side // merge, width // side // merge
    parts = frame.reshape(batch, channels, down, merge, side, across, merge, side)
    parts = parts.permute(0, 2, 5, 3, 6, 1, 4, 7)  # (B, down, across, merge, merge, C, side, side)
    return parts.reshape(batch, down * across * merge * merge, -1)


def qwen(run: Callable[..., Any], frame: Tensor) -> Any:
    """`get_image_features` with the arguments that Qwen's processor makes of frames."""
    side, merge = MERGED["patch_size"], MERGED["spatial_merge_size"]
    grid = torch.tensor([[1, frame.shape[2] // side, frame.shape[3] // side]] * len(frame))
    return features(run, cells(frame, side, merge).flatten(0, 1), image_grid_thw=grid)


def naflex(run: Callable[..., Any], frame: Tensor) -> Any:
    """`get_image_features` with the arguments that SigLIP 2's processor makes of frames."""
    shapes = torch.tensor([[frame.shape[2] // 8, frame.shape[3] // 8]] * len(frame))
    patches = cells(frame, 8, 1)
    mask = torch.ones(patches.shape[:2], dtype=torch.int32)
    return features(run, patches, spatial_shapes=shapes, pixel_attention_mask=mask)


def joined_deep(result: Any) -> Tensor:
    """Image tokens, and those made of the tapped layers."""
    images = torch.stack(list(result.pooler_output))
    taps = [
        # An older transformers has the tokens of all images in a row.
        part.reshape(images.shape) if isinstance(part, Tensor) else torch.stack(list(part))
        for part in result.deepstack_features
    ]
    return torch.cat([images, *taps], dim=1)


def qwen2_5_vl(**options: Any) -> nn.Module:
    """Qwen2.5-VL: windows of 4 x 4 patches that do not fit around a global block."""
    vision = {
        **MERGED,
        "depth": 3,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 16,
    }
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    whole = transformers.Qwen2_5_VLConfig(vision_config=vision, text_config=text)
    return build("Qwen2_5_VLForConditionalGeneration", whole, **options)


def qwen2_vl(**options: Any) -> nn.Module:
    """Qwen2-VL: rotary position, no windows."""
    vision = {**MERGED, "depth": 2, "embed_dim": 32, "hidden_size": 16, "num_heads": 2}
    vision |= {"mlp_ratio": 2}
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    whole = transformers.Qwen2VLConfig(vision_config=vision, text_config=text)
    return build("Qwen2VLForConditionalGeneration", whole, **options)


def qwen3_vl(**options: Any) -> nn.Module:
    """Qwen3-VL: position embeddings and rotary position, one layer tapped."""
    vision = {
        **MERGED,
        "depth": 3,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "out_hidden_size": 16,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [1],
    }
    text = {**TEXT, "head_dim": 8}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 1, 1]}
    whole = transformers.Qwen3VLConfig(vision_config=vision, text_config=text)
    return build("Qwen3VLForConditionalGeneration", whole, **options)


def internvl(**options: Any) -> nn.Module:
    """InternVL: queries and keys with norms, layer scales, 2 x 2 patches to an image token."""
    vision = {**TINY, **MLP, "image_size": [32, 32], "patch_size": [8, 8], "use_qk_norm": True}
    whole = transformers.InternVLConfig(
        vision_config={**vision, "model_type": "internvl_vision"},
        text_config={**TEXT, "model_type": "qwen2"},
    )
    return build("InternVLForConditionalGeneration", whole, **options)


def llava(tower: str = "clip_vision_model", **options: Any) -> nn.Module:
    """LLaVA: CLIP, or another tower, of which the layer before the last is used."""
    whole = transformers.LlavaConfig(
        vision_config={**TINY, **PATCHES, **MLP, "model_type": tower},
        text_config={**TEXT, "model_type": "llama"},
        vision_feature_select_strategy="default" if "clip" in tower else "full",
    )
    return build("LlavaForConditionalGeneration", whole, **options)


def llava_aimv2(**options: Any) -> nn.Module:
    """LLaVA over AIMv2, which passes `output_hidden_states` on to its blocks."""
    return llava("aimv2_vision_model", **options)


def paligemma(**options: Any) -> nn.Module:
    """PaliGemma: SigLIP and a linear layer, tied embeddings in the language model."""
    vision = {**TINY, **PATCHES, **MLP, "model_type": "siglip_vision_model"}
    whole = transformers.PaliGemmaConfig(
        vision_config={**vision, "vision_use_head": False, "projection_dim": 16},
        text_config={**TEXT, "head_dim": 8, "model_type": "gemma"},
        projection_dim=16,
    )
    return build("PaliGemmaForConditionalGeneration", whole, **options)


def llava_next(**options: Any) -> nn.Module:
    """LLaVA-NeXT: a picture in tiles, each of which CLIP sees by itself."""
    whole = transformers.LlavaNextConfig(
        vision_config={**TINY, **PATCHES, **MLP, "model_type": "clip_vision_model"},
        text_config={**TEXT, "model_type": "llama"},
        image_grid_pinpoints=[[32, 64]],
    )
    return build("LlavaNextForConditionalGeneration", whole, **options)


def idefics3(**options: Any) -> nn.Module:
    """Idefics 3, and SmolVLM: a tower that is recognised by its structure, tiles."""
    whole = transformers.Idefics3Config(
        vision_config={**TINY, **PATCHES, **MLP, "model_type": "idefics3_vision"},
        text_config={**TEXT, "model_type": "llama"},
        scale_factor=2,
    )
    return build("Idefics3ForConditionalGeneration", whole, **options)


def siglip(kind: str, **vision: Any) -> Callable[..., nn.Module]:
    """SigLIP with both towers; checkpoints of SigLIP 2 with a fixed size are of this class."""
    text = {**TINY, **MLP, "vocab_size": 64, "max_position_embeddings": 8}

    def make(**options: Any) -> nn.Module:
        config = getattr(transformers, f"{kind}Config")
        whole = config(text_config=text, vision_config={**TINY, **MLP, **vision})
        return build(f"{kind}Model", whole, **options)

    return make


def florence2(**options: Any) -> nn.Module:
    """Florence-2: DaViT, which cannot be converted."""
    vision = {
        "depths": [1],
        "patch_size": [3],
        "patch_stride": [2],
        "patch_padding": [1],
        "patch_prenorm": [False],
        "embed_dim": [16],
        "num_heads": [2],
        "num_groups": [2],
        "window_size": 4,
        "projection_dim": 16,
        "max_temporal_embeddings": 4,
        "max_position_embeddings": 16,
    }
    text = {
        "model_type": "bart",
        "vocab_size": 64,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
    }
    whole = transformers.Florence2Config(vision_config=vision, text_config=text)
    return build("Florence2ForConditionalGeneration", whole, **options)


# Towers with windows, an order of tokens or tapped layers of their own: every law, every preset.
ZOO: dict[str, Entry] = {
    "qwen2_5_vl": Entry(qwen2_5_vl, (24, 40), call=qwen),
    "qwen3_vl": Entry(qwen3_vl, (24, 40), output=joined_deep, call=qwen),
}
# Models around blocks that are like those of others in the zoos: the laws once.
WRAPPERS: dict[str, Entry] = {
    "siglip2_fixed": Entry(siglip("Siglip", **PATCHES)),
    "siglip2_naflex": Entry(siglip("Siglip2", patch_size=8, num_patches=16), (24, 48), call=naflex),
    "qwen2_vl": Entry(qwen2_vl, (24, 40), call=qwen),
    "internvl": Entry(internvl),
    "llava": Entry(llava),
    "llava_aimv2": Entry(llava_aimv2),
    "paligemma": Entry(paligemma),
}
