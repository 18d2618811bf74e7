"""A plot that grows by one value a frame and is quick to draw again."""

from __future__ import annotations

import math
from bisect import insort
from typing import TYPE_CHECKING, Any

from eventful.pipeline.pictures import font_of
from eventful.surgery.libraries import load

if TYPE_CHECKING:
    from PIL.Image import Image

GROUND, GRID, TEXT = "#1d2029", "#333845", "#9aa0b0"
FINE = 2  # lines are drawn at twice the size, because Pillow's are not antialiased
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 22
FIRST = 64  # frames that fit at first where the length of the video is not known


class RunningPlot:
    """Lines over the frames of a video.

    A new value draws one short line. Everything is drawn again only if an axis changes.

    Args:
        size: (width, height) in pixels.
        colours: of the lines, one each.
        frames: of the whole video; None where it is not known, and the axis doubles as it fills.
        top: upper end of the axis; None to follow the values, without single outliers.
        unit: follows the numbers on the axis.
        fill: colour of the area under the lines; "" for none.
    """

    def __init__(
        self,
        size: tuple[int, int],
        colours: tuple[str, ...],
        *,
        frames: int | None = None,
        top: float | None = None,
        unit: str = "",
        fill: str = "",
    ) -> None:
        self.size, self.unit, self._fill = size, unit, fill
        self._colours = colours
        self._capacity = FIRST if frames is None else max(frames, 2)
        self._fixed = top is not None
        self._top = 1.0 if top is None else max(top, 1e-9)
        self._values: list[tuple[float | None, ...]] = []
        self._known: list[float] = []  # all values, in order of size
        self._canvas: Image | None = None

    def add(self, values: tuple[float | None, ...]) -> None:
        """Append one value for each line; None, NaN and infinity leave a gap."""
        self._values.append(
            tuple(v if v is not None and math.isfinite(v) else None for v in values)
        )
        for value in self._values[-1]:
            if value is not None:
                insort(self._known, value)
        if self._rescaled() or self._canvas is None:
            self._canvas = None
        else:
            self._draw_from(len(self._values) - 1)

    def picture(self) -> Image:
        """The plot as it is now."""
        if self._canvas is None:
            self._canvas = self._empty()
            self._draw_from(0)
        made = self._canvas.reduce(FINE)
        self._mark_newest(load("PIL.ImageDraw").Draw(made))
        return made

    def _rescaled(self) -> bool:
        """Fit the axes to the values; whether one has changed."""
        before = self._capacity, self._top
        while len(self._values) > self._capacity:
            self._capacity *= 2
        if not self._fixed and self._known:
            # The first step of a model often takes many times as long as the others.
            dropped = max(1, len(self._known) // 50) if len(self._known) > 4 else 0
            needed = 1.2 * self._known[-1 - dropped]
            if needed > self._top or needed < 0.45 * self._top:
                self._top = round_up(needed)
        return before != (self._capacity, self._top)

    def _empty(self) -> Image:
        width, height = (FINE * side for side in self.size)
        canvas: Image = load("PIL.Image").new("RGB", (width, height), GROUND)
        draw = load("PIL.ImageDraw").Draw(canvas)
        for part in range(5):
            y = self._y(self._top * part / 4)
            draw.line((FINE * LEFT, y, width - FINE * RIGHT, y), fill=GRID, width=FINE)
        self._write_texts(draw)
        return canvas

    def _draw_from(self, start: int) -> None:
        """Draw all values from `start` on, each with the way to it from the value ahead of it.

        Frame after frame, so that a plot drawn again is the same as one that has grown.
        """
        draw = load("PIL.ImageDraw").Draw(self._canvas)
        for place in range(start, len(self._values)):
            # The first line is the subject of the plot, so it is drawn over the others.
            for line in reversed(range(len(self._colours))):
                now = self._point(place, line)
                before = self._point(place - 1, line) if place else None
                if now is not None:
                    self._stroke(draw, before or now, now, self._colours[line])

    def _point(self, place: int, line: int) -> tuple[float, float] | None:
        value = self._values[place][line]
        return None if value is None else (self._x(place), self._y(value))

    def _stroke(
        self, draw: Any, before: tuple[float, float], now: tuple[float, float], colour: str
    ) -> None:
        left, right = before[0], now[0]
        if self._fill and left < right:
            floor = self._y(0.0)
            draw.polygon([before, now, (right, floor), (left, floor)], fill=self._fill)
        draw.line([before, now], fill=colour, width=2 * FINE)
        for x, y in (before, now):  # round ends, which the next area may have covered
            draw.ellipse((x - FINE, y - FINE, x + FINE - 1, y + FINE - 1), fill=colour)

    def _mark_newest(self, draw: Any) -> None:
        """A dot at the end of each line."""
        if not self._values:
            return
        x = self._x(len(self._values) - 1) / FINE
        for line in reversed(range(len(self._colours))):
            value = self._values[-1][line]
            if value is not None:
                y = self._y(value) / FINE
                draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=self._colours[line])

    def _write_texts(self, draw: Any) -> None:
        font = font_of(12 * FINE)
        for part in (0, 2, 4):
            value = self._top * part / 4
            text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            place = FINE * (LEFT - 6), self._y(value)
            draw.text(place, text + self.unit, fill=TEXT, font=font, anchor="rm")
        low, right = FINE * (self.size[1] - BOTTOM + 5), FINE * (self.size[0] - RIGHT)
        draw.text((FINE * LEFT, low), "frame 0", fill=TEXT, font=font)
        draw.text((right, low), f"{self._capacity - 1:,}", fill=TEXT, font=font, anchor="ra")

    def _x(self, place: int) -> float:
        across = self.size[0] - LEFT - RIGHT
        return FINE * (LEFT + across * place / max(self._capacity - 1, 1))

    def _y(self, value: float) -> float:
        """Values above the axis are drawn at its upper end."""
        down = self.size[1] - TOP - BOTTOM
        share = min(max(value / self._top, 0.0), 1.0)
        return FINE * (TOP + down * (1 - share))


def round_up(value: float) -> float:
    """The next number of the form 1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6 or 8 times a power of ten."""
    if not value > 0 or not math.isfinite(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    steps = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)
    return next(step for step in steps if value <= step * power * (1 + 1e-9)) * power
