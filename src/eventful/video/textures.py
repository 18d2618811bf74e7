"""Random pictures with the statistics of natural images: 1/f noise, edges, objects that overlap."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LEAVES = 90  # objects of a scene
_SMALLEST, _LARGEST = 0.015, 0.35  # radius of an object, as a share of the longer side


def pink_noise(size: tuple[int, int], make: torch.Generator, *, slope: float = 1.0) -> Tensor:
    """Noise (H, W) whose amplitude falls with frequency as 1/f^slope; mean 0, deviation 1."""
    height, width = size
    y = torch.fft.fftfreq(height)[:, None]
    x = torch.fft.rfftfreq(width)[None, :]
    frequency = (y.square() + x.square()).sqrt()
    frequency[0, 0] = math.inf
    white = torch.fft.rfft2(torch.randn(height, width, generator=make))
    noise = torch.fft.irfft2(white / frequency**slope, s=(height, width))
    return (noise - noise.mean()) / noise.std().clamp_min(1e-6)


def dead_leaves(size: tuple[int, int], make: torch.Generator) -> Tensor:
    """A scene (3, H, W) in [0, 1]: textured discs and boxes of many sizes, one over the other.

    Sizes follow a power law, so the picture has edges at every scale, as natural images have.
    """
    height, width = size
    longest = max(size)
    y = torch.arange(height, dtype=torch.float32)[:, None]
    x = torch.arange(width, dtype=torch.float32)[None, :]
    light = 0.5 + 0.12 * pink_noise(size, make, slope=1.3)
    picture = light.expand(3, height, width).clone()
    grain = pink_noise(size, make, slope=0.8)
    for _ in range(_LEAVES):
        u = torch.rand(8, generator=make)
        radius = longest / (1 / _LARGEST + u[0] * (1 / _SMALLEST - 1 / _LARGEST))
        dy, dx = y - u[1] * height, x - u[2] * width
        angle = u[3] * math.pi
        along = dx * angle.cos() + dy * angle.sin()
        across = (dy * angle.cos() - dx * angle.sin()) * (1 + u[4])
        disc = u[5] < 0.6
        distance = (along.square() + across.square()).sqrt() if disc else along.abs().maximum(
            across.abs()
        )  # fmt: skip
        cover = (radius - distance).clamp(0, 1)
        colour = _muted(make)
        skin = colour * (1 + 0.18 * u[6] * grain) + 0.05 * (u[7] - 0.5)
        picture = picture * (1 - cover) + skin * cover
    return (picture + 0.01 * pink_noise(size, make)).clamp(0, 1)


def patch_of(size: tuple[int, int], make: torch.Generator) -> tuple[Tensor, Tensor]:
    """An object: its colours (3, h, w) in [0, 1] and its mask (h, w), an ellipse with soft edge."""
    height, width = size
    y = torch.linspace(-1, 1, height)[:, None]
    x = torch.linspace(-1, 1, width)[None, :]
    mask = ((1 - (y.square() + x.square()).sqrt()) * min(size) / 2).clamp(0, 1)
    colour = _muted(make)
    return (colour * (1 + 0.3 * pink_noise(size, make))).clamp(0, 1), mask


def _muted(make: torch.Generator) -> Tensor:
    """A random colour (3, 1, 1) of little saturation."""
    colour = 0.12 + 0.76 * torch.rand(3, 1, 1, generator=make)
    return 0.45 * colour + 0.55 * colour.mean()
