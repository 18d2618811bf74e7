"""Which tokens a gate lets through: unique indices per stream, padded to a common length."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eventful import ops


@dataclass(frozen=True, eq=False)
class Selection:
    """M of N tokens for each of B streams.

    Streams may select different numbers of tokens. Short rows are padded by repeating
    their first index, so whatever is computed for a padded slot equals what its twin
    holds and writing both is harmless; rows with nothing selected are never written.

    Attributes:
        index: (B, M) token indices, ascending among the valid ones.
        tokens: N.
        count: (B,) valid slots per stream; None when every slot of every row is valid.
        places: (B, N) slot of each token, -1 for tokens not selected, where it is known.
        whole: every token has a slot, in order, though the rows of some streams may not count.
        wanted: (B,) tokens that wanted to pass before a ceiling; None where that is `counts`.
    """

    index: Tensor
    tokens: int
    count: Tensor | None = None
    places: Tensor | None = None
    whole: bool = False
    wanted: Tensor | None = None

    @classmethod
    def everything(cls, batch: int, tokens: int, device: torch.device | str) -> Selection:
        """All tokens of all streams."""
        return cls(torch.arange(tokens, device=device).expand(batch, tokens), tokens)

    @classmethod
    def nothing(cls, batch: int, tokens: int, device: torch.device | str) -> Selection:
        """No token of any stream."""
        return cls(torch.empty(batch, 0, dtype=torch.int64, device=device), tokens)

    @classmethod
    def of(cls, picked: ops.Picked, tokens: int, wanted: Tensor | None = None) -> Selection:
        """What a gate picked of N tokens."""
        count: Tensor | None = picked.count
        if picked.full or (picked.places is None and _all_count(picked)):
            count = None
        return cls(picked.index, tokens, count, picked.places, wanted=wanted)

    @classmethod
    def top(cls, score: Tensor, count: int | Tensor) -> Selection:
        """The `count` highest scores (B, N) of each stream; `count` may differ by stream, (B,)."""
        batch, tokens = score.shape
        if isinstance(count, int):
            if count >= tokens:
                return cls.everything(batch, tokens, score.device)
            # Stable: among equals the first wins, whatever the batch. `topk` promises nothing.
            order = score.argsort(dim=-1, descending=True, stable=True)
            return cls(order[:, : max(count, 0)].sort(dim=-1).values, tokens)
        order = score.argsort(dim=-1, descending=True, stable=True)
        rank = torch.arange(tokens, device=score.device).expand_as(order)
        mask = torch.zeros_like(score, dtype=torch.bool)
        mask.scatter_(1, order, rank < count[:, None])
        return cls.from_mask(mask)

    @classmethod
    def from_mask(cls, mask: Tensor) -> Selection:
        """The tokens where `mask` (B, N) is true."""
        index, count = ops.indices_of(mask)
        return cls(index, mask.shape[1], count)

    @property
    def batch(self) -> int:
        """B."""
        return self.index.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(B, N), the shape of its mask."""
        return self.batch, self.tokens

    @property
    def width(self) -> int:
        """M, the padded number of slots."""
        return self.index.shape[1]

    @property
    def is_everything(self) -> bool:
        """Whether every token of every stream is selected, hence in order."""
        return self.whole or (self.count is None and self.width == self.tokens)

    @property
    def valid(self) -> Tensor | None:
        """(B, M), false on padded slots; None when nothing is padded."""
        if self.count is None:
            return None
        return torch.arange(self.width, device=self.index.device) < self.count[:, None]

    @property
    def counts(self) -> Tensor:
        """(B,) tokens selected in each stream."""
        if self.count is not None:
            return self.count
        return torch.full((self.batch,), self.width, device=self.index.device)

    def mask(self) -> Tensor:
        """(B, N), true on selected tokens."""
        mask = torch.zeros(self.batch, self.tokens, dtype=torch.bool, device=self.index.device)
        if self.count is None:
            return mask.scatter_(1, self.index, True)
        mask.scatter_(1, self.index, True)
        return mask & (self.count > 0)[:, None]

    def located(self) -> Tensor:
        """`places`, worked out where they are not known."""
        if self.places is not None:
            return self.places
        slot = torch.arange(self.width, dtype=torch.int32, device=self.index.device)
        slots = slot.expand(self.batch, -1)
        if self.count is not None:  # a padded slot repeats the first token, which is slot 0
            slots = torch.where(slots < self.count[:, None], slots, 0)
            slots = torch.where((self.count > 0)[:, None], slots, -1)
        places = torch.full((self.batch, self.tokens), -1, dtype=torch.int32, device=slot.device)
        return places.scatter_(1, self.index, slots)

    def complement(self) -> Selection:
        """The tokens not selected."""
        return Selection.from_mask(~self.mask())

    def with_rows(self, rows: Tensor) -> Selection:
        """The same, with every token selected in the streams where `rows` (B,) is true."""
        return replace(Selection.from_mask(self.mask() | rows[:, None]), wanted=self.wanted)

    def gather(self, source: Tensor, dim: int = 1) -> Tensor:
        """The selected entries of `source` along its token axis `dim`."""
        return source if self.is_everything else ops.gather(source, self.index, dim)

    def scatter_(self, destination: Tensor, values: Tensor, dim: int = 1) -> None:
        """Write `values` to the selected entries of `destination` along `dim`."""
        if self.width == 0:
            return
        if self.is_everything:
            destination.copy_(values)
            return
        if self.count is not None:
            kept = (self.count > 0).view(-1, *[1] * (values.dim() - 1))
            values = torch.where(
                kept, values.to(destination.dtype), ops.gather(destination, self.index, dim)
            )
        ops.scatter_(destination, self.index, values, dim)


def _all_count(picked: ops.Picked) -> bool:
    """Whether every slot of every stream counts."""
    return bool((picked.count == picked.index.shape[1]).all())
