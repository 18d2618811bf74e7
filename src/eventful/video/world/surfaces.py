"""What stands still: pictures of the ground, of walls and of the sky, drawn for each scene."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.video.world.chance import choice, constant, mixed, normal, uniform

GROUND_SIDE, WALL_SIDE = 6.0, (14.0, 7.0)  # metres that a picture covers; it goes on mirrored
_GROUND, _WALL, _SKY = (256, 256), (256, 512), (64, 128)
GROUNDS = ("asphalt", "tiles", "grass", "gravel")
WALLS = ("brick", "plaster", "panels", "hedge")


@dataclass(frozen=True)
class Surfaces:
    """Pictures of S scenes: ground (S, 3, 256, 256), wall (S, 3, 256, 512), clouds (S, 1, 64, 128).

    Those of the ground and of the wall are also there blurred, for where they are far away.
    """

    ground: Tensor
    wall: Tensor
    clouds: Tensor
    far_ground: Tensor
    far_wall: Tensor

    @classmethod
    def make(cls, seeds: Tensor) -> Surfaces:
        """The surfaces of scenes by their seeds (S,)."""
        ground, wall = _ground(seeds), _wall(seeds)
        clouds = (fractal(seeds, 31, _SKY, 4, 4) * 1.6 - 0.5).clamp(0, 1)
        return cls(ground, wall, clouds, F.avg_pool2d(ground, 8), F.avg_pool2d(wall, 8))


def fractal(
    seeds: Tensor, key: int, size: tuple[int, int], cells: int, octaves: int, *, channels: int = 1
) -> Tensor:
    """Smooth noise (S, channels, H, W) in [0, 1]: each octave twice as fine and half as strong."""
    total, weight = torch.zeros((), device=seeds.device), 0.0
    for octave in range(octaves):
        rows = min(cells * 2**octave, size[0])
        columns = min(rows * size[1] // size[0], size[1])
        place = torch.arange(rows * columns * channels, device=seeds.device)
        grid = uniform(seeds[:, None], key, octave, place[None])
        grid = grid.view(len(seeds), channels, rows, columns)
        finer = F.interpolate(grid, size, mode="bilinear", align_corners=True)
        total, weight = total + finer * 0.5**octave, weight + 0.5**octave
    return (total / weight - 0.5) * 1.6 + 0.5


def _plane(seeds: Tensor, size: tuple[int, int], metres: tuple[float, float]) -> tuple[Tensor, ...]:
    y = torch.linspace(0, metres[0], size[0], device=seeds.device)[:, None]
    x = torch.linspace(0, metres[1], size[1], device=seeds.device)[None, :]
    return x.expand(size), y.expand(size)


def _each(values: Tensor) -> Tensor:
    """(S,) numbers of scenes as (S, 1, 1)."""
    return values[:, None, None]


def cells_of(
    x: Tensor, y: Tensor, wide: Tensor, high: Tensor, joint: float, shift: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A wall of bricks: where there is a joint (soft, 0 to 1), and the numbers of the bricks."""
    row = torch.floor(y / high)
    along = x / wide + shift * (row % 2)
    column = torch.floor(along)
    across = torch.minimum(along - column, 1 - (along - column)) * wide
    down = torch.minimum(y / high - row, 1 - (y / high - row)) * high
    edge = 1 - (torch.minimum(across, down) / joint).clamp(0, 1)
    return edge, row, column


def _colour(seeds: Tensor, key: int, low: float, high: float, saturation: float) -> Tensor:
    """(S, 3, 1, 1) a colour of little saturation."""
    grey = uniform(seeds, key, 0, low=low, high=high)[:, None]
    tint = torch.stack([uniform(seeds, key, 1 + c, low=-1, high=1) for c in range(3)], dim=1)
    return (grey * (1 + saturation * tint)).clamp(0.02, 0.98)[..., None, None]


def _ground(seeds: Tensor) -> Tensor:
    x, y = _plane(seeds, _GROUND, (GROUND_SIDE, GROUND_SIDE))
    rough = fractal(seeds, 11, _GROUND, 8, 5)
    fine = uniform(_each(seeds), 12, torch.arange(256 * 256, device=seeds.device).view(256, 256))
    fine = fine[:, None]
    base = _colour(seeds, 13, 0.34, 0.7, 0.06)
    asphalt = base * (0.75 + 0.35 * rough + 0.22 * (fine - 0.5))
    side = _each(uniform(seeds, 14, low=0.35, high=1.0))
    edge, row, column = cells_of(x, y, side, side * 0.8, 0.03, 0.5)
    stone = uniform(_each(seeds), 15, row, column)
    tiles = base * ((0.78 + 0.3 * stone) * (1 - 0.45 * edge))[:, None] * (0.9 + 0.2 * rough)
    green = _colour(seeds, 16, 0.32, 0.5, 0.08)
    tint = constant((0.85, 1.25, 0.6), seeds.device)[None, :, None, None]
    grass = green * tint * (0.6 + 0.55 * rough + 0.5 * (fine - 0.5))
    stones = fractal(seeds, 17, _GROUND, 64, 2)
    gravel = base * (0.55 + 0.8 * stones + 0.15 * (rough - 0.5))
    kinds = torch.stack([asphalt, tiles, grass, gravel], dim=1)
    return _picked(kinds, choice(len(GROUNDS), seeds, 18)).clamp(0, 1)


def _wall(seeds: Tensor) -> Tensor:
    x, y = _plane(seeds, _WALL, (WALL_SIDE[1], WALL_SIDE[0]))
    rough = fractal(seeds, 21, _WALL, 6, 5)
    base = _colour(seeds, 22, 0.38, 0.8, 0.14)
    wide = _each(uniform(seeds, 23, low=0.25, high=0.5))
    edge, row, column = cells_of(x, y, wide, wide * 0.4, 0.02, 0.5)
    shade = uniform(_each(seeds), 24, row, column)
    brick = base * ((0.75 + 0.35 * shade) * (1 - 0.35 * edge))[:, None] * (0.92 + 0.16 * rough)
    plaster = base * (0.85 + 0.25 * rough)
    broad = _each(uniform(seeds, 25, low=0.9, high=2.2))
    seam, row, column = cells_of(x, y, broad, broad * 0.6, 0.025, 0.0)
    tone = uniform(_each(seeds), 26, row, column)
    panels = base * ((0.85 + 0.2 * tone) * (1 - 0.5 * seam))[:, None] * (0.95 + 0.1 * rough)
    leaves = fractal(seeds, 27, _WALL, 40, 3)
    tint = constant((0.5, 0.8, 0.35), seeds.device)[None, :, None, None]
    hedge = tint * (0.2 + 0.8 * leaves) * (0.7 + 0.4 * rough)
    kind = choice(len(WALLS), seeds, 28)
    wall = _picked(torch.stack([brick, plaster, panels, hedge], dim=1), kind)
    glass, frame = _windows(seeds, x, y)
    with_windows = (kind != WALLS.index("hedge")).float()[:, None, None, None]
    pane = _colour(seeds, 29, 0.12, 0.4, 0.15) * (0.8 + 0.6 * rough)
    border = _colour(seeds, 30, 0.5, 0.95, 0.08)
    for cover, colour in ((frame, border), (glass, pane)):
        cover = cover[:, None] * with_windows
        wall = wall * (1 - cover) + colour * cover
    return wall.clamp(0, 1)


def _windows(seeds: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Where panes and frames of windows are, (S, H, W) each; doors reach the ground."""
    every = _each(uniform(seeds, 41, low=2.0, high=3.4))
    storey = 2.8
    column, row = torch.floor(x / every), torch.floor(y / storey)
    there = uniform(_each(seeds), 42, row, column) < 0.7
    door = (row == 0) & (uniform(_each(seeds), 43, column) < 0.3)
    across = (x / every - column - 0.5).abs() * every
    up = y - row * storey
    half = _each(uniform(seeds, 44, low=0.4, high=0.75))
    low, high = torch.where(door, 0.05, 0.9), torch.where(door, 2.1, 2.2)
    outside = torch.maximum(across - half, torch.maximum(low - up, up - high))
    pane = (-outside / 0.03).clamp(0, 1) * there
    frame = ((0.09 - outside) / 0.03).clamp(0, 1) * there
    bar = ((0.03 - torch.minimum(across, (up - 1.5).abs())) / 0.02).clamp(0, 1)
    return pane * (1 - bar), frame


def _picked(kinds: Tensor, which: Tensor) -> Tensor:
    """Of (S, K, C, H, W) the kind of each scene."""
    return kinds[torch.arange(len(which), device=which.device), which.long()]


def speckle(seeds: Tensor, times: Tensor, size: tuple[int, int], channels: int) -> Tensor:
    """Noise of a sensor (B, channels, H, W), new in every frame; mean 0, deviation 1."""
    count = channels * size[0] * size[1]
    place = torch.arange(count, device=seeds.device, dtype=torch.int32)
    key = mixed(seeds, 51, (times * 1000).round())
    return normal(key[:, None], place[None]).view(len(seeds), channels, *size)
