"""Maps of pixels made from tokens, brought up to date where something changed, in plain PyTorch.

A map is stored as rows of channels, one row per pixel. Maps of several sizes, the levels of a
pyramid, lie one after another in one tensor (S, P, C).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful.errors import UnsupportedError
from eventful.ops.reference.rows import held

Norm = tuple[Tensor, Tensor, float]  # weight, bias and eps of a layer norm over the channels


@dataclass(frozen=True)
class MapLevels:
    """Maps of several sizes, pixels one after another (row by row, level after level) on one axis.

    Attributes:
        sizes: (h, w) of each level.
    """

    sizes: tuple[tuple[int, int], ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first pixel of each level."""
        return tuple(accumulate((h * w for h, w in self.sizes[:-1]), initial=0))

    @cached_property
    def pixels(self) -> int:
        """P: pixels of all levels."""
        return sum(h * w for h, w in self.sizes)

    def span(self, level: int) -> slice:
        """The pixels of one level."""
        h, w = self.sizes[level]
        return slice(self.offsets[level], self.offsets[level] + h * w)

    def part(self, tensor: Tensor, level: int) -> Tensor:
        """One level of (B, P, C) as a view (B, h, w, C)."""
        return tensor[:, self.span(level)].view(len(tensor), *self.sizes[level], tensor.shape[2])


@dataclass(frozen=True, eq=False)
class MapLayer:
    """A convolution with what follows it at each pixel. Level l uses entry min(l, last) of each.

    Attributes:
        weight: (L or 1, taps, C, C'); 9 taps are 3 x 3, row by row, 1 tap is the pixel itself.
        bias: (L or 1, C'); None without.
        norm: a layer norm over C': weight and bias (L or 1, C'), eps; None without.
        relu: ReLU behind it all.
    """

    weight: Tensor
    bias: Tensor | None = None
    norm: Norm | None = None
    relu: bool = False

    def finish(self, products: Tensor, level: int) -> Tensor:
        """Bias, norm and ReLU of products (..., C') at a level; the products are written."""
        rows = products
        if self.bias is not None:
            rows = rows.add_(_of_level(self.bias, level))
        if self.norm is not None:
            weight, bias, eps = self.norm
            rows = F.layer_norm(
                rows, rows.shape[-1:], _of_level(weight, level), _of_level(bias, level), eps
            )
        return rows.relu_() if self.relu else rows

    def whole(self, x: Tensor, level: int) -> Tensor:
        """All pixels of a level (B, h, w, C) as (B, h, w, C')."""
        weight = _of_level(self.weight, level)
        taps, before, after = weight.shape
        if taps == 1:
            return self.finish(x @ weight[0], level)
        kernel = weight.view(3, 3, before, after).permute(3, 2, 0, 1)
        kernel = kernel.contiguous(memory_format=torch.channels_last)
        rows = F.conv2d(x.permute(0, 3, 1, 2), kernel, padding=1).permute(0, 2, 3, 1)
        return self.finish(rows, level)


def _of_level(values: Tensor, level: int) -> Tensor:
    return values[min(level, len(values) - 1)]


@dataclass(frozen=True, eq=False)
class Changed:
    """Changed pixels of maps, see `list_changed`.

    Attributes:
        mask: (B, P).
        count: (B,) of each stream.
        sizes: (h, w) of the levels they were listed for: the first ones of the maps.
        listed: a backend's own list of them; None where it needs none.
    """

    mask: Tensor
    count: Tensor
    sizes: tuple[tuple[int, int], ...]
    listed: tuple[Tensor, Tensor] | None = None


def list_changed(mask: Tensor, sizes: tuple[tuple[int, int], ...]) -> Changed:
    """The changed pixels of a mask (B, P), listed once for all layers that compute them.

    Args:
        sizes: (h, w) of the levels that are computed: the first ones of the P pixels.
    """
    used = sum(h * w for h, w in sizes)
    return Changed(mask, mask[:, :used].sum(dim=1), sizes)


def update_maps_(
    out_: Tensor,
    x: Tensor,
    layer: MapLayer,
    changed: Changed,
    levels: MapLevels,
    slots: Tensor | None = None,
) -> None:
    """out_[s, p] = layer(x)[s, p] where a pixel changed; other places keep their bits.

    3 x 3: stride 1, zero padding within each level.

    Args:
        out_: (S, P, C').
        x: (S, P, C).
        changed: pixels (B, P), listed for the sizes of `levels`.
        levels: of both maps; where they have more, the others are left as they are.
        slots: (B,) row of both that belongs to each stream; None if row b does.
    """
    source, span = held(x, slots), slice(levels.pixels)
    before = held(out_, slots)[:, span]
    parts = [
        layer.whole(levels.part(source, level), level).flatten(1, 2)
        for level in range(len(levels.sizes))
    ]
    mask = changed.mask[:, span, None]
    after = torch.where(mask, torch.cat(parts, dim=1).to(out_.dtype), before)
    _put_back(out_[:, span], after, slots)


@dataclass(frozen=True, eq=False)
class Lift:
    """A product of each token that makes `scale` x `scale` pixels of it.

    Attributes:
        weight: (D, scale * scale * C'), pixels row by row.
        bias: (C'); None without.
        norm: over C': weight and bias (C'), eps; None without.
        gelu: GELU behind it all.
    """

    weight: Tensor
    bias: Tensor | None = None
    norm: Norm | None = None
    gelu: bool = False
    scale: int = 1

    def pixels(self, tokens: Tensor) -> Tensor:
        """Tokens (..., D) as (..., scale * scale, C')."""
        return self.finish(tokens @ self.weight)

    def finish(self, products: Tensor) -> Tensor:
        """Bias, norm and GELU of products (..., scale * scale * C'), which are written."""
        made = products.view(*products.shape[:-1], self.scale**2, -1)
        if self.bias is not None:
            made.add_(self.bias)
        if self.norm is not None:
            made = F.layer_norm(made, made.shape[-1:], *self.norm)
        return F.gelu(made) if self.gelu else made


def lift_tokens_(
    out_: Tensor,
    tokens: Tensor,
    lift: Lift,
    changed: Changed,
    grid: tuple[int, int],
    place: int,
    slots: Tensor | None = None,
) -> None:
    """Write the pixels of each changed token; other places keep their bits.

    Args:
        out_: (S, P, C'); the map of size `grid * scale` begins at pixel `place`.
        tokens: (B, n, D), one row per stream b; they may be pixels of another map.
        changed: tokens (B, n), listed for a grid of them.
        grid: (h, w) of the tokens, n = h * w.
        slots: (B,) row of `out_` that belongs to each stream; None if row b does.
    """
    (high, wide), scale = grid, lift.scale
    pixels = lift.pixels(tokens)
    pixels = pixels.view(len(tokens), high, wide, scale, scale, -1)
    pixels = pixels.permute(0, 1, 3, 2, 4, 5).flatten(1, 4)  # (B, h * scale * w * scale, C')
    moved = changed.mask.view(-1, high, 1, wide, 1).expand(-1, -1, scale, -1, scale).flatten(1)
    span = slice(place, place + pixels.shape[1])
    after = held(out_, slots).clone()
    after[:, span] = torch.where(moved[..., None], pixels.to(out_.dtype), after[:, span])
    _put_back(out_, after, slots)


def _put_back(out_: Tensor, rows: Tensor, slots: Tensor | None) -> None:
    if slots is None:
        out_.copy_(rows)
    else:
        out_.index_copy_(0, slots, rows)


def changed_pixels(
    tokens: Tensor, levels: MapLevels, scales: tuple[float, ...], reach: int
) -> Tensor:
    """Changed tokens (B, h, w) as changed pixels (B, P).

    A pixel changes where a changed token lies within `reach` pixels of it, counted along each axis.
    With scale 0.5 a pixel covers 2 x 2 tokens, and a last odd row or column belongs to none. With
    scale 0.25 the map is every other pixel of the finished map at scale 0.5, from the first on: the
    first step of the reach is one of that map, the others are of the coarser one.

    Args:
        scales: pixels to a token side, by level: a whole number, 0.5 or 0.25.
    """
    mask = tokens[:, None].to(torch.float32 if tokens.device.type == "cpu" else torch.float16)
    found = []
    for size, scale in zip(levels.sizes, scales, strict=True):
        pixels = _spread(mask, scale, reach)
        if tuple(pixels.shape[2:]) != size:
            raise UnsupportedError(
                f"A grid of {tuple(tokens.shape[1:])} tokens at scale {scale} has a map of "
                f"{tuple(pixels.shape[2:])} pixels, but the levels say {size}; correct the levels."
            )
        found.append(pixels.flatten(1))
    return torch.cat(found, dim=1) > 0


def _spread(mask: Tensor, scale: float, reach: int) -> Tensor:
    """A mask (B, 1, h, w) of tokens as a mask of the pixels of one level."""
    if scale >= 1 and math.floor(scale) == scale:
        times = int(scale)
        finer = mask.repeat_interleave(times, 2).repeat_interleave(times, 3)
        return _dilated(finer, reach, 1)
    if scale == 0.5:
        return _dilated(F.max_pool2d(mask, 2), reach, 1)
    if scale == 0.25:
        return _dilated(F.max_pool2d(mask, 2), max(2 * reach - 1, 0), 2)
    raise UnsupportedError(f"Scale {scale} is not known: use a whole number, 0.5 or 0.25.")


def _dilated(mask: Tensor, reach: int, stride: int) -> Tensor:
    if reach == 0:
        return mask[:, :, ::stride, ::stride]
    return F.max_pool2d(mask, 2 * reach + 1, stride=stride, padding=reach)
