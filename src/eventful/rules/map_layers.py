"""Layers of dense heads, computed on a rectangle of their output.

A layer says which input a rectangle needs, which outputs a changed input reaches, and computes the
rectangle. Rectangles are (1, C, h, w) with the channels innermost in memory. Nothing here keeps
anything; `rules.map_graph` puts layers together and says which maps are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful.errors import UnsupportedError

Size = tuple[int, int]


@dataclass(frozen=True)
class Region:
    """A rectangle of a map: rows `top` to `bottom - 1`, columns `left` to `right - 1`."""

    top: int
    bottom: int
    left: int
    right: int

    @classmethod
    def whole(cls, size: Size) -> Region:
        """All of a map (h, w)."""
        return cls(0, size[0], 0, size[1])

    @property
    def size(self) -> Size:
        """Height and width."""
        return self.bottom - self.top, self.right - self.left

    @property
    def pixels(self) -> int:
        """How many pixels it has."""
        return self.size[0] * self.size[1]

    def grown(self, by: int) -> Region:
        """With a margin, which may lie outside the map."""
        return Region(self.top - by, self.bottom + by, self.left - by, self.right + by)

    def within(self, size: Size) -> Region:
        """The part inside a map (h, w)."""
        return Region(
            max(self.top, 0), min(self.bottom, size[0]), max(self.left, 0), min(self.right, size[1])
        )

    def of(self, x: Tensor, at: Region) -> Tensor:
        """This part of a rectangle x (..., h, w) that lies at `at`."""
        rows = slice(self.top - at.top, self.bottom - at.top)
        return x[..., rows, self.left - at.left : self.right - at.left]


class TileLayer(Protocol):
    """What a layer of a dense head can do."""

    def sizes(self, size: Size) -> Size:
        """The size of its output for an input of size (h, w)."""
        ...

    def channels(self, before: int) -> int:
        """The channels of its output."""
        ...

    def needed(self, region: Region) -> Region:
        """The input that a rectangle of the output is made of; it may lie outside the map."""
        ...

    def reached(self, changed: Tensor) -> Tensor:
        """Changed inputs (B, h, w) as outputs that they change (B, h', w')."""
        ...

    def run(self, x: Tensor, at: Region, region: Region, size: Size) -> Tensor:
        """A rectangle of the output.

        Args:
            x: (1, C, h, w) the needed input inside the map, which lies at `at`.
            size: of the whole input.
        """
        ...

    @property
    def macs(self) -> int:
        """Operations of one pixel of the output."""
        ...


class _Pixelwise:
    """A layer that keeps the size of the map and looks at no neighbour."""

    @property
    def macs(self) -> int:
        """See `TileLayer`."""
        return 0

    def sizes(self, size: Size) -> Size:
        """See `TileLayer`."""
        return size

    def channels(self, before: int) -> int:
        """See `TileLayer`."""
        return before

    def needed(self, region: Region) -> Region:
        """See `TileLayer`."""
        return region

    def reached(self, changed: Tensor) -> Tensor:
        """See `TileLayer`."""
        return changed


class Pointwise(_Pixelwise):
    """A function of each value by itself, such as an activation."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def run(self, x: Tensor, at: Region, region: Region, size: Size) -> Tensor:
        """See `TileLayer`."""
        return self.function(x)


class Convolution:
    """A 1 x 1 or 3 x 3 convolution with zero padding, stride 1 or 2.

    Args:
        norm: a batch norm behind it, which becomes part of weight and bias.
    """

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d | None = None) -> None:
        kernel, stride = conv.kernel_size, conv.stride
        plain = conv.groups == 1 and conv.dilation == (1, 1) and conv.padding_mode == "zeros"
        near = kernel in ((1, 1), (3, 3)) and conv.padding == (kernel[0] // 2,) * 2
        if not (plain and near and stride in ((1, 1), (2, 2)) and kernel[0] >= stride[0]):
            raise UnsupportedError(f"{conv} is not a 1 x 1 or 3 x 3 convolution with zero padding.")
        self.conv, self.norm = conv, norm
        self.taps, self.stride = kernel[0], stride[0]

    @cached_property
    def weights(self) -> tuple[Tensor, Tensor | None]:
        """Weight (C', C, k, k) with the channels innermost, and bias (C')."""
        weight, bias = self.conv.weight.detach(), self.conv.bias
        if self.norm is not None:
            weight, bias = _normed(weight, bias, self.norm)
        bias = None if bias is None else bias.detach()
        return weight.contiguous(memory_format=torch.channels_last), bias

    @property
    def macs(self) -> int:
        """See `TileLayer`."""
        return self.conv.weight.numel()

    def sizes(self, size: Size) -> Size:
        """See `TileLayer`."""
        return (size[0] - 1) // self.stride + 1, (size[1] - 1) // self.stride + 1

    def channels(self, before: int) -> int:
        """See `TileLayer`."""
        return self.conv.out_channels

    def needed(self, region: Region) -> Region:
        """See `TileLayer`."""
        step, reach = self.stride, self.taps // 2
        return Region(
            step * region.top - reach,
            step * (region.bottom - 1) + reach + 1,
            step * region.left - reach,
            step * (region.right - 1) + reach + 1,
        )

    def reached(self, changed: Tensor) -> Tensor:
        """See `TileLayer`."""
        wider = dilated(changed) if self.taps > 1 else changed
        return wider[:, :: self.stride, :: self.stride]

    def run(self, x: Tensor, at: Region, region: Region, size: Size) -> Tensor:
        """See `TileLayer`."""
        weight, bias = self.weights
        if self.taps == 1:
            # As a product: convolutions make code for every size of their input, and keep it.
            rows = F.linear(x.permute(0, 2, 3, 1), weight[:, :, 0, 0], bias)
            return rows.permute(0, 3, 1, 2)
        want = self.needed(region)
        left, right = at.left - want.left, want.right - at.right
        top, bottom = at.top - want.top, want.bottom - at.bottom
        margin = (0, 0)
        if (top, left) == (bottom, right):
            margin = (top, left)
        else:
            x = F.pad(x, (left, right, top, bottom))
        x = x.contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, weight, bias, self.stride, margin)


def _normed(
    weight: Tensor, bias: Tensor | None, norm: nn.BatchNorm2d
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a convolution and the batch norm behind it as one."""
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None or norm.weight is None:
        raise UnsupportedError(f"{norm} has no running statistics or no weight.")
    scale = norm.weight.double() / (variance.double() + norm.eps).sqrt()
    start = 0.0 if bias is None else bias.double()
    shifted = norm.bias.double() + (start - mean.double()) * scale
    made = weight.double() * scale[:, None, None, None]
    return made.to(weight.dtype), shifted.detach().to(weight.dtype)


class Lift:
    """A transposed convolution without overlap: each pixel becomes `scale` x `scale` others."""

    def __init__(self, conv: nn.ConvTranspose2d) -> None:
        kernel = conv.kernel_size
        plain = conv.groups == 1 and conv.dilation == (1, 1) and conv.padding == (0, 0)
        alone = kernel == conv.stride and kernel[0] == kernel[1] and conv.output_padding == (0, 0)
        if not (plain and alone):
            raise UnsupportedError(f"{conv} is not a transposed convolution without overlap.")
        self.conv, self.scale = conv, kernel[0]

    @cached_property
    def weights(self) -> tuple[Tensor, Tensor | None]:
        """Weight (scale * scale * C', C), and bias of as many."""
        weight = self.conv.weight.detach().permute(2, 3, 1, 0).flatten(0, 2).contiguous()
        bias = self.conv.bias
        return weight, None if bias is None else bias.detach().repeat(self.scale**2)

    @property
    def macs(self) -> int:
        """See `TileLayer`."""
        return self.conv.in_channels * self.conv.out_channels

    def sizes(self, size: Size) -> Size:
        """See `TileLayer`."""
        return size[0] * self.scale, size[1] * self.scale

    def channels(self, before: int) -> int:
        """See `TileLayer`."""
        return self.conv.out_channels

    def needed(self, region: Region) -> Region:
        """See `TileLayer`."""
        step = self.scale
        return Region(
            region.top // step, -(-region.bottom // step),
            region.left // step, -(-region.right // step),
        )  # fmt: skip

    def reached(self, changed: Tensor) -> Tensor:
        """See `TileLayer`."""
        return changed.repeat_interleave(self.scale, 1).repeat_interleave(self.scale, 2)

    def run(self, x: Tensor, at: Region, region: Region, size: Size) -> Tensor:
        """See `TileLayer`."""
        (high, wide), step = at.size, self.scale
        rows = F.linear(x.permute(0, 2, 3, 1), *self.weights)
        rows = rows.view(len(x), high, wide, step, step, -1).transpose(2, 3)
        pixels = rows.reshape(len(x), high * step, wide * step, -1).permute(0, 3, 1, 2)
        made = Region(*(step * edge for edge in (at.top, at.bottom, at.left, at.right)))
        return region.of(pixels, made)


class ResidualUnit(_Pixelwise):
    """x plus two 3 x 3 convolutions of it, with an activation ahead of each.

    One layer, because x serves twice and what lies between the convolutions is kept nowhere.
    """

    def __init__(self, first: Convolution, second: Convolution) -> None:
        self.first, self.second = first, second

    @property
    def macs(self) -> int:
        """See `TileLayer`."""
        return self.first.macs + self.second.macs

    def needed(self, region: Region) -> Region:
        """See `TileLayer`."""
        return region.grown(2)

    def reached(self, changed: Tensor) -> Tensor:
        """See `TileLayer`."""
        return dilated(dilated(changed))

    def run(self, x: Tensor, at: Region, region: Region, size: Size) -> Tensor:
        """See `TileLayer`."""
        between = region.grown(1).within(size)
        inner = self.first.run(F.relu(x), at, between, size)
        made = self.second.run(inner.relu_(), between, region, size)
        return made.add_(region.of(x, at))


class Resize(_Pixelwise):
    """Bilinear resizing of a map (h, w) to another size, as `F.interpolate` does it."""

    def __init__(self, before: Size, after: Size, *, align_corners: bool) -> None:
        self.before, self.after, self.align_corners = before, after, align_corners
        self._rows, self._columns = (
            _Axis.of(*pair, align_corners) for pair in zip(before, after, strict=True)
        )

    def sizes(self, size: Size) -> Size:
        """See `TileLayer`."""
        return self.after

    def needed(self, region: Region) -> Region:
        """See `TileLayer`."""
        rows, columns = self._rows, self._columns
        return Region(
            *rows.needed(region.top, region.bottom), *columns.needed(region.left, region.right)
        )

    def reached(self, changed: Tensor) -> Tensor:
        """See `TileLayer`."""
        return self._columns.reached(self._rows.reached(changed, 1), 2)

    def run(self, x: Tensor, at: Region, region: Region, size: Size) -> Tensor:
        """See `TileLayer`."""
        pixels = x.permute(0, 2, 3, 1)
        pixels = self._rows.between(pixels, 1, region.top, region.bottom, at.top)
        pixels = self._columns.between(pixels, 2, region.left, region.right, at.left)
        return pixels.permute(0, 3, 1, 2)


@dataclass(frozen=True, eq=False)
class _Axis:
    """Resizing along one axis.

    Attributes:
        low, high: the two inputs of each output; the same one where one is enough.
        share: the weight of `high`.
    """

    low: Tensor
    high: Tensor
    share: Tensor

    @classmethod
    def of(cls, before: int, after: int, align_corners: bool) -> _Axis:
        """The rule of `F.interpolate`, in its precision."""
        index = torch.arange(after, dtype=torch.float32)
        if align_corners:
            place = index * ((before - 1) / (after - 1) if after > 1 else 0.0)
        else:
            place = ((index + 0.5) * (before / after) - 0.5).clamp_min(0)
        low = place.long().clamp_max(before - 1)
        share = (place - low).clamp(0, 1)
        high = torch.where(share > 0, low + 1, low).clamp_max(before - 1)
        return cls(low, high, share)

    def needed(self, first: int, last: int) -> tuple[int, int]:
        """The inputs of outputs `first` to `last - 1`."""
        return int(self.low[first]), int(self.high[last - 1]) + 1

    def reached(self, changed: Tensor, dim: int) -> Tensor:
        """Changed inputs as changed outputs, along one axis."""
        return changed.index_select(dim, self.low) | changed.index_select(dim, self.high)

    def between(self, x: Tensor, dim: int, first: int, last: int, start: int) -> Tensor:
        """Outputs `first` to `last - 1` along an axis of x (1, h, w, C), inputs from `start` on."""
        span = slice(first, last)
        low = x.index_select(dim, self.low[span] - start)
        high = x.index_select(dim, self.high[span] - start)
        return torch.lerp(low, high, self.share[span].view(-1, *[1] * (3 - dim)))


def dilated(changed: Tensor) -> Tensor:
    """A mask (B, h, w) with the pixels around each marked one marked, too."""
    taller = changed.clone()
    taller[:, 1:] |= changed[:, :-1]
    taller[:, :-1] |= changed[:, 1:]
    wider = taller.clone()
    wider[:, :, 1:] |= taller[:, :, :-1]
    wider[:, :, :-1] |= taller[:, :, 1:]
    return wider
