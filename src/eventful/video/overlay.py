"""Pictures of updates (the paper's last figure): frame, error and mask, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.errors import ConfigError
from eventful.rules.record import StepRecord
from eventful.surgery import libraries
from eventful.tokens.layout import TokenLayout

if TYPE_CHECKING:
    from PIL.Image import Image

GAP = 6  # pixels between the tiles of a sheet
PALE = 0.4  # how light a black token that was not updated is shown
OUTLINE = (0.9, 0.25, 0.05)  # of updated tokens


@dataclass(frozen=True)
class UpdateView:
    """One frame with the error and mask of one gate.

    Attributes:
        frame: (3, H, W) in [0, 1].
        error: (h, w) error norms of the patch tokens; zeros on a flush.
        mask: (h, w) tokens updated.
    """

    frame: Tensor
    error: Tensor
    mask: Tensor

    @classmethod
    def of(cls, frame: Tensor, record: StepRecord, gate: str | None = None) -> UpdateView:
        """From one frame (1, 3, H, W) and the record of a stream with `maps=True`.

        Args:
            gate: full name of the gate to show; None for the first.
        """
        layout = next(iter(record.layouts.values()))
        seen = record.gates[find_gate(record, gate)]
        if seen.mask is None:
            raise ValueError("The record holds no maps; make the stream with maps=True.")
        error = torch.zeros(seen.mask.shape) if seen.error is None else seen.error.float().cpu()
        return cls(
            frame[0].cpu(), patch_grid(error[0], layout), patch_grid(seen.mask[0].cpu(), layout)
        )

    def cut(self, rows: int, columns: int) -> UpdateView:
        """The same without what lies beyond so many rows and columns of tokens: the padding."""
        return replace(self, error=self.error[:rows, :columns], mask=self.mask[:rows, :columns])


def find_gate(record: StepRecord, name: str | None) -> str:
    """The full name of a gate from its end (`2.qkv`); the first gate where no name is given."""
    names = list(record.gates)
    if name is None:
        return names[0]
    found = [full for full in names if full == name] or [
        full for full in names if f".{full}".endswith(f".{name}")
    ]
    if len(found) != 1:
        shown = ", ".join(names[:7]) + (", ..." if len(names) > 7 else "")
        problem = "several gates" if found else "no gate"
        raise ConfigError(f"There is {problem} {name!r}; the gates are {shown}.")
    return found[0]


def paper_gate(record: StepRecord) -> str:
    """The gate of the paper's last figure: ahead of QKV in the third block, or nearly that."""
    names = list(record.gates)
    leading = [name for name in names if name.endswith((".qkv", ".block"))]
    return leading[min(2, len(leading) - 1)] if leading else names[0]


def patch_grid(values: Tensor, layout: TokenLayout) -> Tensor:
    """Values (N,) of tokens as (h, w) of the patches, without special tokens."""
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
    error = heat_picture(view, brightest)
    gap = torch.ones(3, GAP, size[1])
    return torch.cat([view.frame, gap, error, gap, mask_picture(view)], dim=1)


def heat_picture(view: UpdateView, brightest: float) -> Tensor:
    """The error as colours (3, H, W), `brightest` the value that becomes the lightest."""
    return heat_colours(_enlarge(view.error / max(brightest, 1e-12), view.frame.shape[-2:]))


def mask_picture(view: UpdateView) -> Tensor:
    """The frame (3, H, W) with updated tokens as they are and outlined, the others pale grey."""
    return outlined(view.frame, _enlarge(view.mask.float(), view.frame.shape[-2:]))


def outlined(frame: Tensor, mask: Tensor) -> Tensor:
    """A frame (3, H, W) in [0, 1] as it is where the mask (H, W) is 1, elsewhere pale grey.

    Pale, not dark: what was not computed stays visible, also in a dark frame.
    """
    pale = PALE + (1 - PALE) * frame.mean(dim=0, keepdim=True)
    shown = torch.where(mask > 0, frame, pale)
    return torch.where(_edges(mask) > 0, torch.tensor(OUTLINE)[:, None, None], shown)


def _enlarge(grid: Tensor, size: tuple[int, int] | torch.Size) -> Tensor:
    return F.interpolate(grid[None, None].float(), tuple(size), mode="nearest")[0, 0]


def heat_colours(level: Tensor) -> Tensor:
    """Levels (H, W) from 0 to 1 as black through purple and orange to white, (3, H, W)."""
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
