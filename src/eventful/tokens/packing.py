"""Selected tokens of several streams one after another, without the padding between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eventful import ops
from eventful.tokens.selection import Selection

WORTH = 0.75  # of the padded rows: with more real ones than that, packing gains little


@dataclass(frozen=True, eq=False)
class FlatSelection(Selection):
    """Tokens of all streams as one selection of B*N tokens: `index` is (1, P).

    Memories (B, N, ...) are seen as one stream (1, B*N, ...), so that packed rows are read and
    written without padding.
    """

    def gather(self, source: Tensor, dim: int = 1) -> Tensor:
        """The selected entries (1, P, ...) of a memory."""
        return super().gather(source.flatten(0, 1)[None], dim)

    def scatter_(self, destination: Tensor, values: Tensor, dim: int = 1) -> None:
        """Write packed rows to a memory."""
        if destination.is_contiguous():
            super().scatter_(destination.view(1, -1, *destination.shape[2:]), values, dim)
            return
        place, tokens = self.index[0], destination.shape[1]
        destination[place // tokens, place % tokens] = values[0].to(destination.dtype)


@dataclass(frozen=True, eq=False)
class Packing:
    """The rows of a selection whose streams differ in their number of tokens.

    Attributes:
        selection: (B, M).
        index: (1, P) token of each row, stream by stream.
        source: (P,) slot of each row, among the B*M slots of the selection.
        home: (B, M) row of each slot; a padded slot has that of its twin.
        counts: rows of each stream; None where the host does not know them. Rows past the last
            stream's are then padding.
        target: what rows are written with, once they are `placed`: all streams as one where the
            host knows the counts, else `selection`.
    """

    selection: Selection
    index: Tensor
    source: Tensor
    home: Tensor
    counts: tuple[int, ...] | None
    target: Selection

    @classmethod
    def of(cls, selection: Selection, rows: int | None = None) -> Packing | None:
        """The packed rows of a selection; None where that would not save much.

        Args:
            rows: P, no less than are selected; None to ask the host how many they are.
        """
        if rows is not None:
            return None if selection.is_everything else cls._make(selection, rows, None)
        if selection.batch < 2 or selection.count is None or selection.is_everything:
            return None
        counts = tuple(selection.count.tolist())
        if not 0 < sum(counts) <= WORTH * selection.batch * selection.width:
            return None
        return cls._make(selection, sum(counts), counts)

    @classmethod
    def _make(cls, selection: Selection, rows: int, counts: tuple[int, ...] | None) -> Packing:
        count, width = selection.counts, selection.width
        ends = count.cumsum(0)
        starts = (ends - count)[:, None]
        slot = torch.arange(width, device=count.device)
        home = starts + torch.where(slot < count[:, None], slot, 0)
        row = torch.arange(rows, device=count.device)
        stream = torch.searchsorted(ends, row, right=True)
        inside = stream < selection.batch
        stream = stream.clamp_max(selection.batch - 1)
        source = torch.where(inside, stream * width + row - starts[stream, 0], 0)
        index = selection.index.flatten()[source][None]
        target = selection
        if counts is not None:
            place = index + (stream * selection.tokens)[None]
            target = FlatSelection(place, selection.batch * selection.tokens)
        return cls(selection, index, source, home.clamp_max(rows - 1), counts, target)

    @property
    def by_stream(self) -> bool:
        """Whether the host knows the rows of each stream."""
        return self.counts is not None

    def placed(self, rows: Tensor) -> Tensor:
        """Rows (1, P, D) as `target` takes them."""
        return rows if self.by_stream else self.unpack(rows)

    def pack(self, slots: Tensor) -> Tensor:
        """Rows (1, P, D) of the values (B, M, D) of all slots."""
        return slots.flatten(0, 1).index_select(0, self.source)[None]

    def unpack(self, rows: Tensor) -> Tensor:
        """Values (B, M, D) of all slots, from rows (1, P, D)."""
        taken = rows[0].index_select(0, self.home.flatten())
        return taken.view(*self.home.shape, *rows.shape[2:])

    def take(self, tokens: Tensor) -> Tensor:
        """Rows (1, P, D) of the selected of all tokens (B, N, D)."""
        stream = self.source // self.selection.width
        place = stream * tokens.shape[1] + self.index[0]
        return tokens.flatten(0, 1).index_select(0, place)[None]

    def streams(self) -> list[tuple[int, slice, Tensor]]:
        """Of each stream with selected tokens: its number, its rows, its tokens (1, m)."""
        assert self.counts is not None
        found, start = [], 0
        for stream, count in enumerate(self.counts):
            if count:
                rows = slice(start, start + count)
                found.append((stream, rows, self.index[:, rows]))
            start += count
        return found

    def ragged(self) -> ops.Ragged:
        """How many slots of each stream count, for attention."""
        return ops.Ragged(self.selection.counts, len(self.source))
