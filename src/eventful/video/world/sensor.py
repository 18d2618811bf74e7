"""What a camera makes of the light: exposure, blur, noise, and the compression of the file."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.video.world.chance import constant, uniform
from eventful.video.world.surfaces import speckle

_CODE = ((0.299, 0.587, 0.114), (-0.169, -0.331, 0.5), (0.5, -0.419, -0.081))


def develop(light: Tensor, seeds: Tensor, seconds: Tensor) -> Tensor:
    """Frames (B, 3, H, W) in [0, 1] from the light that falls on the sensor."""
    size = (light.shape[2], light.shape[3])
    light = light * _vignette(size, light.device)
    light = _softened(light)
    gain = uniform(seeds, 131, low=0.85, high=1.15)
    gain = gain * (1 + 0.05 * torch.sin(seconds * uniform(seeds, 132, low=0.2, high=0.8)))
    light = 1 - torch.exp(-1.55 * light.clamp_min(0) * gain[:, None, None, None])
    light = (0.42 + 1.25 * (light - 0.42)).clamp(0, 1)
    strength = uniform(seeds, 133).square()[:, None, None, None]
    deviation = 0.002 + 0.022 * strength * (0.25 + light).sqrt()
    light = light + deviation * speckle(seeds, seconds, size, 3)
    return compressed(light.clamp(0, 1), uniform(seeds, 134, low=0.002, high=0.012))


def _vignette(size: tuple[int, int], device: torch.device) -> Tensor:
    y = torch.linspace(-1, 1, size[0], device=device)[:, None]
    x = torch.linspace(-1, 1, size[1], device=device)[None, :]
    return 1 - 0.1 * (x.square() + y.square())


def _softened(light: Tensor) -> Tensor:
    """Blurred by about half a pixel, as by a lens."""
    kernel = constant((0.12, 0.76, 0.12), light.device)
    weight = (kernel[:, None] * kernel[None, :]).expand(3, 1, 3, 3)
    padded = F.pad(light, (1, 1, 1, 1), mode="replicate")
    return F.conv2d(padded, weight, groups=3)


def compressed(frames: Tensor, step: Tensor) -> Tensor:
    """Frames after a codec: cosine coefficients of 8 x 8 blocks, rounded to multiples of a step.

    Args:
        step: (B,) that of the lowest frequency; higher ones and colours have larger ones. Half of
            a step more than usual rounds to none, so that weak noise disappears.
    """
    height, width = frames.shape[2:]
    padded = F.pad(frames, (0, -width % 8, 0, -height % 8), mode="replicate")
    code, back_again = _codes(frames.device)
    parts = torch.einsum("ij,bjhw->bihw", code, padded)
    blocks = parts.unflatten(3, (-1, 8)).unflatten(2, (-1, 8))  # (B, 3, h, 8, w, 8)
    waves = _cosines(frames.device)
    found = torch.einsum("ui,bchiwj,vj->bchuwv", waves, blocks, waves)
    rank = torch.arange(8, device=frames.device)
    finer = 1 + 0.35 * (rank[:, None] + rank[None, :])
    steps = step[:, None, None, None, None, None] * finer[:, None, :] * 8
    steps = steps * constant((1.0, 2.0, 2.0), frames.device)[:, None, None, None, None]
    ratio = found / steps
    kept = torch.sign(ratio) * torch.floor((ratio.abs() + 0.35).clamp_min(0)) * steps
    first = (found / steps).round() * steps
    lowest = (rank[:, None, None] == 0) & (rank[None, None, :] == 0)
    kept = torch.where(lowest, first, kept)
    back = torch.einsum("ui,bchuwv,vj->bchiwj", waves, kept, waves)
    whole = back.flatten(4, 5).flatten(2, 3)[..., :height, :width]
    return torch.einsum("ij,bjhw->bihw", back_again, whole).clamp(0, 1)


@lru_cache(maxsize=8)
def _codes(device: torch.device) -> tuple[Tensor, Tensor]:
    """(3, 3) RGB to light and two colours, and back."""
    code = torch.tensor(_CODE)
    return code.to(device), torch.linalg.inv(code).to(device)


def _cosines(device: torch.device) -> Tensor:
    """(8, 8) the orthonormal cosine transform."""
    place = torch.arange(8, device=device, dtype=torch.float32)
    waves = torch.cos(math.pi * (place[None, :] + 0.5) * place[:, None] / 8) * 0.5
    waves[0] /= math.sqrt(2)
    return waves
