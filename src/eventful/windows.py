"""Windowed attention over buffered tokens: only the windows, and the queries, that matter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from eventful import ops
from eventful.relative import RelativePosition
from eventful.selection import Selection
from eventful.spec import BlockSpec
from eventful.step import Step


@dataclass(frozen=True, eq=False)
class WindowMap:
    """Where the tokens of a grid lie in non-overlapping windows padded at the bottom right.

    Attributes:
        members: (W, S) token in each place of each window; N where there is none.
        window_of: (N,) window of each token.
        place_of: (N,) place of each token in its window.
    """

    members: Tensor
    window_of: Tensor
    place_of: Tensor

    @property
    def padded(self) -> bool:
        """Whether some windows reach over the border."""
        return self.members.numel() > self.window_of.numel()


@lru_cache(maxsize=64)
def window_map(grid: tuple[int, int], window: tuple[int, int], device: torch.device) -> WindowMap:
    """The map for one grid, computed once."""
    (height, width), (tall, wide) = grid, window
    across = -(-width // wide)
    y = torch.arange(height, device=device)[:, None].expand(height, width).flatten()
    x = torch.arange(width, device=device)[None, :].expand(height, width).flatten()
    window_of = (y // tall) * across + x // wide
    place_of = (y % tall) * wide + x % wide
    members = torch.full((-(-height // tall) * across, tall * wide), height * width, device=device)
    members[window_of, place_of] = torch.arange(height * width, device=device)
    return WindowMap(members, window_of, place_of)


@dataclass(frozen=True, eq=False)
class WindowedAttention:
    """Attention inside windows, for one block of one step.

    Attributes:
        pad: q, k, v (1, 1, H*d) of a padding token; None where windows fit the grid.
    """

    spec: BlockSpec
    map: WindowMap
    relative: RelativePosition | None
    pad: tuple[Tensor, Tensor, Tensor] | None

    @classmethod
    def of(
        cls, spec: BlockSpec, grid: tuple[int, int], like: Tensor, positions: Any
    ) -> WindowedAttention:
        """Prepare for tokens like `like` (B, M, D)."""
        assert spec.window is not None
        places = window_map(grid, spec.window, like.device)
        pad = None
        if places.padded:
            # The models this serves pad after the layer norm, so a padding token is qkv(0).
            zero = like.new_zeros(1, 1, spec.dim)
            pad = spec.qkv(
                zero, torch.zeros(1, 1, dtype=torch.int64, device=like.device), positions
            )
        relative = None if spec.relative is None else RelativePosition(*spec.relative(spec.window))
        return cls(spec, places, relative, pad)

    def all_queries(self, q: Tensor, k: Tensor, v: Tensor, touched: Tensor, out: Tensor) -> Tensor:
        """Recompute every query of the windows in `touched` (B, W).

        Args:
            q, k, v: (B, N, H*d).
            out: (B, N, H*d) outputs so far; those of other windows are kept bit for bit.

        Returns:
            (B, N, H*d), a new tensor.
        """
        stream, window = touched.nonzero(as_tuple=True)
        out = out.clone()
        if len(window) == 0:
            return out
        parts = [self._windows(x, stream, window, i) for i, x in enumerate((q, k, v))]
        qh, kh, vh = (ops.split_heads(part, self.spec.heads) for part in parts)
        bias = None if self.relative is None else self.relative.bias_all(qh)
        result = ops.join_heads(ops.attend(qh, kh, vh, self.spec.scale, bias))
        index = self.map.members[window]
        real = index < self.map.window_of.numel()
        out[stream[:, None].expand_as(index)[real], index[real]] = result[real].to(out.dtype)
        return out

    def selected_queries(self, q: Tensor, k: Tensor, v: Tensor, selection: Selection) -> Tensor:
        """Attention of the selected queries (B, M, H*d) over their windows in K, V (B, N, H*d)."""
        batch, count, width = q.shape
        if count == 0:
            return q
        windows = self.map.members.shape[0]
        token = selection.index.flatten()
        stream = torch.arange(batch, device=q.device).repeat_interleave(count)
        home, group, size = torch.unique(
            stream * windows + self.map.window_of[token], return_inverse=True, return_counts=True
        )
        order = group.argsort(stable=True)
        rank = torch.empty_like(group)
        rank[order] = (
            torch.arange(len(group), device=q.device) - (size.cumsum(0) - size)[group[order]]
        )
        queries = q.new_zeros(len(home), int(size.max()), width)
        queries[group, rank] = q.reshape(-1, width)
        stream_of, window_of = home // windows, home % windows
        qh = ops.split_heads(queries, self.spec.heads)
        kh = ops.split_heads(self._windows(k, stream_of, window_of, 1), self.spec.heads)
        vh = ops.split_heads(self._windows(v, stream_of, window_of, 2), self.spec.heads)
        bias = None
        if self.relative is not None:
            place = torch.zeros(queries.shape[:2], dtype=torch.int64, device=q.device)
            place[group, rank] = self.map.place_of[token]
            bias = self.relative.bias(qh, place)
        result = ops.join_heads(ops.attend(qh, kh, vh, self.spec.scale, bias))
        return result[group, rank].view(batch, count, width)

    def touched(self, selection: Selection) -> Tensor:
        """(B, W) windows that hold a selected token."""
        mask = torch.zeros(
            selection.batch,
            self.map.members.shape[0],
            dtype=torch.int64,
            device=selection.index.device,
        )
        selected = selection.mask().to(torch.int64)
        return mask.index_add_(1, self.map.window_of, selected) > 0

    def _windows(self, tokens: Tensor, stream: Tensor, window: Tensor, part: int) -> Tensor:
        """Tokens (T, S, H*d) of T windows, padding tokens filled in; `part` 0, 1, 2 = q, k, v."""
        index = self.map.members[window]
        count = tokens.shape[1]
        taken = tokens[stream[:, None], index.clamp_max(count - 1)]
        if self.pad is None:
            return taken
        return torch.where((index < count)[..., None], taken, self.pad[part].to(taken.dtype))


def update_windows(
    step: Step,
    spec: BlockSpec,
    grid: tuple[int, int],
    selection: Selection,
    qkv: tuple[Tensor, Tensor, Tensor],
    positions: Any,
) -> tuple[Tensor, Tensor]:
    """A windowed block under operator gating: outputs of all tokens from the buffers.

    Returns:
        (B, N, H*d), and the number of windows computed per stream (B,).
    """
    state, config = step.state, step.config
    attention = WindowedAttention.of(spec, grid, qkv[0], positions)
    count = torch.full((selection.batch,), attention.map.members.shape[0], device=qkv[0].device)
    selective = config.windows == "touched" and not step.flush_all
    touched = attention.touched(selection)
    if config.attention == "query" and config.windows == "touched":
        state.write(spec.slot("key"), selection, qkv[1])
        state.write(spec.slot("value"), selection, qkv[2])
        rows = attention.selected_queries(
            qkv[0], state[spec.slot("key")], state[spec.slot("value")], selection
        )
        state.write(spec.slot("attended"), selection, rows)
        return state[spec.slot("attended")], touched.sum(dim=1)
    for name, part in zip(("query", "key", "value"), qkv, strict=True):
        state.write(spec.slot(name), selection, part)
    q, k, v = (state[spec.slot(name)] for name in ("query", "key", "value"))
    if not selective:
        out = attention.all_queries(q, k, v, torch.ones_like(touched), torch.empty_like(q))
    else:
        out = attention.all_queries(q, k, v, touched, state[spec.slot("attended")])
        count = touched.sum(dim=1)
    if config.windows == "touched":
        state.fill(spec.slot("attended"), out, owned=True)
    return out, count
