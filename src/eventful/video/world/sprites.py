"""Figures as small pictures: colours and coverage, drawn from their parts."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.video.world import figures
from eventful.video.world.chance import uniform

SIDE = 128  # pixels of a sprite, where nothing else is asked for
LEFT, LOW, REACH = -0.62, -0.08, 1.24  # what it shows of the figure's square


def draw(
    kinds: Tensor, phase: Tensor, palette: Tensor, keys: Tensor, footprint: Tensor, sun: Tensor,
    side: int = SIDE,
) -> Tensor:  # fmt: skip
    """Sprites (N, 4, side, side) of N figures: colours times coverage, and coverage.

    Args:
        kinds: (N,) which of `figures.EVERY`.
        phase: (N,) of the gait, in radians.
        palette: (N, 5, 3) colours.
        keys: (N,) seeds of the patterns.
        footprint: (N,) size of a pixel of the frame in the figure's units; finer detail is left
            out.
        sun: (N,) from -1 to 1, how far the light comes from the right.
    """
    table = figures.table(kinds.device)
    signals = torch.stack([torch.ones_like(phase), phase.sin(), phase.cos(), phase], dim=-1)
    parts = (table.factors[kinds] * signals[:, None, None]).sum(dim=-1)  # (N, parts, 7)
    colours = palette.gather(1, table.colours[kinds][..., None].expand(-1, -1, 3))
    skins = table.skins[kinds]
    u, v = _places(kinds.device, side)
    soft = footprint.clamp_min(0.7 * REACH / side)[:, None, None]
    mix = _pattern(table.facts[kinds, 0], keys, u, v, soft)
    rough = 0.88 + 0.24 * _noise(keys, 3, 24, side)
    canvas = torch.zeros(len(kinds), 4, side, side, device=kinds.device)
    for number in range(parts.shape[1]):
        cover, light = _part(parts[:, number], u, v, soft, sun)
        plain = colours[:, number, :, None, None]
        second = palette[:, figures.SECOND, :, None, None]
        share = (mix * skins[:, number, None, None])[:, None]
        painted = (plain + (second - plain) * share) * (rough * light)[:, None]
        cover = cover[:, None]
        canvas = canvas * (1 - cover) + torch.cat([painted * cover, cover], dim=1)
    return canvas


def _places(device: torch.device, side: int) -> tuple[Tensor, Tensor]:
    """The figure's coordinates of the pixels, (1, 1, side) and (1, side, 1); up is up."""
    step = (torch.arange(side, device=device) + 0.5) * REACH / side
    return (LEFT + step)[None, None], (LOW + REACH - step)[None, :, None]


def _part(part: Tensor, u: Tensor, v: Tensor, soft: Tensor, sun: Tensor) -> tuple[Tensor, Tensor]:
    """How far a rounded box (N, 7) covers each pixel, and how much light it has there."""
    cx, cy, hx, hy, angle, rounded, ring = (value[:, None, None] for value in part.unbind(dim=1))
    du, dv = u - cx, v - cy
    cos, sin = angle.cos(), angle.sin()
    x, y = du * cos + dv * sin, dv * cos - du * sin
    radius = rounded * torch.minimum(hx, hy).clamp_min(0)
    qx, qy = x.abs() - hx + radius, y.abs() - hy + radius
    outside = (qx.clamp_min(0).square() + qy.clamp_min(0).square()).sqrt()
    distance = outside + torch.maximum(qx, qy).clamp_max(0) - radius
    depth = (-distance / torch.minimum(hx, hy).clamp_min(0.02)).clamp(0, 1)
    distance = torch.where(ring > 0, (distance + ring).abs() - ring, distance)
    cover = (0.5 - distance / soft).clamp(0, 1) * (hx > 0)
    side = (du * sun[:, None, None] + dv).clamp(-0.4, 0.4)
    return cover, 0.72 + 0.34 * depth.sqrt() + 0.35 * side


def _noise(keys: Tensor, key: int, cells: int, side: int) -> Tensor:
    """Smooth noise (N, side, side) in [0, 1]."""
    place = torch.arange(cells * cells, device=keys.device)
    grid = uniform(keys[:, None], 61, key, place[None]).view(-1, 1, cells, cells)
    return F.interpolate(grid, (side, side), mode="bilinear", align_corners=True)[:, 0]


def _pattern(kind: Tensor, keys: Tensor, u: Tensor, v: Tensor, soft: Tensor) -> Tensor:
    """Share of the second colour (N, side, side) on the skin."""
    side = u.shape[-1]

    def number(key: int, low: float, high: float) -> Tensor:
        return uniform(keys, 62, key, low=low, high=high)[:, None, None]

    def bands(place: Tensor, period: Tensor, duty: Tensor) -> Tensor:
        """Soft bands; where a pixel of the frame holds a whole period they are even."""
        wave = torch.sin(2 * math.pi * place / period + number(1, 0, 6.3)) + duty
        sharp = (wave * period / (6 * soft)).clamp(-1, 1) * 0.5 + 0.5
        fade = (period / (2.5 * soft) - 1).clamp(0, 1)
        return 0.5 + (sharp - 0.5) * fade

    duty, bend = number(2, -0.25, 0.25), _noise(keys, 4, 5, side) - 0.5
    across, up = u + 0.12 * bend, v.expand(-1, -1, side)
    patches = ((_noise(keys, 5, 7, side) - number(3, 0.42, 0.55)) * 9).clamp(-1, 1) * 0.5 + 0.5
    turned = torch.atan2(v - 0.42, u)
    sectors = (torch.sin(turned * 3 + number(1, 0, 6.3)) * 6).clamp(-1, 1) * 0.5 + 0.5
    checks = bands(u, number(4, 0.14, 0.2), 0 * duty)
    rows = bands(up, number(5, 0.1, 0.14), 0 * duty)
    made = (
        0.25 * _noise(keys, 6, 3, side),
        bands(up, number(6, 0.11, 0.18), duty),
        bands(across, number(7, 0.1, 0.17), duty),
        patches,
        checks + rows - 2 * checks * rows,
        bands(up, number(8, 0.16, 0.24), number(9, -0.85, -0.7)),
        sectors,
    )
    total = torch.zeros_like(patches)
    for number_of, value in enumerate(made):
        total = total + value * (kind == number_of)[:, None, None]
    return total
