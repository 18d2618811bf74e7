"""A synthetic scene: objects moving over a still background, with sensor noise."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F


def moving_objects(
    frames: int, size: tuple[int, int], *, objects: int = 3, noise: float = 0.01, seed: int = 0
) -> Iterator[Tensor]:
    """RGB frames (1, 3, H, W) in [0, 1], the same for the same seed.

    Args:
        objects: textured discs, each about a tenth of the frame wide, on straight paths.
        noise: standard deviation of the sensor noise.
    """
    make = torch.Generator().manual_seed(seed)
    height, width = size
    ground = _texture(size, make, cells=6) * 0.35 + _texture(size, make, cells=40) * 0.15 + 0.3
    skins = [_texture(size, make, cells=24) for _ in range(objects)]
    colours = torch.rand(objects, 3, 1, 1, generator=make) * 0.8 + 0.2
    start = torch.rand(objects, 2, generator=make)
    angle = torch.rand(objects, generator=make) * 2 * math.pi
    velocity = torch.stack([angle.sin(), angle.cos()], dim=1) * 0.012
    radius = 0.05 + 0.05 * torch.rand(objects, generator=make)
    y = torch.linspace(0, 1, height)[:, None]
    x = torch.linspace(0, 1, width)[None, :]
    for t in range(frames):
        frame = ground.clone()
        for i in range(objects):
            centre = _bounce(start[i] + velocity[i] * t)
            distance = ((y - centre[0]) ** 2 + (x - centre[1]) ** 2).sqrt()
            cover = ((radius[i] - distance) / 0.01).clamp(0, 1)
            shift = [int(centre[0] * height), int(centre[1] * width)]
            skin = colours[i] * (0.4 + 0.6 * torch.roll(skins[i], shift, dims=(1, 2)))
            frame = frame * (1 - cover) + skin * cover
        grain = noise * torch.randn(frame.shape, generator=make)
        yield (frame + grain).clamp(0, 1)[None]


def _bounce(place: Tensor) -> Tensor:
    """Reflect a path at the borders of the unit square."""
    folded = place % 2
    return torch.where(folded > 1, 2 - folded, folded)


def _texture(size: tuple[int, int], make: torch.Generator, *, cells: int) -> Tensor:
    """Smooth random colours (3, H, W) in [0, 1]."""
    coarse = torch.rand(1, 3, cells, cells, generator=make)
    return F.interpolate(coarse, size, mode="bicubic", align_corners=False)[0].clamp(0, 1)
