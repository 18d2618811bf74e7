"""Relative position: logits from queries and offsets (ViTDet, SAM), or a bias by place (BEiT)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from eventful import ops
from eventful.rules.spec import BlockSpec
from eventful.tokens.layout import TokenLayout


@dataclass(frozen=True, eq=False)
class RelativePosition:
    """Relative vectors of one attention: rows (h, kh, d) and columns (w, kw, d).

    Query t of the h x w grid lies at row t // w, column t % w; keys lie likewise on the
    kh x kw grid, which is smaller than the query grid where keys are pooled.
    """

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, spec: BlockSpec, grid: tuple[int, int], pool: int = 1) -> RelativePosition:
        """The vectors of a block's attention over a grid of queries, its keys pooled."""
        assert spec.relative is not None
        return cls(*(table.contiguous() for table in spec.relative(grid))).pooled(pool)

    def pooled(self, size: int) -> RelativePosition:
        """Average the key axis over cells of `size`, as the keys are."""
        if size == 1:
            return self

        def pool(table: Tensor) -> Tensor:
            return F.avg_pool1d(
                table.transpose(1, 2), size, ceil_mode=True, count_include_pad=False
            ).transpose(1, 2)

        return RelativePosition(pool(self.rows), pool(self.columns))

    def logits(self, q: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of queries (B, H, M, d) at grid places `index` (B or 1, M) in two parts."""
        return ops.relative_logits(q, self.rows, self.columns, index)

    def bias(self, q: Tensor, index: Tensor) -> Tensor:
        """Bias (B, H, M, K) of queries (B, H, M, d) at grid places `index` (B or 1, M)."""
        down, across = (part.transpose(1, 2) for part in self.logits(q, index))
        room = ops.scratch("bias of queries", (*down.shape, across.shape[-1]), down)
        return torch.add(down[..., :, None], across[..., None, :], out=room).flatten(-2)

    def bias_all(self, q: Tensor) -> Tensor:
        """Bias (B, H, N, K) of all queries in grid order, without a table per query."""
        height, width = self.rows.shape[0], self.columns.shape[0]
        grid = q.unflatten(2, (height, width))
        down = torch.einsum("bhyxd,ykd->bhyxk", grid, self.rows.to(q.dtype))
        across = torch.einsum("bhyxd,xkd->bhyxk", grid, self.columns.to(q.dtype))
        return (down[..., :, None] + across[..., None, :]).flatten(4).flatten(2, 3)

    def _logits_once(self, q: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """`logits` of queries at places that differ; many of them without a table for each."""
        batch, heads, count, size = q.shape
        height, width = self.rows.shape[0], self.columns.shape[0]
        if count * 4 < height * width:
            return self.logits(q, index)
        place = index[:, None, :, None].expand_as(q)
        grid = q.new_zeros(batch, heads, height * width, size).scatter_(2, place, q)
        grid = grid.view(batch, heads, height, width, size)
        whole = (
            torch.einsum("bhyxd,ykd->byxhk", grid, self.rows.to(q.dtype)),
            torch.einsum("bhyxd,xkd->byxhk", grid, self.columns.to(q.dtype)),
        )
        down, across = (ops.gather(part.flatten(1, 2).flatten(2), index) for part in whole)
        return down.view(batch, count, heads, -1), across.view(batch, count, heads, -1)

    def bias_at(self, q: Tensor, index: Tensor, keys: Tensor) -> Tensor:
        """Bias (B, H, M, J) of queries at `index` (B, M) toward keys at `keys` (B, J) only.

        A product with columns that hold two ones each picks and adds faster than indexing does.
        """
        down, across = self._logits_once(q, index)
        parts = torch.cat([down, across], dim=-1).transpose(1, 2)  # (B, H, M, kh + kw)
        height, width = self.rows.shape[1], self.columns.shape[1]
        place = torch.arange(height + width, device=q.device)[:, None]
        row, column = keys[:, None] // width, height + keys[:, None] % width
        ones = ((place == row) | (place == column)).to(q.dtype)  # (B, kh + kw, J)
        room = ops.scratch("bias at keys", (*parts.shape[:3], keys.shape[1]), parts)
        return torch.matmul(parts, ones[:, None], out=room)


@dataclass(frozen=True, eq=False)
class DenseBias:
    """A bias of one attention that depends on the places of query and key alone, (H, N, K)."""

    table: Tensor

    @classmethod
    def of(cls, spec: BlockSpec, layout: TokenLayout, pool: int = 1) -> DenseBias:
        """The bias of a block, averaged over the cells of pooled keys as the keys are."""
        assert spec.bias is not None
        table = spec.bias(layout).detach()
        if pool > 1:
            table = layout.pool(table.transpose(1, 2), pool).transpose(1, 2)
        return cls(table.contiguous())

    def bias(self, q: Tensor, index: Tensor) -> Tensor:
        """Bias (B, H, M, K) of queries (B, H, M, d) at places `index` (B or 1, M)."""
        return self.table[:, index].transpose(0, 1).to(q.dtype)

    def bias_all(self, q: Tensor) -> Tensor:
        """Bias (1, H, N, K) of all queries."""
        return self.table[None].to(q.dtype)

    def bias_at(self, q: Tensor, index: Tensor, keys: Tensor) -> Tensor:
        """Bias (B, H, M, J) of queries at `index` (B, M) toward keys at `keys` (B, J) only."""
        return self.table[:, index[:, :, None], keys[:, None]].transpose(0, 1).to(q.dtype)


def relative_vectors(
    table: Tensor, size: int, resize: Literal["linear", "bicubic"] = "linear"
) -> Tensor:
    """Vectors (size, size, d) between the places of one axis, from a table of offsets (2s - 1, d).

    Args:
        resize: rule where s is not `size`: `linear` resizes the table of offsets, as detectron2,
            timm and transformers do; `bicubic` the s x s table of vectors, as the authors do.
    """
    side = (table.shape[0] + 1) // 2
    if side != size and resize == "linear":
        table = F.interpolate(table.T[None], size=2 * size - 1, mode="linear")[0].T
        side = size
    place = torch.arange(side, device=table.device)
    vectors = table[place[:, None] - place[None, :] + side - 1]
    if side == size:
        return vectors
    image = F.interpolate(vectors.permute(2, 0, 1)[None], (size, size), mode="bicubic")
    return image[0].permute(1, 2, 0)


def linear_tables(attention: Any, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Vectors of both axes from an attention's `rel_pos_h` and `rel_pos_w`, resized linearly."""
    height, width = grid
    return (
        relative_vectors(attention.rel_pos_h, height),
        relative_vectors(attention.rel_pos_w, width),
    )
