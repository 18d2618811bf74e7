"""Vision classes of transformers, each as a tiny random model: does it convert, and if not, why.

Every row has a block, or a way to lay out its tokens, of its own. Models that hold one of them as
their backbone are listed apart and are not counted. Nothing is downloaded.

`python tests/census_transformers.py` writes the table of docs/models.md again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zoo_transformers as zoo
from census import Case, Run, main
from eventful.surgery.libraries import load

transformers = load("transformers")

# Fields of configurations, made small wherever a configuration has them.
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "num_hidden_layers": 3,
    "depth": 3,
    "num_attention_heads": 2,
    "num_heads": 2,
    "intermediate_size": 48,
    "mlp_dim": 48,
    "mlp_ratio": 2,
    "image_size": 32,
    "pretrain_image_size": 32,
    "patch_size": 8,
    "projection_dim": 16,
    "vocab_size": 60,
    "drop_path_rate": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def named(kind: str, part: str) -> Any:
    """A class of transformers; before a dot, the family it is in if the library hides it."""
    family, _, name = kind.rpartition(".")
    if not family:
        return getattr(transformers, name)
    return getattr(importlib.import_module(f"transformers.models.{family}.{part}_{family}"), name)


def tiny(kind: str, **options: Any) -> Any:
    """A configuration with small numbers in every usual field."""
    cls = named(kind, "configuration")
    usual = vars(cls())
    small = {key: _like(usual[key], value) for key, value in SMALL.items() if key in usual}
    return cls(**{**small, **options})


def _like(usual: Any, value: Any) -> Any:
    """The value in the type of the usual one; configurations check theirs."""
    if isinstance(usual, list | tuple):
        return [_like(entry, value) for entry in usual]
    return value if usual is None else type(usual)(value)


def model(kind: str, config: Any) -> nn.Module:
    """A random model."""
    return zoo.spread(named(kind, "modeling")._from_config(config))


def plain(kind: str, config: str, **options: Any) -> Case:
    """A class whose tiny configuration needs no more than some fields."""
    case = {key: options.pop(key) for key in ("shape", "call", "wraps") if key in options}
    return Case(kind.rpartition(".")[2], lambda: model(kind, tiny(config, **options)), **case)


def clip(run: Run, frame: Tensor) -> Any:
    """A call of a model that takes clips (B, T, C, H, W)."""
    return run(pixel_values_videos=frame)


def patches(name: str, **more: Any) -> Callable[[Run, Tensor], Any]:
    """A call of a tower that takes the patches of one frame of 4 x 4, (1, 16, C) or (16, C)."""

    def call(run: Run, frame: Tensor) -> Any:
        return run(**{name: frame}, grid_thw=torch.tensor([[1, 4, 4]]), **more)

    return call


def words(frame: Tensor) -> dict[str, Tensor]:
    """Text beside a frame."""
    return {"input_ids": torch.tensor([[3, 4, 5, 59]]).expand(len(frame), -1)}


def boxed_words(frame: Tensor) -> dict[str, Tensor]:
    """Words of a document, each with a box."""
    return {**words(frame), "bbox": torch.ones(len(frame), 4, 4, dtype=torch.long)}


EVERY_STAGE = {
    "num_hidden_layers": 4,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
STAGES = {"out_features": ["stage1", "stage3"]}
PYRAMID = {"hidden_sizes": [16, 32, 32, 32], "depths": [1] * 4}
HEADS = {"num_attention_heads": [1, 2, 2, 2]}
SHIFTED = {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
SEGMENT = {"window_size": 3, "global_attn_indexes": [1], "output_channels": 16}
QUERIES = {"num_blocks": 1, "num_queries": 5, "num_upscale_blocks": 1}
CLIP = {"num_frames": 4, "shape": (4, 3, 32, 32)}
TEXT = {"vocab_size": 60, "max_position_embeddings": 8, "eos_token_id": 59, "pad_token_id": 0}


def detector(kind: str, backbone: Any) -> nn.Module:
    """RF-DETR or LW-DETR over a tiny backbone."""
    settings = {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_ffn_dim": 32,
        "decoder_self_attention_heads": 2,
        "decoder_cross_attention_heads": 2,
        "decoder_n_points": 2,
        "num_queries": 5,
        "num_labels": 4,
    }
    if kind == "LwDetr":
        settings["projector_scale_factors"] = [1.0]
    config = getattr(transformers, f"{kind}Config")(backbone_config=backbone, **settings)
    return model(f"{kind}ForObjectDetection", config)


def rf_detr() -> nn.Module:
    """RF-DETR with 2 x 2 windows, joined in the middle block."""
    inside = {"num_windows": 2, "window_block_indexes": [0, 2]}
    return detector("RfDetr", tiny("RfDetrDinov2Config", **inside, **STAGES))


def lw_detr() -> nn.Module:
    """LW-DETR with 2 x 2 windows, joined in the middle block."""
    inside = {"num_windows": 4, "num_windows_side": 2, "window_block_indices": [0, 2]}
    return detector("LwDetr", tiny("LwDetrViTConfig", **inside, **STAGES))


def owl(kind: str) -> nn.Module:
    """OWL-ViT or OWLv2 with both towers and the heads."""
    text, vision = (tiny(f"{kind}{tower}Config") for tower in ("Text", "Vision"))
    whole = getattr(transformers, f"{kind}Config")(
        text_config=text.to_dict() | TEXT, vision_config=vision.to_dict(), projection_dim=32
    )
    return model(f"{kind}ForObjectDetection", whole)


def depth_pro() -> nn.Module:
    """Depth Pro: 35 squares of 32 px of a frame of 128 px, and two encoders of the whole."""
    inner = tiny("Dinov2Config").to_dict()
    config = transformers.DepthProConfig(
        fusion_hidden_size=16,
        patch_size=32,
        intermediate_hook_ids=[1, 0],
        intermediate_feature_dims=[8, 8],
        scaled_images_feature_dims=[16, 16, 8],
        merge_padding_value=1,
        use_fov_model=True,
        num_fov_head_layers=1,
        image_model_config=inner,
        patch_model_config=inner,
        fov_model_config=inner,
    )
    return model("DepthProForDepthEstimation", config)


def dpt() -> nn.Module:
    """DPT over its own ViT, of which two layers are tapped."""
    config = tiny(
        "DPTConfig",
        num_hidden_layers=4,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[16] * 4,
        fusion_hidden_size=16,
    )
    return model("DPTForDepthEstimation", config)


def vitpose(**options: Any) -> nn.Module:
    """ViTPose."""
    backbone = tiny("VitPoseBackboneConfig", **options)
    return model("VitPoseForPoseEstimation", transformers.VitPoseConfig(backbone_config=backbone))


def upernet(backbone: Any) -> nn.Module:
    """UperNet over a backbone that hands out two layers."""
    config = transformers.UperNetConfig(
        backbone_config=backbone,
        hidden_size=16,
        auxiliary_in_channels=32,
        auxiliary_channels=16,
        auxiliary_in_index=0,
    )
    return model("UperNetForSemanticSegmentation", config)


def zoe_depth() -> nn.Module:
    """ZoeDepth over BEiT."""
    backbone = tiny(
        "BeitConfig",
        use_relative_position_bias=True,
        reshape_hidden_states=False,
        **EVERY_STAGE,
    )
    config = transformers.ZoeDepthConfig(
        backbone_config=backbone,
        backbone_hidden_size=32,
        neck_hidden_sizes=[16] * 4,
        fusion_hidden_size=16,
        bottleneck_features=16,
        num_relative_features=16,
    )
    return model("ZoeDepthForDepthEstimation", config)


def vit_matte() -> nn.Module:
    """ViTMatte over ViTDet; a frame has a trimap as its fourth channel."""
    backbone = zoo.vitdet_config(num_channels=4, patch_size=16, out_features=["stage3"])
    config = transformers.VitMatteConfig(
        backbone_config=backbone,
        hidden_size=32,
        convstream_hidden_sizes=[8, 8, 8],
        fusion_hidden_sizes=[16, 16, 8, 8],
    )
    return model("VitMatteForImageMatting", config)


def caption() -> nn.Module:
    """A ViT and a decoder of text, as TrOCR is."""
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        tiny("ViTConfig"),
        transformers.TrOCRConfig(
            vocab_size=60,
            d_model=32,
            decoder_layers=1,
            decoder_attention_heads=2,
            decoder_ffn_dim=32,
            max_position_embeddings=16,
        ),
    )
    return model("VisionEncoderDecoderModel", config)


def told(run: Run, frame: Tensor) -> Any:
    """A call with the words so far."""
    return run(pixel_values=frame, decoder_input_ids=words(frame)["input_ids"])


def _places(frame: Tensor) -> Tensor:
    """Row and column, from 1, of 16 patches, as Pix2Struct takes them ahead of the pixels."""
    place = torch.arange(16)
    return torch.stack([place // 4 + 1, place % 4 + 1], dim=-1).expand(len(frame), -1, -1).float()


def beside(run: Run, frame: Tensor) -> Any:
    """A call with an example picture and its mask."""
    return run(pixel_values=frame, prompt_pixel_values=frame.flip(-1), prompt_masks=frame)


def bridge_tower() -> nn.Module:
    """BridgeTower with both towers and three bridges."""
    text = tiny("BridgeTowerTextConfig", type_vocab_size=1).to_dict()
    vision = tiny("BridgeTowerVisionConfig", hidden_size=64).to_dict()
    config = tiny("BridgeTowerConfig", num_hidden_layers=2, hidden_size=64)
    config = transformers.BridgeTowerConfig(
        hidden_size=64,
        num_attention_heads=2,
        num_hidden_layers=2,
        text_config=text | {"hidden_size": 64},
        vision_config=vision,
    )
    return model("BridgeTowerModel", config)


def sam2() -> nn.Module:
    """SAM 2's image encoder."""
    backbone = transformers.Sam2HieraDetConfig(
        hidden_size=16,
        image_size=[128, 128],
        blocks_per_stage=[1, 1, 2, 1],
        embed_dim_per_stage=[16, 32, 48, 64],
        num_attention_heads_per_stage=[1, 2, 2, 2],
        window_size_per_stage=[8, 4, 4, 4],
        global_attention_blocks=[3],
    )
    config = transformers.Sam2VisionConfig(
        backbone_config=backbone,
        backbone_channel_list=[64, 48, 32, 16],
        backbone_feature_sizes=[[32, 32], [16, 16], [8, 8]],
        fpn_hidden_size=16,
    )
    return model("Sam2VisionModel", config)


def sam3() -> nn.Module:
    """SAM 3's image encoder with its neck."""
    backbone = tiny("Sam3ViTConfig", window_size=2, global_attn_indexes=[1])
    config = transformers.Sam3VisionConfig(
        backbone_config=backbone,
        fpn_hidden_size=16,
        backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
    )
    return model("Sam3VisionModel", config)


def seggpt() -> nn.Module:
    """SegGPT: frame and example below one another."""
    config = tiny(
        "SegGptConfig",
        image_size=[64, 32],
        intermediate_hidden_state_indices=[1, 2],
        merge_index=0,
        decoder_hidden_size=16,
    )
    return model("SegGptForImageSegmentation", config)


def grounding_dino() -> nn.Module:
    """Grounding DINO over a Swin backbone."""
    backbone = tiny("SwinConfig", **SHIFTED, patch_size=4, out_features=["stage1", "stage2"])
    config = transformers.GroundingDinoConfig(
        backbone_config=backbone,
        text_config=tiny("BertConfig"),
        num_queries=5,
        encoder_layers=1,
        encoder_ffn_dim=32,
        encoder_attention_heads=2,
        decoder_layers=2,
        decoder_ffn_dim=32,
        decoder_attention_heads=2,
        d_model=32,
        num_feature_levels=2,
    )
    return model("GroundingDinoForObjectDetection", config)


CASES: list[Case] = [
    # Plain
    plain("ViTModel", "ViTConfig"),
    plain("DeiTModel", "DeiTConfig"),
    plain("Dinov2Model", "Dinov2Config"),
    plain("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig"),
    plain("DINOv3ViTModel", "DINOv3ViTConfig"),
    plain("BeitModel", "BeitConfig", use_relative_position_bias=True),
    plain("Data2VecVisionModel", "Data2VecVisionConfig", use_shared_relative_position_bias=True),
    plain("ViTMAEModel", "ViTMAEConfig"),
    plain("ViTMSNModel", "ViTMSNConfig"),
    plain("IJepaModel", "IJepaConfig"),
    plain("PixioModel", "PixioConfig"),
    plain("RadioModel", "RadioConfig"),
    plain("Sapiens2Model", "Sapiens2Config"),
    plain("Tipsv2VisionModel", "Tipsv2VisionConfig"),
    plain("Aimv2VisionModel", "Aimv2VisionConfig"),
    plain("FlavaImageModel", "FlavaImageConfig"),
    plain("MgpstrModel", "MgpstrConfig"),
    plain(
        "ASTModel",
        "ASTConfig",
        max_length=32,
        num_mel_bins=16,
        frequency_stride=8,
        time_stride=8,
        shape=(32, 16),
        call=lambda run, frame: run(input_values=frame),
    ),
    # Towers of models of pictures and text
    plain("CLIPVisionModel", "CLIPVisionConfig"),
    plain("CLIPSegVisionModel", "CLIPSegVisionConfig"),
    plain("AltCLIPVisionModel", "AltCLIPVisionConfig"),
    plain("ChineseCLIPVisionModel", "ChineseCLIPVisionConfig"),
    plain("MetaClip2VisionModel", "MetaClip2VisionConfig"),
    plain("SiglipVisionModel", "SiglipVisionConfig"),
    plain(
        "Siglip2VisionModel",
        "Siglip2VisionConfig",
        num_patches=16,
        shape=(16, 192),
        call=lambda run, frame: run(
            pixel_values=frame,
            pixel_attention_mask=torch.ones(len(frame), 16, dtype=torch.long),
            spatial_shapes=torch.tensor([[4, 4]] * len(frame)),
        ),
    ),
    plain("BlipVisionModel", "BlipVisionConfig"),
    plain("Blip2VisionModel", "Blip2VisionConfig"),
    plain("InstructBlipVisionModel", "InstructBlipVisionConfig"),
    plain("GitVisionModel", "GitVisionConfig"),
    plain("kosmos2.Kosmos2VisionModel", "Kosmos2VisionConfig"),
    plain("MLCDVisionModel", "MLCDVisionConfig"),
    plain("JanusVisionModel", "JanusVisionConfig"),
    plain("idefics2.Idefics2VisionTransformer", "idefics2.Idefics2VisionConfig"),
    plain("Idefics3VisionTransformer", "Idefics3VisionConfig"),
    plain("SmolVLMVisionTransformer", "SmolVLMVisionConfig"),
    plain("ovis2.Ovis2VisionModel", "ovis2.Ovis2VisionConfig"),
    plain(
        "Phi4MultimodalVisionModel",
        "Phi4MultimodalVisionConfig",
        crop_size=32,
        call=lambda run, frame: run(
            pixel_values=frame, patch_attention_mask=torch.ones(len(frame), 4, 4, dtype=torch.bool)
        ),
    ),
    plain("InternVLVisionModel", "InternVLVisionConfig"),
    plain(
        "PixtralVisionModel",
        "PixtralVisionConfig",
        head_dim=16,
        call=lambda run, frame: run(pixel_values=frame, image_sizes=[(32, 32)] * len(frame)),
    ),
    plain("Step3p7VisionModel", "Step3p7VisionConfig"),
    plain(
        "Llama4VisionModel",
        "Llama4VisionConfig",
        intermediate_size=128,
        projector_input_dim=32,
        projector_output_dim=32,
    ),
    plain(
        "Molmo2VisionModel",
        "molmo2.Molmo2VisionConfig",
        head_dim=16,
        num_key_value_heads=2,
        num_position_embeddings=16,
        shape=(16, 192),
    ),
    plain(
        "MllamaVisionModel",
        "MllamaVisionConfig",
        attention_heads=2,
        num_global_layers=1,
        intermediate_layers_indices=[1],
        shape=(1, 4, 3, 32, 32),
        call=lambda run, frame: run(
            pixel_values=frame,
            aspect_ratio_ids=torch.ones(len(frame), 1, dtype=torch.long),
            aspect_ratio_mask=torch.ones(len(frame), 1, 4, dtype=torch.long),
        ),
    ),
    plain(
        "qwen2_vl.Qwen2VisionTransformerPretrainedModel",
        "qwen2_vl.Qwen2VLVisionConfig",
        shape=(16, 384),
        call=lambda run, frame: patches("hidden_states")(run, frame.flatten(0, 1)),
    ),
    plain(
        "qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel",
        "qwen2_5_vl.Qwen2_5_VLVisionConfig",
        window_size=16,
        out_hidden_size=32,
        fullatt_block_indexes=[1],
        shape=(16, 384),
        call=lambda run, frame: patches("hidden_states")(run, frame.flatten(0, 1)),
    ),
    plain(
        "Qwen3VLVisionModel",
        "qwen3_vl.Qwen3VLVisionConfig",
        out_hidden_size=32,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
        shape=(16, 384),
        call=lambda run, frame: patches("hidden_states")(run, frame.flatten(0, 1)),
    ),
    plain(
        "Glm4vVisionModel",
        "Glm4vVisionConfig",
        out_hidden_size=32,
        shape=(16, 384),
        call=lambda run, frame: patches("hidden_states")(run, frame.flatten(0, 1)),
    ),
    plain(
        "VideoLlama3VisionModel",
        "VideoLlama3VisionConfig",
        shape=(16, 192),
        call=lambda run, frame: patches("pixel_values", merge_sizes=torch.tensor([2]))(
            run, frame.flatten(0, 1)
        ),
    ),
    plain(
        "Pix2StructVisionModel",
        "Pix2StructVisionConfig",
        d_kv=16,
        d_ff=48,
        patch_embed_hidden_size=192,
        seq_len=16,
        shape=(16, 194),
        call=lambda run, frame: run(
            flattened_patches=torch.cat([_places(frame), frame[..., 2:]], dim=-1)
        ),
    ),
    plain(
        "GroupViTVisionModel",
        "GroupViTVisionConfig",
        depths=[1, 1, 1],
        num_group_tokens=[4, 2, 0],
        num_output_groups=[4, 2, 2],
    ),
    plain("ViltModel", "ViltConfig", call=lambda run, f: run(**words(f), pixel_values=f)),
    plain(
        "LayoutLMv3Model",
        "LayoutLMv3Config",
        input_size=32,
        coordinate_size=5,
        shape_size=6,
        call=lambda run, frame: run(**boxed_words(frame), pixel_values=frame),
    ),
    Case("BridgeTowerModel", bridge_tower, call=lambda r, f: r(**words(f), pixel_values=f)),
    # Detection
    plain("YolosForObjectDetection", "YolosConfig", num_detection_tokens=3),
    Case("RfDetrForObjectDetection", rf_detr, (3, 64, 64)),
    Case("LwDetrForObjectDetection", lw_detr, (3, 64, 64)),
    Case(
        "OwlViTForObjectDetection",
        lambda: owl("OwlViT"),
        call=lambda r, f: r(**words(f), pixel_values=f),
    ),
    Case(
        "Owlv2ForObjectDetection",
        lambda: owl("Owlv2"),
        call=lambda r, f: r(**words(f), pixel_values=f),
    ),
    plain("VitDetModel", "VitDetConfig", window_size=2, window_block_indices=[0]),
    # Segmentation, depth, pose
    plain("EomtForUniversalSegmentation", "EomtConfig", **QUERIES),
    plain("EomtDinov3ForUniversalSegmentation", "EomtDinov3Config", **QUERIES),
    plain(
        "VideomtForUniversalSegmentation",
        "VideomtConfig",
        **QUERIES,
        shape=(2, 3, 32, 32),
        call=clip,
    ),
    plain("SamVisionModel", "SamVisionConfig", **SEGMENT),
    plain("SamHQVisionModel", "SamHQVisionConfig", **SEGMENT),
    Case("Sam2VisionModel", sam2, (3, 128, 128)),
    Case("Sam3VisionModel", sam3),
    plain("got_ocr2.GotOcr2VisionEncoder", "GotOcr2VisionConfig", **SEGMENT),
    Case("SegGptForImageSegmentation", seggpt, call=beside),
    Case("DPTForDepthEstimation", dpt),
    Case("DepthProForDepthEstimation", depth_pro, (3, 128, 128)),
    Case("VitPoseForPoseEstimation", vitpose),
    # Video
    plain("VideoMAEModel", "VideoMAEConfig", **CLIP),
    plain("VivitModel", "VivitConfig", tubelet_size=[2, 8, 8], **CLIP),
    plain(
        "VJEPA2Model",
        "VJEPA2Config",
        crop_size=32,
        frames_per_clip=4,
        hidden_size=48,
        pred_hidden_size=48,
        pred_num_attention_heads=2,
        pred_num_hidden_layers=2,
        shape=(4, 3, 32, 32),
        call=lambda run, frame: run(pixel_values_videos=frame, skip_predictor=True),
    ),
    plain("TimesformerModel", "TimesformerConfig", num_frames=2, shape=(2, 3, 32, 32)),
    plain(
        "XCLIPVisionModel",
        "XCLIPVisionConfig",
        num_frames=2,
        mit_hidden_size=32,
        mit_intermediate_size=48,
        mit_num_attention_heads=2,
        shape=(2, 3, 32, 32),
        call=lambda run, frame: run(frame.flatten(0, 1)),
    ),
    plain(
        "VideoPrismVisionModel",
        "VideoPrismVisionConfig",
        num_frames=2,
        tubelet_size=[1, 8, 8],
        num_spatial_layers=2,
        num_temporal_layers=2,
        shape=(2, 3, 32, 32),
        call=clip,
    ),
    # Other transformers
    plain("SwinModel", "SwinConfig", **SHIFTED, patch_size=4),
    plain("Swinv2Model", "Swinv2Config", **SHIFTED, patch_size=4),
    plain(
        "HieraModel",
        "HieraConfig",
        embed_dim=16,
        depths=[1, 1],
        num_heads=[1, 2],
        image_size=[32, 32],
        patch_size=[7, 7],
        masked_unit_size=[2, 2],
        num_query_pool=1,
        query_stride=[2, 2],
    ),
    plain("SegformerModel", "SegformerConfig", **PYRAMID, **HEADS),
    plain(
        "PvtModel",
        "PvtConfig",
        **PYRAMID,
        **HEADS,
        image_size=64,
        patch_sizes=[4, 2, 2, 2],
        shape=(3, 64, 64),
    ),
    plain("PvtV2Model", "PvtV2Config", **PYRAMID, **HEADS, shape=(3, 64, 64)),
    plain("CvtModel", "CvtConfig", embed_dim=[16, 32, 32], num_heads=[1, 2, 2], depth=[1, 2, 3]),
    plain("MobileViTModel", "MobileViTConfig", patch_size=2, shape=(3, 64, 64)),
    plain(
        "FocalNetModel",
        "FocalNetConfig",
        embed_dim=16,
        depths=[1, 1],
        focal_levels=[1, 1],
        focal_windows=[3, 3],
        hidden_sizes=[16, 32],
    ),
    plain(
        "PerceiverModel",
        "PerceiverConfig",
        num_latents=4,
        d_latents=32,
        d_model=32,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
        shape=(16, 32),
        call=lambda run, frame: run(inputs=frame),
    ),
    Case(
        "GroundingDinoForObjectDetection",
        grounding_dino,
        (3, 64, 64),
        call=lambda r, f: r(**words(f), pixel_values=f),
    ),
    # Over one of these
    Case("DepthAnythingForDepthEstimation", zoo.depth_anything, wraps="Dinov2Backbone"),
    Case(
        "UperNetForSemanticSegmentation",
        lambda: upernet(tiny("Dinov2Config", **EVERY_STAGE)),
        (3, 64, 64),
        wraps="Dinov2Backbone",
    ),
    Case(
        "UperNetForSemanticSegmentation",
        lambda: upernet(tiny("BeitConfig", **EVERY_STAGE)),
        wraps="BeitBackbone",
    ),
    Case("ZoeDepthForDepthEstimation", zoe_depth, wraps="BeitBackbone"),
    Case("VitMatteForImageMatting", vit_matte, (4, 64, 64), wraps="VitDetBackbone"),
    Case("VisionEncoderDecoderModel", caption, call=told, wraps="ViTModel"),
    Case(
        "SamModel",
        zoo.sam_model,
        (3, 40, 40),
        lambda r, f: r(pixel_values=f, input_points=torch.tensor([[[[10.0, 20.0]]]])),
        wraps="SamVisionEncoder",
    ),
]


if __name__ == "__main__":
    main(CASES, "transformers")
