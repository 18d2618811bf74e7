"""Key formats of published checkpoints, and the names their tensors have here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from eventful.errors import CheckpointError

Rename = str | Callable[[re.Match[str]], str]


@dataclass(frozen=True)
class KeyFormat:
    """How one family of files names its tensors.

    Attributes:
        model: what the tensors make up: `vitdet`, `vitdet-backbone` or `vivit`.
        about: description of the files.
        rules: patterns of whole keys and their names here; the first that fits counts.
        unneeded: patterns of keys that are known and not used, with the reason.
        mark: pattern of a key that only this format has.
    """

    model: str
    about: str
    rules: tuple[tuple[str, Rename], ...]
    mark: str
    unneeded: tuple[tuple[str, str], ...] = ()

    def rename(self, key: str) -> str | None:
        """The name of a key here; None if the format has no rule for it."""
        for pattern, name in self.rules:
            found = re.fullmatch(pattern, key)
            if found:
                return name(found) if callable(name) else found.expand(name)
        return None

    def reason_unneeded(self, key: str) -> str | None:
        """Why a known key is not used; None where it is not known."""
        reasons = (why for pattern, why in self.unneeded if re.fullmatch(pattern, key))
        return next(reasons, None)


@dataclass(frozen=True)
class KeyReport:
    """How the keys of a file were used.

    Attributes:
        used: name in the file -> name here.
        unneeded: name in the file -> why it is known and not used.
        unexpected: names in the file without a rule.
        missing: names here that nothing in the file fills.
        mismatched: name here -> the two shapes that differ.
    """

    format: str
    used: Mapping[str, str] = field(default_factory=dict)
    unneeded: Mapping[str, str] = field(default_factory=dict)
    unexpected: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)

    @property
    def layout(self) -> str:
        """Old name of `format`."""
        return self.format

    @property
    def complete(self) -> bool:
        """Whether file and model fit each other with nothing left over on either side."""
        return not (self.unexpected or self.missing or self.mismatched)

    def __str__(self) -> str:
        lines = [f"format {self.format}: {len(self.used)} tensors used"]
        lines += [f"not needed: {key} ({why})" for key, why in self.unneeded.items()]
        lines += [f"unexpected in the file: {key}" for key in self.unexpected]
        lines += [f"missing from the file: {key}" for key in self.missing]
        lines += [f"another shape: {key} ({why})" for key, why in self.mismatched.items()]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """As values for JSON."""
        return {
            "layout": self.format,
            "complete": self.complete,
            "used": dict(self.used),
            "unneeded": dict(self.unneeded),
            "unexpected": list(self.unexpected),
            "missing": list(self.missing),
            "mismatched": dict(self.mismatched),
        }


def _before(count: str) -> int:
    """Layers that count from one count from zero here."""
    return int(count) - 1


_PARAMETER = r"(weight|bias)"
_DETECTRON_BACKBONE: tuple[tuple[str, Rename], ...] = (
    (r"backbone\.net\.pos_embed", "backbone.pos_embed"),
    (rf"backbone\.net\.patch_embed\.proj\.{_PARAMETER}", r"backbone.patch_embed.\1"),
    (
        r"backbone\.net\.blocks\.(\d+\.(?:norm[12]|attn\.(?:qkv|proj)|mlp\.fc[12])"
        r"\.(?:weight|bias))",
        r"backbone.blocks.\1",
    ),
    (r"backbone\.net\.blocks\.(\d+\.attn\.rel_pos_[hw])", r"backbone.blocks.\1"),
    (
        r"backbone\.simfp_([2-5])\.(\d+\.(?:norm\.)?(?:weight|bias))",
        r"pyramid.p\1.\2",
    ),
)
_DETECTRON_HEADS: tuple[tuple[str, Rename], ...] = (
    (rf"proposal_generator\.rpn_head\.conv\.conv(\d)\.{_PARAMETER}", r"rpn.convs.\1.\2"),
    (
        rf"proposal_generator\.rpn_head\.objectness_logits\.{_PARAMETER}",
        r"rpn.objectness.\1",
    ),
    (rf"proposal_generator\.rpn_head\.anchor_deltas\.{_PARAMETER}", r"rpn.deltas.\1"),
    (
        r"roi_heads\.box_head\.(?:(\d)\.)?conv(\d)\.((?:norm\.)?(?:weight|bias))",
        lambda m: f"heads.stages.{m[1] or 0}.convs.{_before(m[2])}.{m[3]}",
    ),
    (
        rf"roi_heads\.box_head\.(?:(\d)\.)?fc1\.{_PARAMETER}",
        lambda m: f"heads.stages.{m[1] or 0}.fc.{m[2]}",
    ),
    (
        rf"roi_heads\.box_predictor\.(?:(\d)\.)?cls_score\.{_PARAMETER}",
        lambda m: f"heads.stages.{m[1] or 0}.scores.{m[2]}",
    ),
    (
        rf"roi_heads\.box_predictor\.(?:(\d)\.)?bbox_pred\.{_PARAMETER}",
        lambda m: f"heads.stages.{m[1] or 0}.deltas.{m[2]}",
    ),
    (
        r"roi_heads\.mask_head\.mask_fcn(\d)\.((?:norm\.)?(?:weight|bias))",
        lambda m: f"heads.mask.convs.{_before(m[1])}.{m[2]}",
    ),
    (rf"roi_heads\.mask_head\.deconv\.{_PARAMETER}", r"heads.mask.upsample.\1"),
    (rf"roi_heads\.mask_head\.predictor\.{_PARAMETER}", r"heads.mask.predictor.\1"),
)
_DETECTRON_CONSTANTS = (
    (r"pixel_(mean|std)", "a constant of the preprocessing"),
    (r"proposal_generator\.anchor_generator\.cell_anchors\.\d", "computed from the anchor sizes"),
)
_TRANSFORMERS: tuple[tuple[str, Rename], ...] = (
    (r"(?:backbone\.)?embeddings\.position_embeddings", "backbone.pos_embed"),
    (rf"(?:backbone\.)?embeddings\.projection\.{_PARAMETER}", r"backbone.patch_embed.\1"),
    (
        r"(?:backbone\.)?encoder\.layer\.(\d+\.(?:norm[12]|mlp\.fc[12])\.(?:weight|bias))",
        r"backbone.blocks.\1",
    ),
    (
        r"(?:backbone\.)?encoder\.layer\.(\d+)\.attention\.((?:qkv|proj)\.(?:weight|bias)"
        r"|rel_pos_[hw])",
        r"backbone.blocks.\1.attn.\2",
    ),
)


def _vivit_rules(
    embed: str,
    classifier: str,
    parts: tuple[str, str, str, str, str, str],
    *,
    spatial: tuple[str, str, str, str],
    temporal: tuple[str, str, str, str],
) -> tuple[tuple[str, Rename], ...]:
    """Rules for one way to name a factorised ViViT.

    Args:
        embed, classifier: patterns of the first and the last layer.
        parts: of a block: norm, qkv, projection, norm, and the two layers of the MLP.
        spatial, temporal: of a sub-model: class token, positions, norm, and blocks.
    """
    rules: list[tuple[str, Rename]] = [
        (rf"{embed}\.{_PARAMETER}", r"spatial.embed.\1"),
        (rf"{classifier}\.{_PARAMETER}", r"classifier.\1"),
    ]
    here = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    for model, (token, positions, norm, blocks) in (("spatial", spatial), ("temporal", temporal)):
        rules += [
            (token, f"{model}.class_token"),
            (positions, f"{model}.positions"),
            (rf"{norm}\.{_PARAMETER}", rf"{model}.norm.\1"),
        ]
        rules += [
            (rf"{blocks}\.(\d+)\.{part}\.{_PARAMETER}", rf"{model}.blocks.\1.{name}.\2")
            for part, name in zip(parts, here, strict=True)
        ]
    return tuple(rules)


def _submodel(name: str) -> tuple[str, str, str, str]:
    """Patterns of a sub-model in the paper authors' own ViViT."""
    ends = ("class_token", r"backbone\.position_encoding\.encoding", "layer_norm")
    token, positions, norm = (rf"{name}_model\.{end}" for end in ends)
    return token, positions, norm, rf"{name}_model\.backbone\.blocks"


_TADACONV_VIVIT = _vivit_rules(
    r"backbone\.stem\.conv1",
    r"head\.linear1?",
    ("norm", r"attn\.to_qkv", r"attn\.proj", "norm_ffn", r"ffn\.net\.0", r"ffn\.net\.3"),
    spatial=(
        r"backbone\.cls_token",
        r"backbone\.pos_embd",
        r"backbone\.norm",
        r"backbone\.layers",
    ),
    temporal=(
        r"backbone\.cls_token_out",
        r"backbone\.temp_embd",
        r"backbone\.norm_out",
        r"backbone\.layers_temporal",
    ),
)
_AUTHORS_VIVIT = _vivit_rules(
    r"embedding\.conv",
    "classifier",
    ("input_layer_norm", "qkv", "projection", "mlp_layer_norm", "mlp_1", "mlp_2"),
    spatial=_submodel("spatial"),
    temporal=_submodel("temporal"),
)


KEY_FORMATS: dict[str, KeyFormat] = {
    "detectron2": KeyFormat(
        "vitdet",
        "detectron2's ViTDet: COCO Cascade Mask R-CNN, and the paper's VID Faster R-CNN",
        _DETECTRON_BACKBONE + _DETECTRON_HEADS,
        r"backbone\.net\.patch_embed\.proj\.weight",
        _DETECTRON_CONSTANTS,
    ),
    "transformers": KeyFormat(
        "vitdet-backbone",
        "transformers' VitDetModel and VitDetBackbone",
        _TRANSFORMERS,
        r"(?:backbone\.)?embeddings\.projection\.weight",
    ),
    "vivit": KeyFormat(
        "vivit",
        "ViViT Fact. Enc. of the TAdaConv model zoo: Kinetics-400 and EPIC-Kitchens",
        _TADACONV_VIVIT,
        r"backbone\.stem\.conv1\.weight",
        ((r"head\.linear2\.(weight|bias)", "the noun classifier; the paper predicts verbs"),),
    ),
    "vivit-authors": KeyFormat(
        "vivit",
        "the paper authors' own ViViT, as converted and as fine-tuned: a bare state dict",
        _AUTHORS_VIVIT,
        r"spatial_model\.backbone\.blocks\.\d+\.input_layer_norm\.weight",
    ),
}
# The paper's VID weights came out of detectron2; they differ in the number of box heads.
ALIASES = {"vid": "detectron2"}


def find_key_format(name: str, keys: Mapping[str, Tensor]) -> tuple[str, KeyFormat]:
    """A format by name, or with `auto` by the keys of a file."""
    name = ALIASES.get(name, name)
    if name in KEY_FORMATS:
        return name, KEY_FORMATS[name]
    known = ", ".join([*KEY_FORMATS, *ALIASES])
    if name != "auto":
        raise CheckpointError(f"No format {name!r}; those known: {known}, and auto.")
    for candidate, format in KEY_FORMATS.items():
        if any(re.fullmatch(format.mark, key) for key in keys):
            return candidate, format
    raise CheckpointError(
        f"These keys are of no known format ({known}); the first: {', '.join(list(keys)[:5])}. "
        "A model that you built with eventful.models needs no conversion: write it with "
        "eventful.save_model(model, path)."
    )


Layout, LayoutReport, LAYOUTS = KeyFormat, KeyReport, KEY_FORMATS  # old names
