"""Maps made from tokens on the CPU: only the pixels that changed are computed.

The neighbours of the changed pixels are gathered and multiplied as one matrix. This costs a pixel
about what a dense convolution does, so that the work follows the number of changed pixels.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from eventful.ops import reference
from eventful.ops.packed import gathered_product, layer_weight
from eventful.ops.reference.maps import Changed, Lift, MapLayer, MapLevels

DENSE_SHARE = 0.78  # of a level's pixels; beyond it a dense convolution was faster when measured
_CHUNK = 2048  # pixels gathered at once: more would need much memory, fewer many launches


def update_maps_(
    out_: Tensor,
    x: Tensor,
    layer: MapLayer,
    changed: Changed,
    levels: MapLevels,
    slots: Tensor | None = None,
) -> None:
    """See `reference.update_maps_`."""
    if x.device.type != "cpu":
        return reference.update_maps_(out_, x, layer, changed, levels, slots)
    mask = changed.mask
    rows = range(len(mask)) if slots is None else slots.tolist()
    for stream, row in enumerate(rows):
        moved = mask[stream]
        for level in range(len(levels.sizes)):
            pixel = moved[levels.span(level)].nonzero()[:, 0]
            size = levels.sizes[level][0] * levels.sizes[level][1]
            if len(pixel) == 0:
                continue
            if len(pixel) > DENSE_SHARE * size:
                whole = layer.whole(levels.part(x[row : row + 1], level), level).flatten(0, 2)
                _write(out_[row], pixel, whole, levels.offsets[level])
            else:
                _update_few(out_[row], x[row], layer, pixel + levels.offsets[level], level, levels)
    return None


def _write(out_: Tensor, pixel: Tensor, whole: Tensor, start: int) -> None:
    """Write the pixels (n,) of a level, computed whole (h * w, C'), to a map (P, C')."""
    if len(pixel) == len(whole):
        out_[start : start + len(whole)] = whole
    else:
        out_.index_copy_(0, pixel + start, whole.index_select(0, pixel).to(out_.dtype))


def _update_few(
    out_: Tensor, x: Tensor, layer: MapLayer, pixel: Tensor, level: int, levels: MapLevels
) -> None:
    """Compute the pixels (n,) of one level, of maps (P, C) and (P, C')."""
    entry = min(level, len(layer.weight) - 1)
    matrix, taps = layer.weight[entry].flatten(0, 1), layer.weight.shape[1]
    packed = layer_weight(layer, entry, matrix)
    for some in pixel.split(_CHUNK):  # type: ignore[no-untyped-call]
        near = some if taps == 1 else _neighbours(levels)[some].flatten()
        products = gathered_product(x, near, taps, matrix, packed)
        out_.index_copy_(0, some, layer.finish(products, level).to(out_.dtype))


@lru_cache(maxsize=8)
def _neighbours(levels: MapLevels) -> Tensor:
    """(P, 9) the pixels around each pixel, row by row; -1 outside its level."""
    found = []
    for (high, wide), start in zip(levels.sizes, levels.offsets, strict=True):
        index = torch.full((high + 2, wide + 2), -1)
        index[1:-1, 1:-1] = torch.arange(high * wide).view(high, wide) + start
        found.append(index.unfold(0, 3, 1).unfold(1, 3, 1).reshape(high * wide, 9))
    return torch.cat(found)


def lift_tokens_(
    out_: Tensor,
    tokens: Tensor,
    lift: Lift,
    changed: Changed,
    grid: tuple[int, int],
    place: int,
    slots: Tensor | None = None,
) -> None:
    """See `reference.lift_tokens_`."""
    if tokens.device.type != "cpu":
        return reference.lift_tokens_(out_, tokens, lift, changed, grid, place, slots)
    rows = range(len(changed.mask)) if slots is None else slots.tolist()
    wide, scale = grid[1], lift.scale
    step = torch.arange(scale)
    corner = (step[:, None] * (wide * scale) + step).flatten()  # of the pixels of one token
    packed = layer_weight(lift, 0, lift.weight)
    for stream, row in enumerate(rows):
        for token in changed.mask[stream].nonzero()[:, 0].split(_CHUNK):  # type: ignore[no-untyped-call]
            if len(token) == 0:
                continue
            products = gathered_product(tokens[stream], token, 1, lift.weight, packed)
            pixels = lift.finish(products).flatten(0, 1)
            first = (token // wide * scale) * (wide * scale) + token % wide * scale + place
            at = (first[:, None] + corner).flatten()
            out_[row].index_copy_(0, at, pixels.to(out_.dtype))
    return None
