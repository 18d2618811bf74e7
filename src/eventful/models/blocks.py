"""The transformer block of both systems, and their position tables."""

from __future__ import annotations

import copy
import math
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful.errors import ConfigError
from eventful.rules.relative import RelativePosition, relative_vectors
from eventful.tokens.layout import TokenLayout

Resize = Literal["linear", "bicubic"]
Model = TypeVar("Model", bound=nn.Module)
NORM_EPS = 1e-6


class GridTables(nn.Module):
    """A module with position tables that depend on its weights and on a grid alone.

    Attributes:
        kept_grid: the grid whose tables are kept, see `at_size`; None if they are computed anew.
    """

    kept_grid: tuple[int, int] | None = None

    def compute_tables(self, grid: tuple[int, int]) -> tuple[Tensor, ...]:
        """The tables of a grid, from the weights."""
        raise NotImplementedError

    def tables(self, grid: tuple[int, int]) -> tuple[Tensor, ...]:
        """The tables of a grid: the kept ones, or computed."""
        if grid != self.kept_grid or self.training:
            return self.compute_tables(grid)
        return tuple(self.get_buffer(f"kept_{i}") for i in range(self._kept))

    @torch.no_grad()
    def keep_tables(self, grid: tuple[int, int]) -> None:
        """Compute the tables of a grid once."""
        made = self.compute_tables(grid)
        for i, table in enumerate(made):
            self.register_buffer(f"kept_{i}", table.clone(), persistent=False)
        self.kept_grid, self._kept = grid, len(made)


class Attention(GridTables):
    """Softmax attention, with decomposed relative position where `table` is given.

    Args:
        table: tokens on a side of the grid the relative tables were learned for.
        resize: rule for another grid, see `eventful.rules.relative.relative_vectors`.

    Attributes:
        pool: side of the cells over which keys and values are averaged, 1 for none.
    """

    def __init__(
        self, dim: int, heads: int, *, table: int | None = None, resize: Resize = "linear"
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ConfigError(f"{heads} heads do not divide a width of {dim}; choose a divisor.")
        self.heads, self.resize, self.pool = heads, resize, 1
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.rel_pos_h: nn.Parameter | None = None
        self.rel_pos_w: nn.Parameter | None = None
        if table is not None:
            self.rel_pos_h = nn.Parameter(torch.zeros(2 * table - 1, dim // heads))
            self.rel_pos_w = nn.Parameter(torch.zeros(2 * table - 1, dim // heads))

    def compute_tables(self, grid: tuple[int, int]) -> tuple[Tensor, ...]:
        """Vectors between the rows and between the columns of a grid; needs `table`."""
        assert self.rel_pos_h is not None
        assert self.rel_pos_w is not None
        return (
            relative_vectors(self.rel_pos_h, grid[0], self.resize),
            relative_vectors(self.rel_pos_w, grid[1], self.resize),
        )

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Attention among the tokens (B, N, D) of one grid."""
        parts = list(self.qkv(x).chunk(3, dim=-1))
        if self.pool > 1:
            layout = TokenLayout(grid, prefix=x.shape[1] - grid[0] * grid[1])
            parts[1:] = [layout.pool(part, self.pool) for part in parts[1:]]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        bias = None
        if self.rel_pos_h is not None:
            bias = RelativePosition(*self.tables(grid)).pooled(self.pool).bias_all(q)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)
        projected: Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return projected


class Mlp(nn.Module):
    """Two linear layers with an exact GELU between."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Token by token."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class Block(nn.Module):
    """y = x + attention(norm1(x)); z = y + mlp(norm2(y)), the attention global or in windows.

    Args:
        window: tokens on a side of the attention window, None for global attention. Windows are
            padded at the bottom right, after the norm.
        drop_path: probability of skipping a branch of the residual sum for a sample in training.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mlp_ratio: float = 4.0,
        *,
        window: int | None = None,
        table: int | None = None,
        resize: Resize = "linear",
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.window, self.drop_path = window, drop_path
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.attn = Attention(dim, heads, table=table, resize=resize)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp = Mlp(dim, round(dim * mlp_ratio))

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Tokens (B, N, D) in, tokens out; `grid` is that of the patches."""
        x = x + self._kept(self._attend(self.norm1(x), grid))
        return x + self._kept(self.mlp(self.norm2(x)))

    def _attend(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        if self.window is None:
            out: Tensor = self.attn(x, grid)
            return out
        side, (height, width) = self.window, grid
        image = F.pad(x.unflatten(1, grid), (0, 0, 0, -width % side, 0, -height % side))
        # (B, rows of windows, side, columns of windows, side, D), then window by window
        windows = image.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3)
        attended = self.attn(windows.flatten(3, 4).flatten(0, 2), (side, side))
        image = attended.reshape(windows.shape).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return image[:, :height, :width].flatten(1, 2)

    def _kept(self, branch: Tensor) -> Tensor:
        if not self.training or not self.drop_path:
            return branch
        keep = 1 - self.drop_path
        mask = torch.rand(len(branch), 1, 1, device=branch.device) < keep
        return branch * mask.to(branch.dtype) / keep


class PositionedTrunk(GridTables):
    """Blocks behind an added position embedding, which is the one of its `tables`."""

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Patches of frames of `size` (height, width) pixels."""
        raise NotImplementedError


def pooled(model: Model, cells: int) -> Model:
    """The same weights, with keys and values of all global blocks averaged over cells.

    This is the paper's use of spatial redundancy (Section 5.3), dense. To have it eventful,
    convert the model as it is with `Config(pool=...)`.
    """
    made = sharing_weights(model)
    for block in made.modules():
        if isinstance(block, Block) and block.window is None:
            block.attn.pool = cells
    return made


def at_size(model: Model, size: tuple[int, int]) -> Model:
    """The same weights, with all position tables resized once for frames of one size.

    This is for a dense model that sees one size only. Frames of other sizes run as before. The
    tables do not follow the weights: where those change, make another. A model without such
    tables is returned as it is.

    Args:
        size: height and width of the frames in pixels.
    """
    if not any(isinstance(part, PositionedTrunk) for part in model.modules()):
        return model
    made = sharing_weights(model)
    for trunk in made.modules():
        if isinstance(trunk, PositionedTrunk):
            trunk.keep_tables(trunk.grid(size))
            for block in trunk.modules():
                if isinstance(block, Block) and block.attn.rel_pos_h is not None:
                    side = block.window
                    block.attn.keep_tables((side, side) if side else trunk.grid(size))
    return made


def sharing_weights(model: Model) -> Model:
    """A copy of the modules over the same parameters and buffers."""
    own = {id(part): part for part in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, own)  # parameters are known already, and stay shared


def resized_positions(table: Tensor, grid: tuple[int, int], special: int) -> Tensor:
    """A position table (1, special + s*s, D) for another grid, resized bicubically.

    Returns:
        (1, special + h*w, D); the rows of special tokens stay as they are.
    """
    side = math.isqrt(table.shape[1] - special)
    if grid == (side, side):
        return table
    first, rest = table[:, :special], table[:, special:]
    image = rest.transpose(1, 2).unflatten(2, (side, side))
    image = F.interpolate(image, grid, mode="bicubic", align_corners=False)
    return torch.cat([first, image.flatten(2).transpose(1, 2)], dim=1)


def init_transformer(module: nn.Module) -> None:
    """The usual start of a ViT: linear weights from a truncated normal, no biases."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.trunc_normal_(part.weight, std=0.02)
            nn.init.zeros_(part.bias)
