"""What a model says of a frame: objects, labels, a saliency map or features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.errors import UnsupportedError
from eventful.models.vitdet.frames import Detections
from eventful.video.frame import Frame

Kind = Literal["detections", "labels", "saliency", "features"]

BEST = 5  # labels that results hold
_DIGITS = 6  # of numbers in results


@dataclass(frozen=True)
class Prediction:
    """What a model says of one frame, on the CPU. Of the values, one is there.

    Attributes:
        detections: with boxes in pixels of the source's frame.
        tracks: one number per detection, None where it belongs to no track; empty where nothing
            is tracked.
        probabilities: (C,) of the labels; empty while a model of clips waits for a whole clip.
        saliency: (H, W) from 0 to 1, in the size of the source's frame.
        features: (N, D) tokens, or (D,).
    """

    kind: Kind
    detections: Detections | None = None
    tracks: tuple[int | None, ...] = ()
    probabilities: Tensor | None = None
    saliency: Tensor | None = None
    features: Tensor | None = None

    def above(self, score: float) -> Prediction:
        """Without detections of a lower score."""
        if self.detections is None:
            return self
        kept = self.detections.scores >= score
        tracks = tuple(
            track for track, keep in zip(self.tracks, kept.tolist(), strict=False) if keep
        )
        return replace(self, detections=self.detections[kept], tracks=tracks)

    @property
    def found(self) -> int | None:
        """Number of detections; None for a model that makes none."""
        return None if self.detections is None else len(self.detections)

    def best(self, classes: Sequence[str]) -> list[dict[str, Any]]:
        """The most probable labels, best first."""
        values = self.probabilities
        if values is None or not len(values):
            return []
        top = values.topk(min(BEST, len(values)))
        return [
            {"label": name_of(classes, label), "class": label, "score": round(score, _DIGITS)}
            for score, label in zip(top.values.tolist(), top.indices.tolist(), strict=True)
        ]

    def to_dict(self, classes: Sequence[str]) -> dict[str, Any]:
        """As values for JSON, under the name of its kind.

        Of a saliency map: mean, share above a half, and the place of the highest value as (x, y).
        Of features: their shape and the mean over tokens.
        """
        if self.detections is not None:
            return {"detections": self._objects(classes)}
        if self.saliency is not None:
            place = int(self.saliency.argmax())
            width = self.saliency.shape[1]
            return {
                "saliency": {
                    "mean": round(float(self.saliency.mean()), _DIGITS),
                    "share": round(float((self.saliency > 0.5).float().mean()), _DIGITS),
                    "peak": [place % width, place // width],
                }
            }
        if self.features is not None:
            pooled = self.features.reshape(-1, self.features.shape[-1]).float().mean(dim=0)
            mean = [round(value, _DIGITS) for value in pooled.tolist()]
            return {"features": {"shape": list(self.features.shape), "mean": mean}}
        return {"labels": self.best(classes)}

    def arrays(self) -> dict[str, Tensor]:
        """What is too large for text: the map, or all features."""
        if self.saliency is not None:
            return {"saliency": self.saliency}
        return {} if self.features is None else {"features": self.features}

    def _objects(self, classes: Sequence[str]) -> list[dict[str, Any]]:
        found = self.detections
        assert found is not None
        tracks = self.tracks or (None,) * len(found)
        return [
            {
                "box": [round(edge, 2) for edge in box],
                "label": name_of(classes, label),
                "class": label,
                "score": round(score, _DIGITS),
                "track": track,
            }
            for box, label, score, track in zip(
                found.boxes.tolist(),
                found.labels.tolist(),
                found.scores.tolist(),
                tracks,
                strict=True,
            )
        ]


def name_of(classes: Sequence[str], label: int) -> str:
    """The name of a label, `class 3` where it has none."""
    return classes[label] if label < len(classes) else f"class {label}"


def read_output(
    output: Any, frame: Frame, *, labels: bool, classes: int | None = None
) -> Prediction:
    """What a model's output says, judged by its form.

    Args:
        frame: what the model saw; says where the source's picture lies in it.
        labels: a tensor (1, C) holds scores of labels, not features.
        classes: how many the model knows; None where that is not known.

    Raises:
        UnsupportedError: the output has none of the known forms.
    """
    if isinstance(output, Mapping) and {"pred_boxes", "logits"} <= output.keys():
        found = _from_queries(output["logits"][0], output["pred_boxes"][0], frame, classes)
        return Prediction("detections", detections=found)
    if isinstance(output, Mapping):
        for name in ("logits", "last_hidden_state", "x_norm_patchtokens"):
            if isinstance(output.get(name), Tensor):
                return read_output(output[name], frame, labels=name == "logits")
        if (first := _first_map(output)) is not None:  # depth, masks, or what else the model makes
            return Prediction("features", features=first)
    if isinstance(output, Sequence) and len(output) == 1:
        return Prediction("detections", detections=_from_list(output[0], frame))
    if isinstance(output, Tensor) and output.is_floating_point() and len(output) == 1:
        values = output[0].detach().float().cpu()
        if values.dim() == 3 and values.shape[0] == 1:
            return Prediction("saliency", saliency=_on_picture(values[0], frame))
        if values.dim() == 3:
            return Prediction("features", features=values.flatten(1).T.contiguous())
        if values.dim() == 1 and labels:
            return Prediction("labels", probabilities=values.softmax(dim=0))
        if values.dim() in (1, 2):
            return Prediction("features", features=values)
    raise UnsupportedError(
        f"The model returns {_describe(output)}. It can be run if it returns for one frame: scores "
        "(1, C), tokens (1, N, D), a map (1, D, h, w) or (1, 1, H, W), detections of transformers, "
        "or a list with one dict of boxes, scores and labels."
    )


def _first_map(output: Mapping[str, Any]) -> Tensor | None:
    """The first tensor of real numbers of an output with other names, for its one frame."""
    for value in output.values():
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2:
            found = value[0].detach().float().cpu()
            return found if found.dim() == 2 else found.flatten(1).T.contiguous()
    return None


def _from_queries(logits: Tensor, boxes: Tensor, frame: Frame, classes: int | None) -> Detections:
    """Detections of DETR's kind; boxes are centres and sizes in shares of the frame.

    DETR and YOLOS have a last class for "none". Deformable DETR, RT-DETR and others have none, and
    a score for each class.
    """
    if logits.shape[-1] == classes:
        chances = logits.float().sigmoid()
    else:
        chances = logits.float().softmax(dim=-1)[:, :-1]
    scores, labels = chances.max(dim=-1)
    centre, size = boxes[:, :2].float(), boxes[:, 2:].float()
    height, width = frame.shape[-2:]
    corners = torch.cat([centre - size / 2, centre + size / 2], dim=-1)
    corners = corners * corners.new_tensor([width, height] * 2)
    return _sorted(Detections(frame.to_original(corners), scores, labels))


def _from_list(found: Any, frame: Frame) -> Detections:
    """Detections of a ViTDet, or of torchvision's kind, in pixels of the frame."""
    if isinstance(found, Mapping):
        found = Detections(found["boxes"], found["scores"], found["labels"])
    if not isinstance(found, Detections):
        raise UnsupportedError(f"The model returns a list of {_describe(found)}, not detections.")
    return _sorted(Detections(frame.to_original(found.boxes), found.scores, found.labels))


def _sorted(found: Detections) -> Detections:
    """On the CPU, best first."""
    flat = Detections(found.boxes.detach(), found.scores.detach(), found.labels).boxes_on_cpu()
    return flat[flat.scores.argsort(descending=True, stable=True)]


def _on_picture(values: Tensor, frame: Frame) -> Tensor:
    """A map (H, W) of the frame as one of the source's picture."""
    region = frame.region
    rows = slice(max(0, round(region.top)), round(region.top + region.height))
    columns = slice(max(0, round(region.left)), round(region.left + region.width))
    part = values[rows, columns][None, None]
    whole = F.interpolate(part, frame.original_size, mode="bilinear", align_corners=False)
    return whole[0, 0].clamp(0, 1)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    return f"a {type(value).__name__}"
