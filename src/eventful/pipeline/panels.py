"""Frames of a video that shows a run: dense and eventful predictions, updated tokens, plots.

    panels = Panels(names=model.classes, frames=300)
    for ...:
        picture = panels.add(PanelStep(frame, dense=Found(...), eventful=Found(...), ...))
        sink.write(picture)

Three panels are side by side, and under them two plots grow with the video: tokens updated, and
milliseconds of both models. Nothing here knows the model.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from eventful.errors import ConfigError
from eventful.pipeline.pictures import (
    AMBER,
    draw_boxes,
    draw_on,
    from_image,
    mark_updated,
    text_mask,
    to_image,
)
from eventful.pipeline.running_plot import RunningPlot
from eventful.surgery.libraries import load

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Found", "PanelStep", "Panels", "draw_boxes"]

GROUND, INK, FAINT = "#14161c", "#eceef4", "#9aa0b0"
BLUE, GREY = "#5aa9e6", "#b4b8c4"
AMBER_TEXT = "#{:02x}{:02x}{:02x}".format(*AMBER)
AMBER_AREA = "#433a1f"
MARGIN, CAPTION, PLOT = 16, 26, 180
LEAST_WIDTH = 640


@dataclass(frozen=True)
class Found:
    """Boxes of one frame: (n, 4) in pixels of the frame, (n,) classes, (n,) scores."""

    boxes: Tensor
    labels: Tensor
    scores: Tensor | None = None


@dataclass(frozen=True)
class PanelStep:
    """One step of a run, as it is shown.

    Attributes:
        frame: (3, H, W) bytes, all frames of one size.
        dense: what the whole model found; `eventful` what the stream found. None shows the frame
            without boxes.
        updated: (h, w) which tokens were computed; None where it is not known.
        share: of all tokens, how many were computed, from 0 to 1.
        ms: milliseconds of the step; `dense_ms` those of the whole model, where it ran.
        flushed: everything was computed.
    """

    frame: Tensor
    share: float
    ms: float
    dense: Found | None = None
    eventful: Found | None = None
    updated: Tensor | None = None
    dense_ms: float | None = None
    flushed: bool = False


class Panels:
    """Makes the pictures of one video, step by step.

    Args:
        names: of the classes, for the texts of the boxes.
        frames: of the whole video, the width of the plots; None where it is not known, and the
            plots are rescaled as they fill.
        width: of the pictures, in pixels.
        top_ms: upper end of the plot of milliseconds; None to follow the values.
    """

    def __init__(
        self,
        names: Sequence[str] = (),
        *,
        frames: int | None = None,
        width: int = 1280,
        top_ms: float | None = None,
    ) -> None:
        if width < LEAST_WIDTH:
            raise ConfigError(f"Panels need a width of {LEAST_WIDTH} pixels or more, not {width}.")
        self.names = tuple(names)
        self.width = width + width % 2  # H.264 needs even sizes
        self._panel = (self.width - 4 * MARGIN) // 3
        size = ((self.width - 3 * MARGIN) // 2, PLOT)
        self._tokens = RunningPlot(
            size, (AMBER_TEXT,), frames=frames, top=100.0, unit=" %", fill=AMBER_AREA
        )
        self._times = RunningPlot(size, (BLUE, GREY), frames=frames, top=top_ms)
        self._shares: list[float] = []
        self._ms: list[float] = []
        self._both: list[tuple[float, float]] = []

    def add(self, step: PanelStep) -> Tensor:
        """Take a step into the plots, and make its picture: (3, height, width) bytes, even sizes.

        Raises:
            ConfigError: The frame or the mask has another form than described in `PanelStep`.
        """
        small = self._resized(to_image(step.frame))
        self._note(step)
        top = MARGIN + CAPTION
        height = top + small.height + MARGIN + CAPTION + PLOT + MARGIN
        canvas: Image = load("PIL.Image").new("RGB", (self.width, height + height % 2), GROUND)
        scale = small.width / step.frame.shape[2]
        dense_ms = "" if step.dense_ms is None else _ms(step.dense_ms)
        tokens = "all (flush)" if step.flushed else f"{100 * step.share:.0f} %"
        shown = (
            (self._with_boxes(small, step.dense, scale), "dense", dense_ms, GREY),
            (self._with_boxes(small, step.eventful, scale), "eventful", self._speed(step), BLUE),
            (_marked(small, step.updated), "tokens updated", tokens, AMBER_TEXT),
        )
        for place, (picture, name, text, colour) in enumerate(shown):
            left = MARGIN + place * (self._panel + MARGIN)
            _caption(canvas, (left, MARGIN - 2), (name, colour), (text, FAINT))
            canvas.paste(picture, (left, top))
        below = top + small.height + MARGIN
        self._draw_plots(canvas, below)
        return from_image(canvas)

    def _note(self, step: PanelStep) -> None:
        """Take the numbers of a step into the plots."""
        self._shares.append(step.share)
        self._ms.append(step.ms)
        if step.dense_ms is not None:
            self._both.append((step.dense_ms, step.ms))
        self._tokens.add((100 * step.share,))
        self._times.add((step.ms, step.dense_ms))

    def _draw_plots(self, canvas: Image, top: int) -> None:
        right = self.width - MARGIN - self._times.size[0]
        mean = f"mean so far {100 * statistics.fmean(self._shares):.0f} %"
        _caption(canvas, (MARGIN, top), ("tokens updated", AMBER_TEXT), (mean, FAINT))
        canvas.paste(self._tokens.picture(), (MARGIN, top + CAPTION))
        parts = [("milliseconds", INK), ("median so far:", FAINT)]
        parts.append((f"eventful {_ms(statistics.median(self._ms))}", BLUE))
        if self._both:
            dense = statistics.median(dense for dense, _ in self._both)
            parts.append((f"dense {_ms(dense)}", GREY))
        _caption(canvas, (right, top), *parts)
        canvas.paste(self._times.picture(), (right, top + CAPTION))

    def _resized(self, frame: Image) -> Image:
        height = max(1, round(frame.height * self._panel / frame.width))
        return frame.resize((self._panel, height), load("PIL.Image").Resampling.BILINEAR,
                            reducing_gap=2.0)  # fmt: skip

    def _with_boxes(self, frame: Image, found: Found | None, scale: float) -> Image:
        """The frame with boxes drawn at the size of the panel, so that texts stay legible."""
        made = frame.copy()
        if found is not None:
            boxes = found.boxes.detach().cpu() * scale
            draw_on(made, boxes, found.labels, found.scores, self.names)
        return made

    def _speed(self, step: PanelStep) -> str:
        """Milliseconds of the step, and the ratio of the medians so far."""
        if not self._both:
            return _ms(step.ms)
        dense, eventful = (statistics.median(times) for times in zip(*self._both, strict=True))
        return _ms(step.ms) + (f", {dense / eventful:.1f}x as fast so far" if eventful > 0 else "")


def _marked(frame: Image, updated: Tensor | None) -> Image:
    if updated is None:
        return frame
    return mark_updated(frame, updated)


def _caption(canvas: Image, place: tuple[int, int], *parts: tuple[str, str]) -> None:
    """Write texts after each other, each in its colour."""
    for words, ink in parts:
        if words:
            shape = text_mask(words, 15, line=True)
            canvas.paste(ink, place, shape)
            place = place[0] + shape.width + 10, place[1]


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.2g} ms"
