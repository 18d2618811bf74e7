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


@torch.library.custom_op("eventful::suppress", mutates_args=())
def _suppress(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """`suppress` as one node of a graph: exporters replace it by the NMS of their format."""
    return reference.suppress(boxes, valid, threshold).clone()


@_suppress.register_fake
def _(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    return torch.empty_like(valid)


@torch.library.custom_op("eventful::align_level", mutates_args=())
def _align_level(features: Tensor, boxes: Tensor, output: int, scale: float) -> Tensor:
    """RoIAlign (K, C, output, output) of boxes (K, 4) on a map (1, C, h, w) as one node."""
    images = torch.zeros(len(boxes), dtype=torch.int64, device=boxes.device)
    return reference.roi_align(features, boxes, images, output, scale).contiguous()


@_align_level.register_fake
def _(features: Tensor, boxes: Tensor, output: int, scale: float) -> Tensor:
    return features.new_empty(len(boxes), features.shape[1], output, output)


def suppress(boxes: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """See `reference.suppress`; one node of an exported graph."""
    made: Tensor = _suppress(boxes, valid, threshold)
    return made


def keep_apart(
    boxes: Tensor, groups: Tensor, count: Tensor, threshold: float, limit: int
) -> tuple[Tensor, Tensor]:
    """See `reference.keep_apart`; boxes of different groups are moved apart."""
    places = boxes.shape[1]
    valid = torch.arange(places, device=boxes.device) < count[:, None]
    corners = boxes.flatten()
    span = corners.amax(dim=0) - corners.amin(dim=0) + 1
    kept = suppress(boxes + (groups * span)[..., None], valid, threshold)
    order = (~kept).to(torch.int64).argsort(dim=1, stable=True)[:, :limit]
    order = torch.nn.functional.pad(order, (0, limit - order.shape[1]))
    found = kept.sum(dim=1).clamp_max(limit)
    there = torch.arange(limit, device=boxes.device) < found[:, None]
    return torch.where(there, order, 0), found


def align_regions(
    maps: tuple[Tensor, ...],
    scales: tuple[float, ...],
    boxes: Tensor,
    level: Tensor,
    output: int,
) -> Tensor:
    """See `reference.align_regions`; boxes of other levels are empty, and cost next to nothing."""
    every, own = boxes[0], level[0]
    pooled = maps[0].new_zeros(len(every), output, output, maps[0].shape[-1])
    for number, (features, scale) in enumerate(zip(maps, scales, strict=True)):
        here = own == number
        some = torch.where(here[:, None], every, 0.0)
        part = _align_level(features.permute(0, 3, 1, 2).contiguous(), some, output, scale)
        pooled = torch.where(here[:, None, None, None], part.permute(0, 2, 3, 1), pooled)
    return pooled
