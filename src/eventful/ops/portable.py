"""Operations whose shapes do not depend on values, as exported graphs need them.

What is not here is taken from the reference. Forced while a step is exported (`eventful.export`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eventful.ops import reference
from eventful.ops.reference import WindowGrid, border_bias, held, whole_bias, window_map


def __getattr__(name: str) -> Any:
    """Everything else as in the reference."""
    return getattr(reference, name)


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
    """See `reference.attend_windows`; every place of every window is a query.

    The reference reads the keys of its window for each query. Here each key is read once, and the
    places of queries that were not selected are empty. B is 1.
    """
    _, heads, count, width = q.shape
    spots = window_map(windows, q.device)
    tokens = windows.grid[0] * windows.grid[1]
    place = spots.members.shape[1]
    at = spots.window_of[index[0]] * place + spots.place_of[index[0]]  # (M,)

    def spread(rows: Tensor) -> Tensor:
        """Rows (M, C) at their places in the windows, (W, S, C)."""
        blank = rows.new_zeros(windows.count * place, rows.shape[1])
        return blank.index_copy(0, at, rows).view(windows.count, place, -1)

    inside = spots.members < tokens  # (W, S)

    def members(source: Tensor, filler: Tensor | None) -> Tensor:
        """(W, H, S, d)."""
        rows = held(source, slots)[0].transpose(0, 1).reshape(tokens, heads * width)
        taken = rows.index_select(0, spots.members.flatten().clamp_max(tokens - 1))
        taken = taken.view(windows.count, place, heads * width)
        if filler is not None:
            taken = torch.where(inside[..., None], taken, filler.to(taken.dtype))
        return taken.view(windows.count, place, heads, width).transpose(1, 2)

    queries = spread(q[0].transpose(0, 1).reshape(count, heads * width))
    queries = queries.view(windows.count, place, heads, width).transpose(1, 2)
    bias = None
    if relative is not None:
        down, across = (
            spread(part[0].flatten(1)).view(windows.count, place, heads, -1) for part in relative
        )
        bias = whole_bias(None, (down, across))
    if pad is None and windows.padded:
        bias = border_bias(inside[:, None, None], bias, q.dtype)
    keys, values = members(k, pad and pad[0]), members(v, pad and pad[1])
    result = reference.attend(queries, keys, values, scale, bias)  # (W, H, S, d)
    rows = result.transpose(1, 2).reshape(windows.count * place, heads * width)
    return rows.index_select(0, at).view(1, count, heads, width).transpose(1, 2)
