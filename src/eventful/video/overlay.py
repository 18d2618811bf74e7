"""Pictures of updates (the paper's last figure): frame, error and mask, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.adapters import libraries
from eventful.layout import TokenLayout
from eventful.step import StepRecord

if TYPE_CHECKING:
    from PIL.Image import Image

GAP = 6  # pixels between the tiles of a sheet


@dataclass(frozen=True)
class UpdateView:
    """One frame with what its first gate saw.

    Attributes:
        frame: (3, H, W) in [0, 1].
        error: (h, w) error norms of the patch tokens; zeros on a flush.
        mask: (h, w) tokens updated.
    """

    frame: Tensor
    error: Tensor
    mask: Tensor

    @classmethod
    def of(cls, frame: Tensor, record: StepRecord) -> UpdateView:
        """From one frame (1, 3, H, W) and the record of a stream with `maps=True`."""
        layout = next(iter(record.layouts.values()))
        mask = record.mask
        if mask is None:
            raise ValueError("The record holds no maps; make the stream with maps=True.")
        error = torch.zeros(mask.shape) if record.error is None else record.error.float().cpu()
        return cls(frame[0].cpu(), _grid(error[0], layout), _grid(mask[0].cpu(), layout))


def _grid(values: Tensor, layout: TokenLayout) -> Tensor:
    patches = values[layout.prefix : layout.tokens - layout.suffix]
    return patches.unflatten(0, layout.grid)


def contact_sheet(views: Sequence[UpdateView], path: str | Path) -> None:
    """Write a picture with a column per frame: the frame, its error, the tokens updated."""
    tiles = [_column(view, max(float(v.error.max()) for v in views)) for view in views]
    gap = torch.ones(3, tiles[0].shape[1], GAP)
    sheet = torch.cat([part for tile in tiles for part in (tile, gap)][:-1], dim=2)
    image(sheet).quantize(256).save(str(path), optimize=True)


def _column(view: UpdateView, brightest: float) -> Tensor:
    size = view.frame.shape[-2:]
    error = _heat(_enlarge(view.error / max(brightest, 1e-12), size))
    mask = _enlarge(view.mask.float(), size)
    shown = view.frame * (0.25 + 0.75 * mask)
    edge = _edges(mask)
    shown = torch.where(edge > 0, torch.tensor([1.0, 0.75, 0.1])[:, None, None], shown)
    gap = torch.ones(3, GAP, size[1])
    return torch.cat([view.frame, gap, error, gap, shown], dim=1)


def _enlarge(grid: Tensor, size: tuple[int, int] | torch.Size) -> Tensor:
    return F.interpolate(grid[None, None].float(), tuple(size), mode="nearest")[0, 0]


def _heat(level: Tensor) -> Tensor:
    """Black through purple and orange to white, (3, H, W)."""
    stops = torch.tensor([[0, 0, 0.02], [0.35, 0.07, 0.43], [0.85, 0.32, 0.2], [1, 0.98, 0.75]])
    place = level.clamp(0, 1) * (len(stops) - 1)
    low = place.floor().long().clamp(max=len(stops) - 2)
    blend = (place - low)[..., None]
    return (stops[low] * (1 - blend) + stops[low + 1] * blend).permute(2, 0, 1)


def _edges(mask: Tensor) -> Tensor:
    """A one-pixel line inside the border of each region."""
    inner = -F.max_pool2d(-mask[None, None], 3, stride=1, padding=1)[0, 0]
    return mask - inner


def image(picture: Tensor) -> Image:
    """A Pillow image of (3, H, W) in [0, 1]."""
    pillow = libraries.load("PIL.Image")
    pixels = (picture.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
    made: Image = pillow.fromarray(pixels.numpy())
    return made
