"""Tiny random models for the adapters of timm and torchvision, and for those found by structure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import eventful
import structures
from eventful import Config
from eventful.surgery.libraries import load
from zoo import Entry

timm = load("timm")
vit = load("timm.models.vision_transformer")
eva = load("timm.models.eva")
sam = load("timm.models.vision_transformer_sam")
torchvision_vit = load("torchvision.models.vision_transformer")

TINY = {"embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 0}
FRAME = (32, 40)  # 4 x 5 patches of 8 x 8


def spread(model: nn.Module) -> nn.Module:
    """Random weights under which attention is far from uniform and every part matters."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            leaf = name.rpartition(".")[2]
            if leaf == "freqs":  # of learned rotary position: what matters is where it begins
                continue
            if leaf.endswith("weight") and weight.dim() > 1:
                weight.normal_(std=weight[0].numel() ** -0.5)
            elif leaf == "weight":  # of a norm
                weight.normal_(mean=1.0, std=0.2)
            elif leaf.startswith("gamma"):
                weight.normal_(mean=0.5, std=0.1)
            elif leaf.endswith("bias"):
                weight.normal_(std=0.2)
            else:  # position embeddings, special tokens, tables of relative position
                weight.normal_(std=0.5)
    return model.eval()


def plain(block: str = "Block", **options: Any) -> Callable[[], nn.Module]:
    """A timm VisionTransformer that returns all its tokens; an older timm lacks some blocks."""
    settings = {"img_size": FRAME, "patch_size": 8, "mlp_ratio": 2, "global_pool": ""}

    def make() -> nn.Module:
        made = {"block_fn": getattr(vit, block)}
        return spread(vit.VisionTransformer(**TINY | settings | made | options))

    return make


def rotary(**options: Any) -> Callable[[], nn.Module]:
    """A timm Eva with rotary position that returns all its tokens."""
    settings = {"img_size": FRAME, "patch_size": 8, "mlp_ratio": 2, "global_pool": ""}
    return lambda: spread(eva.Eva(**TINY, **settings | {"use_rot_pos_emb": True} | options))


def named(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A model from timm's list, made small."""
    settings = {"img_size": FRAME, "patch_size": 8, "pretrained": False}
    return lambda: spread(timm.create_model(name, **TINY, **settings | options))


def unfused() -> nn.Module:
    """Attention written out, as timm runs it with TIMM_FUSED_ATTN=0."""
    model = plain()()
    for block in model.blocks:
        block.attn.fused_attn = False
    return model


def segment_anything() -> nn.Module:
    """Ragged windows around a global block whose relative tables have to be resized."""
    model = sam.VisionTransformerSAM(
        **TINY,
        img_size=48,
        patch_size=8,
        mlp_ratio=2,
        use_rel_pos=True,
        window_size=3,
        global_attn_indexes=(1,),
        neck_chans=16,
        global_pool="",
    )
    return spread(model)


class EncoderTokens(nn.Module):
    """A torchvision ViT inside another model, which looks at all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = torchvision_vit.VisionTransformer(
            image_size=32, patch_size=8, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64
        )

    def forward(self, frame: Tensor) -> Tensor:
        patches = self.vit._process_input(frame)
        special = self.vit.class_token.expand(len(frame), -1, -1)
        return self.vit.encoder(torch.cat([special, patches], dim=1))


ZOO: dict[str, Entry] = {
    "vit": Entry(plain()),
    "vit_no_class": Entry(plain(class_token=False)),
    "vit_registers": Entry(
        plain(img_size=32, dynamic_img_size=True, reg_tokens=3, init_values=0.5, qk_norm=True),
        size=(40, 24),
    ),
    "vit_unfused": Entry(unfused),
    # Branches that are normalised add as much as the tokens hold, and their rounding with it.
    "vit_postnorm": Entry(plain("ResPostBlock", scale_attn_norm=True), still="model"),
    "dinov2": Entry(named("vit_giant_patch14_reg4_dinov2", global_pool="")),
    "clip": Entry(named("vit_base_patch16_clip_quickgelu_224", global_pool="")),
    "siglip": Entry(named("vit_base_patch16_siglip_224")),
    "deit_distilled": Entry(named("deit_tiny_distilled_patch16_224")),
    "eva02": Entry(rotary(qkv_fused=False, swiglu_mlp=True, scale_mlp=True, scale_attn_inner=True)),
    "eva_mixed": Entry(rotary(rope_type="mixed", num_reg_tokens=2, init_values=0.5)),
    "eva_postnorm": Entry(
        rotary(use_post_norm=True, class_token=False, swiglu_mlp=True), still="model"
    ),
    "eva_grouped": Entry(
        rotary(attn_type="rope", num_kv_heads=1, qkv_fused=False, qk_norm=True, num_reg_tokens=1)
    ),
    "dinov3": Entry(named("vit_small_patch16_dinov3", global_pool="")),
    "sam": Entry(segment_anything, size=(40, 56)),
    "beit": Entry(named("beit_base_patch16_224", global_pool="")),
    "parallel": Entry(plain("DiffParallelScalingBlock", init_values=0.5)),
    "structure": Entry(lambda: spread(structures.split())),
    "structure_nested": Entry(lambda: spread(structures.nested())),
    "torchvision": Entry(lambda: spread(EncoderTokens()), size=(32, 32)),
}


def make(entry: Entry) -> nn.Module:
    """The same model at every call."""
    torch.manual_seed(7)
    return entry.make()


def run(entry: Entry, target: Callable[..., Any], frame: Tensor) -> Tensor:
    """What a model or a stream makes of a frame."""
    with torch.no_grad():
        return entry.output(entry.call(target, frame))


def stream_of(model: nn.Module, config: Config) -> eventful.Stream:
    """A stream of the converted model."""
    converted = eventful.convert(model, config)
    return eventful.Stream(converted)
