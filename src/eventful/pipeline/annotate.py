"""Predictions drawn on pictures: boxes by `supervision`, heat, labels, updated tokens."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.models.vitdet.frames import Detections
from eventful.pipeline.predictions import Prediction, name_of
from eventful.rules.record import StepRecord
from eventful.surgery.libraries import load
from eventful.tokens.layout import TokenLayout
from eventful.video.frame import Frame
from eventful.video.overlay import heat_colours, outlined, patch_grid
from eventful.video.scene import PALETTE, font_of

if TYPE_CHECKING:
    import supervision

INK, GROUND = (236, 238, 244), (20, 22, 28)
_LEAST_SIDE = 360  # pictures with a smaller side are enlarged, so that labels can be read
_HEAT = 0.85  # share of the heat where it is highest


def as_supervision(
    detections: Detections,
    classes: Sequence[str] = (),
    tracks: Sequence[int | None] = (),
) -> supervision.Detections:
    """Detections as those of the library `supervision`, for its annotators, zones and counters.

    Args:
        classes: names of the labels, which become `data["class_name"]`.
        tracks: one number per detection, None (-1 there) where it belongs to no track.

    Raises:
        MissingDependencyError: supervision is not installed.
    """
    sv = _supervision()
    labels = detections.labels.cpu().numpy().astype(int)
    ids = None
    if len(tracks):
        ids = np.array([-1 if track is None else track for track in tracks], int)
    names = np.array([name_of(classes, label) for label in labels.tolist()], dtype=object)
    made: supervision.Detections = sv.Detections(
        xyxy=detections.boxes.detach().cpu().numpy().astype(np.float32).reshape(-1, 4),
        confidence=detections.scores.detach().cpu().numpy().astype(np.float32),
        class_id=labels,
        tracker_id=ids,
        data={"class_name": names},
    )
    return made


def draw(
    picture: Tensor, prediction: Prediction, classes: Sequence[str], updated: Tensor | None = None
) -> Tensor:
    """A picture (3, H, W) uint8 with a prediction drawn on it, perhaps larger than before.

    Args:
        updated: (H, W) pixels of tokens that were computed, shown for features.
    """
    factor = max(1, -(-_LEAST_SIDE // min(picture.shape[1:])))
    if factor > 1:
        picture = F.interpolate(picture[None], scale_factor=factor, mode="bilinear")[0]
    if prediction.detections is not None:
        return with_detections(picture, prediction, classes, factor)
    if prediction.saliency is not None:
        return with_heat(picture, prediction.saliency)
    if prediction.features is not None:
        return picture if updated is None else with_updates(picture, updated)
    best = prediction.best(classes)[:3]
    lines = [f"{entry['label']} {entry['score']:.0%}" for entry in best]
    return with_text(picture, lines or ["waiting for a whole clip"], bottom=True)


def with_detections(
    picture: Tensor, prediction: Prediction, classes: Sequence[str], factor: int = 1
) -> Tensor:
    """A picture (3, H, W) uint8 with boxes, coloured by class, and their labels.

    Args:
        factor: how many times larger the picture is than the frame that the boxes are for.
    """
    found = prediction.detections
    assert found is not None
    if not len(found):
        return picture
    scaled = Detections(found.boxes * factor, found.scores, found.labels)
    given = as_supervision(scaled, classes, prediction.tracks)
    boxes, labels = _annotators(min(picture.shape[1:]))
    tracks = prediction.tracks or (None,) * len(found)
    texts = [
        f"{name} {score:.0%}" if track is None else f"#{track} {name} {score:.0%}"
        for name, score, track in zip(
            given.data["class_name"], found.scores.tolist(), tracks, strict=True
        )
    ]
    # The best last, so that their labels are on top.
    order = np.arange(len(found))[::-1]
    canvas = np.ascontiguousarray(picture.permute(1, 2, 0).numpy()[..., ::-1])  # annotators use BGR
    lookup = found.labels.numpy() % len(PALETTE)
    canvas = boxes.annotate(canvas, given[order], custom_color_lookup=lookup[order])
    canvas = labels.annotate(
        canvas, given[order], labels=[texts[i] for i in order], custom_color_lookup=lookup[order]
    )
    return torch.from_numpy(np.ascontiguousarray(canvas[..., ::-1])).permute(2, 0, 1)


@cache
def _annotators(side: int) -> tuple[Any, Any]:
    """For boxes and labels, in a size that fits pictures with this shorter side."""
    sv = _supervision()
    colours = sv.ColorPalette.from_hex(list(PALETTE))
    scale = min(1.2, max(0.38, side / 1100))
    boxes = sv.BoxAnnotator(color=colours, thickness=max(1, round(side / 320)))
    labels = sv.LabelAnnotator(
        color=colours,
        text_color=sv.Color(*GROUND),  # every colour of the palette is light
        text_scale=scale,
        text_thickness=max(1, round(scale * 1.5)),
        text_padding=max(2, round(scale * 7)),
        smart_position=True,
    )
    return boxes, labels


@cache
def _supervision() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that OpenCV is missing, which is not needed
        return load("supervision")


def with_heat(picture: Tensor, saliency: Tensor) -> Tensor:
    """A picture (3, H, W) uint8 with a map (h, w) from 0 to 1 over it as colours."""
    size = (int(picture.shape[1]), int(picture.shape[2]))
    level = F.interpolate(saliency[None, None], size, mode="bilinear", align_corners=False)[0, 0]
    share = _HEAT * level.clamp(0, 1)
    mixed = picture.float() * (1 - share) + 255 * heat_colours(level) * share
    return mixed.round().to(torch.uint8)


def with_updates(picture: Tensor, updated: Tensor) -> Tensor:
    """A picture (3, H, W) uint8, pale where tokens (h, w) were not computed, outlined between."""
    size = (int(picture.shape[1]), int(picture.shape[2]))
    mask = F.interpolate(updated[None, None].float(), size, mode="nearest")[0, 0]
    return (outlined(picture.float() / 255, mask) * 255).round().to(torch.uint8)


def with_text(picture: Tensor, lines: Sequence[str], *, bottom: bool = False) -> Tensor:
    """A picture (3, H, W) uint8 with lines of text in a corner at the left."""
    pillow, drawing = load("PIL.Image"), load("PIL.ImageDraw")
    canvas = pillow.fromarray(picture.permute(1, 2, 0).contiguous().numpy())
    draw = drawing.Draw(canvas, "RGBA")
    size = max(12, round(min(picture.shape[1:]) / 30))
    font, pad = font_of(size), size // 3
    text = "\n".join(lines)
    _, _, right, low = draw.multiline_textbbox((0, 0), text, font=font)
    width, height = right + 2 * pad, low + 2 * pad
    top = picture.shape[1] - height if bottom else 0
    draw.rectangle((0, top, width, top + height), fill=(*GROUND, 190))
    draw.multiline_text((pad, top + pad), text, fill=INK, font=font)
    return torch.from_numpy(np.array(canvas)).permute(2, 0, 1)


def updated_tokens(record: StepRecord | None, frame: Frame) -> Tensor | None:
    """(h, w) which tokens of a picture were computed, of a stream with maps; None if not known.

    What lies in the padding of the frame is cut off.
    """
    if record is None or record.mask is None:
        return None
    return grid_of_picture(record.mask[0].cpu(), next(iter(record.layouts.values())), frame)


def grid_of_picture(values: Tensor, layout: TokenLayout, frame: Frame) -> Tensor:
    """Values (N,) of tokens as (h, w), of those that the picture covers."""
    grid, region = patch_grid(values, layout), frame.region
    sizes = zip(
        (region.top, region.left), (region.height, region.width), frame.shape[-2:], layout.grid,
        strict=True,
    )  # fmt: skip
    rows, columns = (
        slice(
            max(0, round(start * count / edge)),
            max(1, round((start + length) * count / edge)),
        )
        for start, length, edge, count in sizes
    )
    return grid[rows, columns]
