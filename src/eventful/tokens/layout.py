"""How the tokens of a sequence lie: special tokens before and after a grid of patches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.errors import UnsupportedError


def whole_windows(size: tuple[int, int], patch: tuple[int, int], windows: int) -> tuple[int, int]:
    """Height and width, rounded up where `windows` windows cannot share a side's patches evenly."""
    height, width = (
        side if side // own % windows == 0 else -(-side // (own * windows)) * own * windows
        for side, own in zip(size, patch, strict=True)
    )
    return height, width


@dataclass(frozen=True)
class TokenLayout:
    """A sequence of `prefix` special tokens, h x w patch tokens and `suffix` special tokens.

    Class, register, distillation and detection tokens are special: they are protected
    (always selected, unless the configuration says otherwise) and never pooled.
    """

    grid: tuple[int, int]
    prefix: int = 0
    suffix: int = 0

    def __str__(self) -> str:
        height, width = self.grid
        return f"{self.tokens} ({self.prefix} + {height}x{width} + {self.suffix})"

    @property
    def tokens(self) -> int:
        """N."""
        return self.prefix + self.grid[0] * self.grid[1] + self.suffix

    def protected(self, device: torch.device | str) -> Tensor | None:
        """(N,) mask of the special tokens; None if there are none."""
        if not self.prefix and not self.suffix:
            return None
        mask = torch.zeros(self.tokens, dtype=torch.bool, device=device)
        mask[: self.prefix] = True
        mask[self.tokens - self.suffix :] = True
        return mask

    def phases(self, period: int) -> Tensor:
        """(N,) int32 from 0 to `period` - 1: which of `period` turns refreshes each token.

        Each turn has as many tokens as the others, or one more. Those of one turn lie together:
        what lies around a refreshed token, as convolutions see it, is then mostly refreshed, too.
        """
        height, width = self.grid
        band = max(1, round((self.tokens / period) ** 0.5))  # rows; a turn's tokens form a square
        y, x = torch.arange(height)[:, None], torch.arange(width)
        place = (y // band * width + x) * band + y % band  # band by band, in it column by column
        order = place.flatten().argsort()
        last = torch.arange(self.tokens - self.suffix, self.tokens)
        order = torch.cat([torch.arange(self.prefix), self.prefix + order, last])
        phase = torch.empty(self.tokens, dtype=torch.int32)
        turns = min(period, self.tokens)  # of more turns than tokens the last have none
        phase[order] = (torch.arange(self.tokens) * turns // self.tokens).to(torch.int32)
        return phase

    def pooled(self, size: int) -> TokenLayout:
        """The layout of keys after `size` x `size` pooling of the grid (Section 5.3)."""
        height, width = (-(-side // size) for side in self.grid)
        return replace(self, grid=(height, width))

    def pool(self, tokens: Tensor, size: int) -> Tensor:
        """Average (B, N, D) over `size` x `size` cells; a cell cut by the border averages less."""
        if size == 1:
            return tokens
        before, grid, after = self._split(tokens)
        image = grid.reshape(len(grid), *self.grid, -1).permute(0, 3, 1, 2)
        image = F.avg_pool2d(image, size, ceil_mode=True, count_include_pad=False)
        return torch.cat([before, image.flatten(2).transpose(1, 2), after], dim=1)

    def pool_mask(self, mask: Tensor, size: int) -> Tensor:
        """Max-pool a mask (B, N): a cell is touched if any of its tokens is."""
        if size == 1:
            return mask
        before, grid, after = self._split(mask)
        image = grid.reshape(len(grid), 1, *self.grid).float()
        touched = F.max_pool2d(image, size, ceil_mode=True)[:, 0].flatten(1) > 0
        return torch.cat([before, touched, after], dim=1)

    def _split(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if tokens.shape[1] != self.tokens:
            raise UnsupportedError(
                f"The model made {tokens.shape[1]} tokens where the adapter expected {self}; "
                "pooling and windows need the grid. Check the adapter's `layout` for this model."
            )
        last = self.tokens - self.suffix
        return tokens[:, : self.prefix], tokens[:, self.prefix : last], tokens[:, last:]
