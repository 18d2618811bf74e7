"""The simple feature pyramid: five scales from the backbone's one map."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful.models.blocks import NORM_EPS
from eventful.models.vitdet.updated import UpdatedMaps, pyramid_levels, update_pyramid
from eventful.rules.local import HeadMemory, plain_parts


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of (B, C, h, w)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Each pixel by itself."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNorm(nn.Conv2d):
    """A convolution without bias, its channel norm, and ReLU if asked for."""

    def __init__(self, before: int, after: int, kernel: int, *, relu: bool = False) -> None:
        super().__init__(before, after, kernel, padding=kernel // 2, bias=False)
        self.norm = ChannelNorm(after)
        self.relu = relu
        nn.init.trunc_normal_(self.weight, std=(2 / (after * kernel**2)) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, h, w) to (B, after, h, w)."""
        x = self.norm(super().forward(x))
        return F.relu(x) if self.relu else x


class SimpleFeaturePyramid(nn.Module):
    """(B, D, h, w) at stride 16 to p2-p6 (B, C, ...) at strides 4, 8, 16, 32, 64.

    Args:
        lends: in a stream, return its memory itself, for a caller that neither keeps nor writes it.
    """

    def __init__(self, dim: int, channels: int = 256, *, lends: bool = False) -> None:
        super().__init__()
        self.lends = lends

        def smooth(before: int) -> list[nn.Module]:
            return [ConvNorm(before, channels, 1), ConvNorm(channels, channels, 3)]

        def double(before: int, after: int) -> nn.Module:
            return nn.ConvTranspose2d(before, after, kernel_size=2, stride=2)

        half, quarter = dim // 2, dim // 4
        self.p2 = nn.Sequential(
            double(dim, half), ChannelNorm(half), nn.GELU(), double(half, quarter), *smooth(quarter)
        )
        self.p3 = nn.Sequential(double(dim, half), *smooth(half))
        self.p4 = nn.Sequential(*smooth(dim))
        self.p5 = nn.Sequential(nn.MaxPool2d(2), *smooth(dim))

    def forward(self, image: Tensor) -> list[Tensor]:
        """The maps p2 to p6."""
        maps = [stage(image) for stage in (self.p2, self.p3, self.p4, self.p5)]
        # p6 takes every other pixel of p5.
        return [*maps, F.max_pool2d(maps[-1], kernel_size=1, stride=2)]

    def step_forward(self, memory: HeadMemory, image: Tensor, *more: Any) -> UpdatedMaps | None:
        """The maps in a step of a stream: only what a changed token reaches is computed."""
        batch, grid = len(image), (image.shape[2], image.shape[3])
        plain = not more and memory.takes(batch, grid, image) and min(grid) > 1
        if not plain or not plain_parts(self, _PARTS):
            return None
        maps = update_pyramid(self, memory, image)
        if not self.lends or self._forward_hooks:
            maps[:] = [part.clone() for part in maps]
        return maps

    def step_bytes(self, grid: tuple[int, int], dtype: torch.dtype) -> int:
        """Bytes held for one stream with a grid (h, w) of tokens."""
        first = cast(ConvNorm, self.p4[0])
        channels, dim = first.out_channels, first.in_channels
        pixels = pyramid_levels(grid).pixels
        return (grid[0] * grid[1] * dim + 2 * pixels * channels) * dtype.itemsize + 8


_PARTS = (nn.Sequential, nn.ConvTranspose2d, nn.GELU, nn.MaxPool2d, ChannelNorm, ConvNorm)
