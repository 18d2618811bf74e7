"""Windowed attention in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from eventful.ops.reference.attention import whole_bias
from eventful.ops.reference.rows import held

# Tokens in a row of a window that the GPU kernel takes: it holds a row's keys and values at once.
_WIDEST_WINDOW = 128


def window_too_wide(window: tuple[int, int] | None) -> str | None:
    """Why the GPU kernel does not take windows (height, width); None if it does, or without."""
    if window is None or window[1] <= _WIDEST_WINDOW:
        return None
    return f"rows of a window have more than {_WIDEST_WINDOW} tokens"


@dataclass(frozen=True)
class WindowGrid:
    """A grid of tokens cut into windows, which may reach over it at the bottom right.

    Grid and window are (height, width).
    """

    grid: tuple[int, int]
    window: tuple[int, int]

    @property
    def across(self) -> int:
        """Windows in a row."""
        return -(-self.grid[1] // self.window[1])

    @property
    def count(self) -> int:
        """Windows of the grid."""
        return -(-self.grid[0] // self.window[0]) * self.across

    @property
    def padded(self) -> bool:
        """Whether some windows reach over the border."""
        return any(side % step for side, step in zip(self.grid, self.window, strict=True))


@dataclass(frozen=True, eq=False)
class WindowMap:
    """Where the tokens of a grid lie in its windows.

    Attributes:
        members: (W, S) token in each place of each window; N where there is none.
        window_of: (N,) window of each token.
        place_of: (N,) place of each token in its window.
    """

    members: Tensor
    window_of: Tensor
    place_of: Tensor


@lru_cache(maxsize=64)
def window_map(windows: WindowGrid, device: torch.device) -> WindowMap:
    """The map of one grid, computed once."""
    (height, width), (tall, wide) = windows.grid, windows.window
    y = torch.arange(height, device=device)[:, None].expand(height, width).flatten()
    x = torch.arange(width, device=device)[None, :].expand(height, width).flatten()
    window_of = (y // tall) * windows.across + x // wide
    place_of = (y % tall) * wide + x % wide
    members = torch.full((windows.count, tall * wide), height * width, device=device)
    members[window_of, place_of] = torch.arange(height * width, device=device)
    return WindowMap(members, window_of, place_of)


def border_bias(inside: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The bias of attention in windows that end at the border of the grid.

    Args:
        inside: which keys are in the grid, of a shape that fits the bias.
        bias: what else is added; None for nothing.
    """
    zero = inside.new_zeros(inside.shape, dtype=dtype) if bias is None else bias
    return zero.masked_fill(~inside, -torch.inf)


def attend_windows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    windows: WindowGrid,
    index: Tensor,
    relative: tuple[Tensor, Tensor] | None = None,
    pad: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """Attention of some queries over the keys of their own windows, (B, H, M, d).

    Args:
        q: (B, H, M, d).
        k, v: (S, H, N, d).
        index: (B, M) tokens of the queries.
        relative: (B, M, H, window height) and (B, M, H, window width), see `relative_logits`.
        pad: key and value (H*d,) of the token in places over the border of the grid; None where
            windows fit the grid, or end at its border.
        slots: (B,) row of `k` and `v` that belongs to each stream; None if row b does.
        places: (B, N) slot of each token in `index`, -1 for none, where the caller knows it;
            then what stands in padded slots of the result is undefined.
    """
    k, v = held(k, slots), held(v, slots)
    (height, width), (tall, wide) = windows.grid, windows.window
    place = torch.arange(tall * wide, device=q.device)
    y = (index // width // tall * tall)[..., None] + place // wide  # (B, M, S)
    x = (index % width // wide * wide)[..., None] + place % wide
    inside = (y < height) & (x < width)
    token = torch.where(inside, y * width + x, 0)
    stream = torch.arange(len(index), device=q.device)[:, None, None]

    def members(source: Tensor, filler: Tensor | None) -> Tensor:
        taken = source.transpose(1, 2)[stream, token]  # (B, M, S, H, d)
        if filler is not None:
            blank = filler.to(taken.dtype).view(taken.shape[-2:])
            taken = torch.where(inside[..., None, None], taken, blank)
        return taken

    keys, values = members(k, pad and pad[0]), members(v, pad and pad[1])
    scores = torch.einsum("bhmd,bmshd->bhms", q * scale, keys)
    bias = whole_bias(None, relative)
    if pad is None and windows.padded:
        bias = border_bias(inside[:, None], bias, scores.dtype)
    weights = (scores if bias is None else scores + bias).softmax(dim=-1)
    return torch.einsum("bhms,bmshd->bhmd", weights, values)
