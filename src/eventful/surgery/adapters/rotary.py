"""Rotary position of some tokens of many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from eventful.rules.spec import QKVMap

R = TypeVar("R", bound="Rotary")


class Rotary(tuple[Tensor, Tensor]):
    """(cos, sin) of tokens, each (N, d); keeps the rows that were gathered last.

    The layers of one frame share it, and with one selection per frame they all need the same
    rows. A channel is turned with the one half the channels away, in the dtype of the tokens.
    """

    _last: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def after(cls: type[R], ahead: int, tables: Sequence[Tensor]) -> R:
        """Tables with `ahead` more tokens before the first row, which are not rotated."""
        return cls(
            torch.cat([table.new_full((max(0, ahead), table.shape[1]), fill), table])
            for fill, table in zip((1, 0), tables, strict=True)
        )

    def rotate(self, tokens: Tensor, index: Tensor, prefix: int = 0) -> Tensor:
        """Rotate the heads of q or k (B, M, H*d) of the tokens at `index` (B, M).

        Args:
            prefix: tokens before the first row of the tables, which are not rotated.
        """
        if self._last is None or self._last[0] is not index:
            cos, sin = self.after(prefix, self) if prefix else self
            self._last = (index, cos[index][:, :, None], sin[index][:, :, None])
        _, cos, sin = self._last  # (B, M, 1, d)
        x = tokens.unflatten(-1, (-1, cos.shape[-1]))  # (B, M, H, d)
        return self.turned(x, cos, sin).flatten(-2)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, M, H, d), turned."""
        return x * cos + self.partner(x) * sin

    def partner(self, x: Tensor) -> Tensor:
        """For each channel, that by which it is turned, with its sign."""
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)


class SingleRotary(Rotary):
    """Rotary position in single precision."""

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `Rotary`."""
        return super().turned(x.float(), cos.float(), sin.float()).type_as(x)


class RotaryPairs(SingleRotary):
    """Rotary position of neighbouring channels, in single precision."""

    def partner(self, x: Tensor) -> Tensor:
        """See `Rotary`."""
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((-second, first), dim=-1).flatten(-2)


def rotated_qkv(
    query: Callable[[Tensor], Tensor],
    key: Callable[[Tensor], Tensor],
    value: Callable[[Tensor], Tensor],
) -> QKVMap:
    """The QKV map of three layers, whose positions are a `Rotary` that turns queries and keys."""

    def qkv(x: Tensor, index: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        return rotary.rotate(query(x), index), rotary.rotate(key(x), index), value(x)

    return qkv
