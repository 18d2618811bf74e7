"""Transformers of transformers that cannot be made eventful, each with the part that is why.

Their blocks would be refused for a reason that helps nobody, such as an argument they need, or
would match and then fail in a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from eventful.rules.spec import BlockSpec
from eventful.surgery.adapter import Adapter, Foreign, Mismatch
from eventful.tokens.layout import TokenLayout

_SHIFTED = "its windows are shifted in every second block, and attention is masked at their seams"
_REDUCED = "its keys and values come from a strided convolution over neighbouring tokens"
_POOLED = "its queries are pooled between stages, so that a token does not keep its place"
_TIMES = "its attention runs over the frames of a clip and over the picture in turn"

# Why, by the module of the class below `transformers.models` and its name.
REASONS: dict[tuple[str, str], str] = {
    ("swin.modeling_swin", "SwinModel"): _SHIFTED,
    ("swin.modeling_swin", "SwinBackbone"): _SHIFTED,
    ("swinv2.modeling_swinv2", "Swinv2Model"): _SHIFTED,
    ("swinv2.modeling_swinv2", "Swinv2Backbone"): _SHIFTED,
    ("swin2sr.modeling_swin2sr", "Swin2SRModel"): _SHIFTED,
    ("donut.modeling_donut_swin", "DonutSwinModel"): _SHIFTED,
    ("maskformer.modeling_maskformer_swin", "MaskFormerSwinModel"): _SHIFTED,
    ("clap.modeling_clap", "ClapAudioEncoder"): _SHIFTED,
    ("segformer.modeling_segformer", "SegformerModel"): _REDUCED,
    ("glpn.modeling_glpn", "GLPNEncoder"): _REDUCED,
    ("pvt.modeling_pvt", "PvtEncoder"): _REDUCED,
    ("pvt_v2.modeling_pvt_v2", "PvtV2Encoder"): _REDUCED,
    ("cvt.modeling_cvt", "CvtEncoder"): _REDUCED,
    ("hiera.modeling_hiera", "HieraModel"): _POOLED,
    ("hiera.modeling_hiera", "HieraBackbone"): _POOLED,
    ("sam2.modeling_sam2", "Sam2HieraDetModel"): _POOLED,
    ("levit.modeling_levit", "LevitEncoder"): _POOLED,
    ("mobilevit.modeling_mobilevit", "MobileViTEncoder"): (
        "its blocks take each place in a patch as a sequence of its own, between convolutions"
    ),
    ("focalnet.modeling_focalnet", "FocalNetEncoder"): (
        "its blocks mix tokens by convolutions and have no attention"
    ),
    ("poolformer.modeling_poolformer", "PoolFormerEncoder"): (
        "its blocks mix tokens by pooling and have no attention"
    ),
    ("perceiver.modeling_perceiver", "PerceiverEncoder"): (
        "its blocks attend among latents, which have no place in the picture"
    ),
    ("vit_mae.modeling_vit_mae", "ViTMAEModel"): (
        "its embeddings leave out random patches and shuffle the others; use them in a ViTModel"
    ),
    ("vilt.modeling_vilt", "ViltModel"): (
        "its embeddings choose random patches and put them beside the words of a text"
    ),
    ("videomt.modeling_videomt", "VideomtForUniversalSegmentation"): (
        "its blocks take the frames of a clip as a batch; step an EoMT frame by frame"
    ),
    ("timesformer.modeling_timesformer", "TimesformerModel"): _TIMES,
    ("x_clip.modeling_x_clip", "XCLIPVisionEncoder"): (
        "its blocks exchange messages between the frames of a clip, which are a batch"
    ),
    ("videoprism.modeling_videoprism", "VideoPrismVisionModel"): (
        "its attention scores pass a tanh, and " + _TIMES.removeprefix("its ")
    ),
    ("layoutlmv3.modeling_layoutlmv3", "LayoutLMv3Model"): (
        "its attention adds a bias of where the words of a text stand, which changes with the text"
    ),
    ("bridgetower.modeling_bridgetower", "BridgeTowerModel"): (
        "its vision blocks take the tokens first and the frames second, and a text beside them"
    ),
    ("seggpt.modeling_seggpt", "SegGptModel"): (
        "its encoder averages the tokens of two pictures between blocks"
    ),
    ("pix2struct.modeling_pix2struct", "Pix2StructVisionModel"): (
        "its patches bring their own places, and some are padding that attention leaves out"
    ),
    ("mllama.modeling_mllama", "MllamaVisionModel"): (
        "its tokens are those of several tiles, padded, and attention leaves the padding out"
    ),
    ("pixtral.modeling_pixtral", "PixtralVisionModel"): (
        "its attention takes a mask that keeps the frames of a batch apart in one sequence"
    ),
    ("video_llama_3.modeling_video_llama_3", "VideoLlama3VisionModel"): (
        "its blocks take the frames of a batch as one sequence, with its borders in `cu_seqlens`"
    ),
    ("florence2.modeling_florence2", "Florence2VisionBackbone"): (
        "its blocks attend among channels in turn with windows, after a convolution"
    ),
}


class HFRefused(Adapter):
    """Known, and refused."""

    name = "refused"
    library = "transformers"

    def matches(self, module: nn.Module) -> bool:
        """See `Adapter`."""
        return _reason(module) is not None

    def blocks(self, trunk: nn.Module) -> Sequence[tuple[str, nn.Module]]:
        """See `Adapter`; the trunk itself, whose reason is that of all its blocks."""
        return [("", trunk)]

    def spec(self, trunk: nn.Module, block: nn.Module) -> BlockSpec:
        """See `Adapter`."""
        raise Mismatch(str(_reason(trunk)))

    def layout(self, trunk: nn.Module, size: tuple[int, int]) -> TokenLayout:
        """See `Adapter`."""
        return TokenLayout((0, 0))

    def default_size(self, trunk: Foreign) -> tuple[int, int]:
        """See `Adapter`."""
        return 0, 0


def _reason(module: nn.Module) -> str | None:
    for cls in type(module).__mro__:
        path = cls.__module__.removeprefix("transformers.models.")
        if (path, cls.__name__) in REASONS:
            return REASONS[path, cls.__name__]
    return None
