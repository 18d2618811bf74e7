"""Pictures of one frame: boxes drawn on it, and the tokens that were updated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eventful.errors import ConfigError
from eventful.surgery.libraries import load
from eventful.video.scene import PALETTE

if TYPE_CHECKING:
    from PIL.Image import Image

Rect = tuple[float, float, float, float]

AMBER = (255, 191, 26)
DIM = 0.45  # brightness of tokens that were not updated
# Light enough for dark text on them; neighbours differ in hue.
_TEXT = "#12141a"


def draw_boxes(
    picture: Tensor, boxes: Tensor, labels: Tensor, scores: Tensor | None, names: Sequence[str]
) -> Tensor:
    """A frame with boxes drawn on it; the frame itself is not changed.

    Args:
        picture: (3, H, W) bytes.
        boxes: (n, 4) as x1, y1, x2, y2 in pixels.
        labels: (n,) classes, from 0; they choose the colour.
        scores: (n,) from 0 to 1; None to leave them out.
        names: of the classes; a class without a name is shown as its number.
    """
    canvas = to_image(picture)
    draw_on(canvas, boxes, labels, scores, names)
    return from_image(canvas)


def draw_on(
    canvas: Image, boxes: Tensor, labels: Tensor, scores: Tensor | None, names: Sequence[str]
) -> None:
    """Draw boxes into a Pillow image; arguments as in `draw_boxes`."""
    draw = load("PIL.ImageDraw").Draw(canvas)
    short = min(canvas.size)
    thick, size = max(2, round(short / 240)), max(11, round(short / 24))
    given = [None] * len(boxes) if scores is None else scores.tolist()
    rows = list(zip(boxes.tolist(), labels.tolist(), given, strict=True))
    for box, label, _ in rows:
        if _drawable(box):
            draw.rectangle(_rounded(box), outline=PALETTE[label % len(PALETTE)], width=thick)
    # Texts come after all boxes, so that no line crosses them.
    taken: list[Rect] = []
    for box, label, score in rows:
        if not _drawable(box):
            continue
        name = names[label] if 0 <= label < len(names) else str(label)
        text = name if score is None else f"{name} {score:.2f}"
        shape = text_mask(text, size)
        place = _place_text(_rounded(box), (shape.width + 6, shape.height + 6), canvas.size, taken)
        taken.append(place)
        draw.rectangle(place, fill=PALETTE[label % len(PALETTE)])
        canvas.paste(_TEXT, (round(place[0]) + 3, round(place[1]) + 3), shape)


def _drawable(box: Sequence[float]) -> bool:
    return all(np.isfinite(box)) and box[2] >= box[0] and box[3] >= box[1]


def _rounded(box: Sequence[float]) -> Rect:
    x1, y1, x2, y2 = (round(value) for value in box)
    return x1, y1, x2, y2


def _place_text(
    box: Rect, size: tuple[float, float], canvas: tuple[int, int], taken: list[Rect]
) -> Rect:
    """Where a text goes: above its box, in it or below it, the first place that is free."""
    width, height = size
    x = max(0, min(box[0], canvas[0] - width - 1))
    inside = [y for y in (box[1] - height, box[1], box[3], box[3] - height) if y >= 0]
    places = [(x, y, x + width, y + height) for y in inside if y + height < canvas[1]]
    free = (place for place in places if not any(_overlap(place, other) for other in taken))
    above = max(0, min(box[1] - height, canvas[1] - height - 1))
    return next(free, (x, above, x + width, above + height))


def _overlap(one: Rect, other: Rect) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def show_updated(picture: Tensor, updated: Tensor, dim: float = DIM) -> Tensor:
    """A frame with the updated tokens as they are, outlined, and the others darker.

    Args:
        picture: (3, H, W) bytes.
        updated: (h, w) true or false; the grid is stretched over the frame.
        dim: brightness of the other tokens, from 0 to 1.
    """
    return from_image(mark_updated(to_image(picture), updated, dim))


def mark_updated(frame: Image, updated: Tensor, dim: float = DIM) -> Image:
    """The same for a Pillow image; see `show_updated`."""
    grid = updated.detach().cpu().numpy().astype(bool)
    if grid.ndim != 2 or not grid.size:
        raise ConfigError(f"The mask of updated tokens must be (h, w), not {grid.shape}.")
    width, height = frame.size
    rows = np.arange(height) * grid.shape[0] // height
    columns = np.arange(width) * grid.shape[1] // width
    mask = grid[rows[:, None], columns]
    edge = np.zeros_like(mask)
    edge[:, 1:] |= mask[:, 1:] & ~mask[:, :-1]
    edge[:, :-1] |= mask[:, :-1] & ~mask[:, 1:]
    edge[1:] |= mask[1:] & ~mask[:-1]
    edge[:-1] |= mask[:-1] & ~mask[1:]
    pillow = load("PIL.Image")
    made: Image = pillow.blend(pillow.new("RGB", frame.size), frame, dim)
    for part, colours in ((mask, frame), (edge, AMBER)):
        made.paste(colours, (0, 0, width, height), _stencil(part))
    return made


def _stencil(mask: NDArray[np.bool_]) -> Image:
    made: Image = load("PIL.Image").fromarray(mask.astype(np.uint8) * 255)
    return made


def to_pixels(picture: Tensor) -> NDArray[np.uint8]:
    """(H, W, 3) bytes from a picture (3, H, W).

    Raises:
        ConfigError: It is not (3, H, W), or not bytes.
    """
    if picture.ndim != 3 or picture.shape[0] != 3 or picture.dtype != torch.uint8:
        raise ConfigError(
            f"A picture must be (3, H, W) in torch.uint8, not {tuple(picture.shape)} in "
            f"{picture.dtype}. Values from 0 to 1: (picture * 255).round().to(torch.uint8)."
        )
    made: NDArray[np.uint8] = picture.detach().permute(1, 2, 0).cpu().contiguous().numpy()
    return made


def to_image(picture: Tensor) -> Image:
    """A Pillow image of a picture (3, H, W) in bytes."""
    made: Image = load("PIL.Image").fromarray(to_pixels(picture))
    return made


def from_image(canvas: Image) -> Tensor:
    """A Pillow image (RGB) as a picture (3, H, W) in bytes."""
    return torch.from_numpy(np.array(canvas)).permute(2, 0, 1)


@lru_cache(maxsize=1024)
def text_mask(text: str, size: int, *, line: bool = False) -> Image:
    """A text as a mask to paste a colour through; kept, because videos repeat their texts.

    Args:
        line: as high as a line, so that texts beside each other are level; else as the text.
    """
    font = font_of(size)
    left, top, right, bottom = (round(side) for side in font.getbbox(text or " "))
    if line:
        ascent, descent = font.getmetrics()
        top, bottom = 0, ascent + descent
    made: Image = load("PIL.Image").new("L", (max(right - left, 1), max(bottom - top, 1)))
    load("PIL.ImageDraw").Draw(made).text((-left, -top), text, fill=255, font=font)
    return made


@lru_cache(maxsize=32)
def font_of(size: int) -> Any:
    """Pillow's own font, which needs no file of the system."""
    return load("PIL.ImageFont").load_default(size=size)
