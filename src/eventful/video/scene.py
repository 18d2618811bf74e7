"""Scenes of a video of updates: frame, prediction, error and mask over a strip of costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.cost.units import in_words
from eventful.models.vitdet.frames import Detections
from eventful.rules.record import StepRecord
from eventful.surgery.libraries import load
from eventful.video.overlay import UpdateView, heat_picture, image, mask_picture

GROUND, INK, FAINT, AMBER, BLUE = "#14161c", "#eceef4", "#8b90a0", "#ffbf1a", "#5aa9e6"
MARGIN, CAPTION, STRIP = 16, 26, 96
PALETTE = (
    "#ff7b72", "#5eb3f7", "#5fd38a", "#ffd43b", "#d08bf5", "#ff9f4a", "#3ccfcf", "#f58bb8",
    "#b5d84c", "#8fa4ff", "#e0b07a", "#7fe0c3", "#ff8f9f", "#c9c94a", "#a7c7e7", "#e59bff",
    "#8fd460", "#ffb3a0", "#63c5ea", "#d7b9ff",
)  # fmt: skip


@dataclass(frozen=True)
class UpdateStep:
    """One step of a video, as it is shown.

    Attributes:
        view: the frame and what the chosen gate did.
        prediction: (3, H, W) in [0, 1], the model's prediction as a picture.
        updated: tokens the gate let through.
        flush: everything was computed.
        budget: the budget in force, in words; '' for none.
        ms: milliseconds of the step.
    """

    index: int
    view: UpdateView
    prediction: Tensor
    updated: int
    tokens: int
    macs: int
    dense_macs: int
    flush: bool
    budget: str = ""
    ms: float = 0.0

    @classmethod
    def of(
        cls, index: int, view: UpdateView, prediction: Tensor, record: StepRecord, gate: str,
        *, budget: str = "",
    ) -> UpdateStep:  # fmt: skip
        """What a record says of one gate."""
        return cls(
            index=index,
            view=view,
            prediction=prediction,
            updated=int(record.gates[gate].counts[0]),
            tokens=next(iter(record.layouts.values())).tokens,
            macs=record.macs,
            dense_macs=record.dense_macs,
            flush=record.flushed[0],
            budget=budget,
            ms=record.ms,
        )


def with_boxes(frame: Tensor, found: Detections, texts: Sequence[str]) -> Tensor:
    """A frame (3, H, W) in [0, 1] with boxes and their texts drawn into it.

    Args:
        found: boxes in pixels of the frame; the label chooses the colour.
        texts: one per box; '' for none.
    """
    canvas = image(frame)
    draw = load("PIL.ImageDraw").Draw(canvas)
    thick = max(2, round(min(frame.shape[-2:]) / 220))
    font = font_of(max(11, round(min(frame.shape[-2:]) / 32)))
    for box, label, text in zip(found.boxes.tolist(), found.labels.tolist(), texts, strict=True):
        colour = PALETTE[label % len(PALETTE)]
        draw.rectangle(tuple(box), outline=colour, width=thick)
        if not text:
            continue
        x, y = box[:2]
        left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
        width, height = right - left + 8, bottom - top + 6
        y = y - height if y >= height else y
        draw.rectangle((x, y, x + width, y + height), fill=colour)
        draw.text((x + 4 - left, y + 3 - top), text, fill=GROUND, font=font)
    return from_image(canvas)


def scene(
    steps: Sequence[UpdateStep],
    current: int,
    brightest: float,
    *,
    width: int,
    gate: str,
    prediction: str = "prediction",
) -> Tensor:
    """The picture (3, H, W) of one step.

    Args:
        steps: of the whole video, for the strip of costs.
        brightest: the error that is shown lightest.
        width: of each of the four panels, in pixels.
        prediction: caption of the second panel.
    """
    step = steps[current]
    panels = [
        (step.view.frame, "frame"),
        (step.prediction, prediction),
        (heat_picture(step.view, brightest), f"error, gate {gate}"),
        (mask_picture(step.view), _caption(step)),
    ]
    height = round(width * step.view.frame.shape[1] / step.view.frame.shape[2])
    across, down = width + MARGIN, height + CAPTION + MARGIN
    total = (MARGIN + 2 * across, 2 * MARGIN + 2 * down + STRIP)
    canvas = load("PIL.Image").new("RGB", total, GROUND)
    draw = load("PIL.ImageDraw").Draw(canvas)
    for i, (picture, caption) in enumerate(panels):
        left, top = MARGIN + i % 2 * across, MARGIN + i // 2 * down
        draw.text((left, top - 2), caption, fill=INK, font=font_of(15))
        canvas.paste(image(_resized(picture, height, width)), (left, top + CAPTION))
    box = (MARGIN, MARGIN + 2 * down, total[0] - MARGIN, total[1] - MARGIN)
    _strip(draw, steps, current, box)
    return from_image(canvas)


def _caption(step: UpdateStep) -> str:
    if step.flush:
        return "flush: every token computed"
    return f"{step.updated} of {step.tokens} tokens updated"


def _strip(
    draw: Any, steps: Sequence[UpdateStep], current: int, box: tuple[int, int, int, int]
) -> None:
    """Operations of each frame as bars; frames still to come in a darker colour."""
    left, top, right, bottom = box
    top += 20
    highest = max(max(step.macs, step.dense_macs) for step in steps)
    slot = (right - left) / len(steps)
    now = steps[current]
    saving = now.dense_macs / max(now.macs, 1)
    text = f"frame {now.index}: {in_words(now.macs)}"
    text += "" if now.flush else f", {saving:.1f}x less than dense"
    draw.text((left, top - 22), text, fill=FAINT, font=font_of(13))
    draw.rectangle((left, top, right, bottom), fill="#1d2029")
    for t, step in enumerate(steps[: current + 1]):
        x = left + t * slot
        y = bottom - (bottom - top) * step.macs / highest
        colour = AMBER if t == current else FAINT if step.flush else BLUE
        draw.rectangle((x, y, x + max(slot - (1 if slot > 3 else 0), 1), bottom), fill=colour)


def _resized(picture: Tensor, height: int, width: int) -> Tensor:
    if picture.shape[-2:] == (height, width):
        return picture
    return F.interpolate(picture[None], (height, width), mode="bilinear", antialias=True)[0]


def from_image(canvas: Any) -> Tensor:
    """A Pillow image as (3, H, W) in [0, 1]."""
    return torch.from_numpy(np.array(canvas.convert("RGB"))).permute(2, 0, 1).float() / 255


def font_of(size: int) -> Any:
    """The font of all pictures."""
    return load("PIL.ImageFont").load_default(size=size)
