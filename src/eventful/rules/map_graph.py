"""Maps made from maps: which are kept, and how the kept ones are brought up to date.

A dense head is described as a graph of maps. Some of them are kept in the state of the streams. A
kept map is brought up to date in tiles: of each tile that holds a reached pixel everything back to
the last kept maps is computed again, with as much of a margin as its layers need. So the maps in
between take no memory, and stay in the processor's cache. Pixels out of reach keep their bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eventful.rules.local import HeadMemory
from eventful.rules.map_layers import Region, Size, TileLayer

LEAST, MOST = 44, 88  # about the sides of a tile, for one thread; measured on a CPU


def tile_sides() -> tuple[float, float]:
    """The least and the most for the side of a tile.

    Threads share a tile: each of them has as much work at once, and as much in its cache.
    """
    scale = torch.get_num_threads() ** 0.5
    return LEAST * scale, MOST * scale


@dataclass(frozen=True, eq=False)
class Map:
    """One map of a head: given, or a layer of another one, or the sum of two.

    Attributes:
        size: (h, w).
        channels: C.
        sources: the maps it is made of; none if it is given.
        layer: of its one source; None for a sum.
        kept: its name in the memory of the head; None if it is not kept.
    """

    size: Size
    channels: int
    sources: tuple[Map, ...] = ()
    layer: TileLayer | None = None
    kept: str | None = None

    def then(self, layer: TileLayer, kept: str | None = None) -> Map:
        """A layer of this map."""
        size, channels = layer.sizes(self.size), layer.channels(self.channels)
        return Map(size, channels, (self,), layer, kept)

    def plus(self, other: Map, kept: str | None = None) -> Map:
        """The sum with a map of the same size."""
        return Map(self.size, self.channels, (self, other), None, kept)

    @property
    def tile(self) -> Size:
        """Sides of the tiles in which it is computed, all alike: code is made for every size.

        A smaller tile follows the change more closely. A larger one has less margin and fewer
        calls, until it no longer fits in the processor's cache.
        """
        least, most = tile_sides()
        high, wide = (
            -(-side // max(1, round(side / min(max(side / 4, least), most)))) for side in self.size
        )
        return high, wide

    def tiles(self, changed: Tensor) -> Iterator[Region]:
        """The tiles that hold a changed pixel of (h, w); those at the end may overlap."""
        high, wide = self.tile
        rows, columns = -(-self.size[0] // high), -(-self.size[1] // wide)
        padded = changed.new_zeros(rows * high, columns * wide)
        padded[: self.size[0], : self.size[1]] = changed
        some = padded.view(rows, high, columns, wide).any(3).any(1)
        for row, column in some.nonzero().tolist():
            top, left = (
                min(row * high, self.size[0] - high),
                min(column * wide, self.size[1] - wide),
            )
            yield Region(top, top + high, left, left + wide)

    def inner(self) -> Iterator[Map]:
        """This map and those before it, back to the last given or kept ones."""
        yield self
        for source in self.sources:
            if source.kept is None and source.sources:
                yield from source.inner()


def kept_bytes(maps: Sequence[Map], itemsize: int) -> int:
    """Bytes of the kept maps among these for one stream."""
    kept = (one for one in maps if one.kept is not None)
    return sum(one.size[0] * one.size[1] * one.channels * itemsize for one in kept)


class MapUpdate:
    """Brings the kept maps of a head up to date, in one step of B streams.

    Args:
        given: (B, h, w, C) values of the given maps.
        changed: (B, h, w) which of their pixels changed.
    """

    def __init__(
        self, memory: HeadMemory, given: Mapping[Map, Tensor], changed: Mapping[Map, Tensor]
    ) -> None:
        self.memory = memory
        self._values, self._changed = dict(given), dict(changed)
        self._work: dict[Map, list[int]] = {}

    def changed(self, of: Map) -> Tensor:
        """The pixels (B, h, w) of a map that changed."""
        if of not in self._changed:
            before = [self.changed(source) for source in of.sources]
            one = before[0] if of.layer is None else of.layer.reached(before[0])
            self._changed[of] = one if len(before) == 1 else one | before[1]
        return self._changed[of]

    def values(self, of: Map) -> Tensor:
        """A given map, or a kept one that is up to date: (B, h, w, C), the memory itself."""
        return self._values[of]

    def bring(self, of: Map) -> Tensor:
        """Bring a kept map up to date: (B, h, w, C), the memory itself."""
        assert of.kept is not None
        changed, like = self.changed(of), next(iter(self._values.values()))
        held = self.memory.open(of.kept, changed.flatten(1), of.channels, like)
        values = held.unflatten(1, of.size)
        self._work = {one: [0] * len(changed) for one in of.inner()}
        for stream, (mask, target) in enumerate(zip(changed, values, strict=True)):
            for region in of.tiles(mask):
                made = self._made(of, region, stream)[0].permute(1, 2, 0)
                _write(target, mask, region, made)
        self._note(of, like.device)
        self._values[of] = values
        return values

    def whole(self, of: Map) -> Tensor:
        """A map, all of it, that later steps do not change: (B, C, h, w)."""
        streams = range(len(next(iter(self._values.values()))))
        parts = [self._at(of, Region.whole(of.size), stream) for stream in streams]
        return torch.cat(parts).clone(memory_format=torch.contiguous_format)

    def _at(self, of: Map, region: Region, stream: int) -> Tensor:
        """A rectangle (1, C, h, w) of a map: read where it is there, else computed."""
        if of in self._values:
            pixels = self._values[of][
                stream, region.top : region.bottom, region.left : region.right
            ]
            return pixels.permute(2, 0, 1)[None]
        return self._made(of, region, stream)

    def _made(self, of: Map, region: Region, stream: int) -> Tensor:
        """A rectangle of a map, computed."""
        if of in self._work:
            self._work[of][stream] += region.pixels
        if of.layer is None:
            first, second = (self._at(source, region, stream) for source in of.sources)
            return first + second
        (source,) = of.sources
        at = of.layer.needed(region).within(source.size)
        return of.layer.run(self._at(source, at, stream), at, region, source.size)

    def _note(self, of: Map, device: torch.device) -> None:
        for number, (one, pixels) in enumerate(self._work.items()):
            if one.layer is not None and one.layer.macs:
                places = one.size[0] * one.size[1]
                count = torch.tensor(pixels, device=device)
                self.memory.note(f"{of.kept}/{number}", one.layer.macs, places, count)
        self._work = {}


def _write(target: Tensor, mask: Tensor, region: Region, made: Tensor) -> None:
    """Write the marked pixels of a tile (h, w, C) to a map (H, W, C)."""
    rows, columns = slice(region.top, region.bottom), slice(region.left, region.right)
    inside, place = mask[rows, columns], target[rows, columns]
    if bool(inside.all()):
        place.copy_(made)
    else:
        place.copy_(torch.where(inside[..., None], made, place))
