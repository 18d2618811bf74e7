"""70 architectures of timm, each made tiny: which convert, and why the others do not.

`python tests/census_timm.py` prints the table of docs/models.md.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import eventful
from eventful.surgery.libraries import load
from zoo_timm import spread

timm = load("timm")

SIDE = 64
THIN = {"embed_dim": 32, "depth": 2, "num_heads": 2}


@dataclass(frozen=True)
class Row:
    """One architecture.

    Attributes:
        about: what is particular about it.
        refused: what the reason for its refusal says; None where it converts.
        build: makes a tiny model.
        side: of a frame, in pixels.
    """

    about: str
    build: Callable[[], nn.Module]
    refused: str | None = None
    side: int = SIDE


def vit(name: str, about: str, **options: Any) -> tuple[str, Row]:
    """A plain transformer by its name in timm's list, made tiny."""
    sized = {"img_size": SIDE, "patch_size": 16} | THIN | options
    return name, Row(about, partial(create, name, **sized))


def staged(
    name: str, about: str, refused: str | None = None, side: int = SIDE, **options: Any
) -> tuple[str, Row]:
    """An architecture in stages, by its name in timm's list."""
    return name, Row(about, partial(create, name, **options), refused, side)


def create(name: str, **options: Any) -> nn.Module:
    """A model of timm with random weights that all matter."""
    torch.manual_seed(0)
    return spread(timm.create_model(name, pretrained=False, num_classes=0, **options))


def block(name: str, about: str, **options: Any) -> tuple[str, Row]:
    """A VisionTransformer with another kind of block or attention."""
    vision = load("timm.models.vision_transformer")
    for key, value in options.items():
        if key == "block_fn":
            options[key] = getattr(vision, value)
    sized = {"img_size": SIDE, "patch_size": 16, "num_classes": 0} | THIN | options

    def build() -> nn.Module:
        torch.manual_seed(0)
        return spread(vision.VisionTransformer(**sized))

    return name, Row(about, build)


def encoder(name: str, about: str, module: str, kind: str, **options: Any) -> tuple[str, Row]:
    """An encoder by its class."""
    sized = {"img_size": SIDE, "patch_size": 16} | THIN | options

    def build() -> nn.Module:
        torch.manual_seed(0)
        return spread(getattr(load(f"timm.models.{module}"), kind)(**sized))

    return name, Row(about, build)


GEMMA = {"embed_dim": 32, "depth": 2, "num_heads": 2, "head_dim": 16}

CENSUS: dict[str, Row] = dict(
    [
        # One list of blocks.
        vit("vit_tiny_patch16_224", "class token"),
        vit("vit_base_patch16_siglip_gap_224", "no class token"),
        vit("vit_base_patch16_siglip_224", "attention pooling head"),
        vit("vit_base_patch16_clip_quickgelu_224", "norm before the blocks, quick GELU"),
        vit("vit_base_patch16_rpn_224", "norms after attention and MLP"),
        vit("vit_so150m_patch16_reg4_gap_256", "registers, no class token"),
        vit("vit_small_patch14_reg4_dinov2", "registers, layer scale", patch_size=16),
        vit("vit_giant_patch14_dinov2", "SwiGLU MLP", patch_size=16),
        vit("vit_base_patch14_reg1_tipsv2", "class token, a register, layer scale", patch_size=16),
        vit("vit_intern300m_patch14_448", "layer scale, no final norm", patch_size=16),
        vit("aimv2_large_patch14_224", "RMS norm, SwiGLU, no bias", patch_size=16),
        vit("flexivit_small", "patch size that is resized"),
        vit("deit_tiny_distilled_patch16_224", "distillation token"),
        vit("deit3_small_patch16_224", "layer scale, positions without class token"),
        vit("vit_base_patch16_xp_224", "attention and MLP at once, RMS norm"),
        vit("test_vit3", "a register, layer scale, no class token", num_heads=2),
        block(
            "DiffParallelScalingBlock",
            "differential attention and MLP at once",
            block_fn="DiffParallelScalingBlock",
        ),
        block("ParallelThingsBlock", "two attentions at once", block_fn="ParallelThingsBlock"),
        block("DiffAttention", "difference of two attentions", attn_layer="diff"),
        staged("vit_tiny_r_s16_p8_224", "a ResNet in front", img_size=SIDE, **THIN),
        staged("vit_base_mci_224", "convolutions in front", img_size=SIDE, depth=1),
        vit("beit_base_patch16_224", "bias by relative position in every block"),
        vit("beitv2_base_patch16_224", "the same, pooled by average, smaller layer scale"),
        vit("beit3_base_patch16_224", "norms inside attention and MLP"),
        vit("vit_relpos_small_patch16_224", "bias by relative position"),
        vit("vit_relpos_base_patch16_cls_224", "the same with a class token"),
        vit("vit_relpos_medium_patch16_rpn_224", "the same with norms after"),
        vit("vit_srelpos_small_patch16_224", "one network makes the bias of all blocks"),
        vit("eva_giant_patch14_224", "Eva without rotary position", patch_size=16),
        vit("eva02_tiny_patch14_224", "rotary position, SwiGLU", patch_size=16),
        vit("eva02_base_patch16_clip_224", "norms inside attention and MLP"),
        vit("vit_small_patch16_rope_224", "rotary position alone"),
        vit("vit_small_patch16_rope_ape_224", "rotary and added position"),
        vit("vit_small_patch16_rope_mixed_224", "learned rotary position for each head"),
        vit("vit_base_patch16_rope_reg1_gap_256", "rotary position and registers"),
        vit("vit_small_patch16_dinov3", "no bias for keys"),
        vit("vit_huge_plus_patch16_dinov3_qkvb", "the same with SwiGLU and bias"),
        vit("vit_pe_core_tiny_patch16_384", "pooled by attention, rotary position"),
        vit("vit_pe_spatial_tiny_patch16_512", "rotary position, no final norm"),
        staged("samvit_base_patch16", "windows around global blocks", img_size=SIDE, **THIN),
        staged("naflexvit_base_patch16_gap", "any shape of frame, registers", **THIN),
        staged("naflexvit_base_patch16_map", "the same, pooled by attention", **THIN),
        staged("naflexvit_base_patch16_parfac_gap", "the same, factorised positions", **THIN),
        staged("naflexvit_so150m2_patch16_reg1_gap", "the same, one register", **THIN),
        encoder("qwen3_vit_88m", "Qwen3-VL's encoder", "qwen3_vit", "Qwen3VitEncoder"),
        encoder(
            "deepseek_vit_412m",
            "DeepSeek's encoder",
            "deepseek_vit",
            "DeepseekVitEncoder",
            global_pool="",
        ),
        # Several lists of blocks, or a transformer after other layers.
        staged("vitamin_small_224", "convolutions, then a transformer", img_size=SIDE),
        staged("pit_ti_224", "three stages, each with special tokens", side=224),
        staged("pit_ti_distilled_224", "the same with two special tokens", side=224),
        staged("crossvit_tiny_240", "two sizes of patches", side=240),
        staged("volo_d1_224", "outlook attention, then a transformer", img_size=SIDE),
        # Refused.
        staged(
            "convit_tiny",
            "gated positional attention, then a transformer",
            "gated positional attention",
            224,
        ),
        staged("gemma4_vit_167m", "rotary position, sandwich norms", "`rope_cos` beside", **GEMMA),
        staged("cait_xxs24_224", "talking heads, class attention", "a layer across heads", 224),
        staged("xcit_nano_12_p8_224", "attention over channels", "over channels", 224),
        staged("swin_tiny_patch4_window7_224", "shifted windows", "shifted windows", 224),
        staged("swinv2_tiny_window8_256", "shifted windows, cosines", "shifted windows", 256),
        staged("swinv2_cr_tiny_224", "shifted windows, norms after", "shifted windows", 224),
        staged("hiera_tiny_224", "windows, pooled queries", "pooled queries|windows", 224),
        staged("mvitv2_tiny", "pooled keys and queries", "`feat_size` beside", 224),
        staged("pvt_v2_b0", "keys reduced by convolution", "`feat_size` beside", 224),
        staged("twins_svt_small", "windows and pooled keys", "`size` beside", 224),
        staged("coat_tiny", "convolution inside attention", "`size` beside", 224),
        staged("levit_128", "bias by position, batch norm", "a bias by position", 224),
        staged("tiny_vit_5m_224", "windows with a bias", "windows", 224),
        staged("davit_tiny", "attention over channels", "over channels|windows", 224),
        staged("maxvit_nano_rw_256", "windows and grids", "windows|a convolution", 256),
        staged("nest_tiny", "blocks of the picture", "differ from its own forward", 224),
        staged("tnt_s_patch16_224", "transformers inside patches", "`patch_embed` beside", 224),
        staged("mobilevit_xxs", "tokens folded into the batch", "frames, tokens", 256),
    ]
)


def result(row: Row) -> tuple[str, str]:
    """The adapter that converts an architecture and what it leaves out, or why none does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = eventful.inspect(row.build(), row.side)
    if found.matched:
        missed = len(found.blocks) - found.matched
        name = next(block.adapter for block in found.blocks if block.matched)
        return name, f"{missed} of {len(found.blocks)} blocks stay dense" if missed else ""
    return "", "; ".join(sorted({block.reason or "" for block in found.blocks}))


def table() -> str:
    """The table of docs/models.md."""
    lines = ["| timm | what is particular | by |", "|---|---|---|"]
    for name, row in CENSUS.items():
        adapter, note = result(row)
        short = "" if adapter else f"no: {_first(row, note)}"
        by = f"{adapter}{'; ' + note if note else ''}" if adapter else short
        lines.append(f"| `{name}` | {row.about} | {by} |")
    return "\n".join(lines)


def _first(row: Row, note: str) -> str:
    """The reason that names the part, without the error of a library."""
    reasons = [one for one in note.split("; ") if re.search(row.refused or "", one)]
    text = re.sub(r": \w+Error: .*?(?=\. It has|$)", "", reasons[0])
    return text.replace("|", "/")


if __name__ == "__main__":
    print(table())
