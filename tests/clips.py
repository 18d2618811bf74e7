"""Small made-up videos."""

from __future__ import annotations

import torch
from torch import Tensor


def moving_square(
    frames: int, size: tuple[int, int], *, batch: int = 1, noise: float = 0.0, seed: int = 0
) -> list[Tensor]:
    """A textured square crossing a textured background, with sensor noise: (B, 3, H, W) each."""
    make = torch.Generator().manual_seed(seed)
    height, width = size
    side_y, side_x = max(height // 3, 1), max(width // 3, 1)
    ground = torch.randn(batch, 3, height, width, generator=make)
    square = 2 * torch.randn(batch, 3, side_y, side_x, generator=make)
    step = torch.randint(1, 5, (batch, 2), generator=make)
    clip = []
    for t in range(frames):
        frame = ground.clone()
        for row in range(batch):
            y = int(step[row, 0] * t) % (height - side_y + 1)
            x = int(step[row, 1] * t) % (width - side_x + 1)
            frame[row, :, y : y + side_y, x : x + side_x] = square[row]
        clip.append(frame + noise * torch.randn(frame.shape, generator=make))
    return clip


def then_still(clip: list[Tensor], frames: int) -> list[Tensor]:
    """The clip, then its last frame again and again."""
    return clip + [clip[-1]] * frames
