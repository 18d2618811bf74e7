"""A transformer block as the update rules see it, whatever library it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from eventful.config import Config
from eventful.cost.counting import BlockShape, LinearCost
from eventful.tokens.layout import TokenLayout

TokenMap = Callable[[Tensor], Tensor]
# (tokens (B, M, D), their indices (B, M), positions) -> q, k, v, each (B, M, H*d)
QKVMap = Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor, Tensor]]
# token layout -> bias (H, N, N) of every head, query and key
BiasTable = Callable[[TokenLayout], Tensor]
# attention grid (h, w) -> vectors between rows (h, h, d) and between columns (w, w, d)
RelativeTables = Callable[[tuple[int, int]], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class BlockSpec:
    """y = x + project(attention(qkv(norm1(x)))); z = y + mlp(norm2(y)) (Eq. 1-2).

    Every map is token-wise: it treats each token alone, so running it on some of the
    tokens gives the same rows as running it on all. `project` and `mlp` include whatever
    the model puts between them and the residual sum, but for a layer scale given apart.

    Attributes:
        module: the block itself.
        qkv: includes q/k norm and rotary position, hence the indices and the opaque
            `positions` that the adapter reads from the block's call.
        scale: factor on the query-key product.
        project_scale, mlp_scale: layer scales (D,) on `project` and `mlp`; None without.
        window: size of the attention's windows, None for global.
        window_pads: windows that reach over the border of the grid hold padding tokens there, whose
            input is 0; else they end at the border.
        tiling: number of windows down and across, where that is fixed and their size is not.
        relative: decomposed relative position, None without.
        bias: added to the scaled query-key product of global attention; depends on the weights
            and the layout alone. None without.
        parallel: the MLP takes the block's input too: z = x + project(...) + mlp(norm2(x)).
        next_norm: norm1 of the block that follows, None for the last.
        name, trunk, index, depth, first, last: the block's place among the converted blocks of
            its trunk, filled in by `convert`.
        context: names of the trunk's blocks whose attention selection by context follows.
    """

    module: nn.Module
    dim: int
    heads: int
    head_dim: int
    scale: float
    norm1: TokenMap
    qkv: QKVMap
    project: TokenMap
    norm2: TokenMap
    mlp: TokenMap
    qkv_cost: LinearCost
    project_cost: LinearCost
    mlp_cost: LinearCost
    window: tuple[int, int] | None = None
    window_pads: bool = True
    tiling: tuple[int, int] | None = None
    relative: RelativeTables | None = None
    bias: BiasTable | None = None
    project_scale: Tensor | None = None
    mlp_scale: Tensor | None = None
    parallel: bool = False
    next_norm: TokenMap | None = None
    name: str = ""
    trunk: str = ""
    index: int = 0
    depth: int = 1
    first: bool = False
    last: bool = False
    context: tuple[str, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether attention is global, without relative position."""
        return not self.windowed and self.relative is None and self.bias is None

    @property
    def followed(self) -> bool:
        """Whether selection by context follows this block's attention."""
        return self.name in self.context

    @property
    def windowed(self) -> bool:
        """Whether attention stays inside windows."""
        return self.window is not None or self.tiling is not None

    def window_on(self, grid: tuple[int, int]) -> tuple[int, int] | None:
        """Size of the windows on a grid of tokens, None for global attention."""
        if self.tiling is None:
            return self.window
        return -(-grid[0] // self.tiling[0]), -(-grid[1] // self.tiling[1])

    def projected(self, attended: Tensor) -> Tensor:
        """What attention adds to the tokens."""
        update = self.project(attended)
        return update if self.project_scale is None else update * self.project_scale

    def transformed(self, normed: Tensor) -> Tensor:
        """What the MLP adds to the tokens."""
        update = self.mlp(normed)
        return update if self.mlp_scale is None else update * self.mlp_scale

    def gate_name(self, kind: str) -> str:
        """Full name of one of the block's gates; the frame gate belongs to the trunk."""
        return ".".join(
            part for part in (self.trunk if kind == "frame" else self.name, kind) if part
        )

    def slot(self, name: str) -> str:
        """Name of one of the block's tensors in the state."""
        return f"{self.name}/{name}"

    def shape(self, layout: TokenLayout, config: Config) -> BlockShape:
        """The numbers that counting and state size depend on."""
        return BlockShape(
            tokens=layout.tokens,
            heads=self.heads,
            head_dim=self.head_dim,
            dim=self.dim,
            qkv=self.qkv_cost,
            projection=self.project_cost,
            mlp=self.mlp_cost,
            grid=layout.grid,
            window=self.window_on(layout.grid),
            window_pads=self.window_pads,
            relative=self.relative is not None,
            pool=1 if self.windowed else config.pool,
        )


def is_layer_norm(norm: Any) -> bool:
    """Whether a map is an ordinary layer norm over the channels, free of hooks.

    Libraries derive classes of the same name that compute the same.
    """
    return (
        isinstance(norm, nn.LayerNorm)
        and type(norm).__name__ == "LayerNorm"
        and len(norm.normalized_shape) == 1
        and not norm._forward_hooks
        and not norm._forward_pre_hooks
    )


def linear_cost(*modules: nn.Module | None) -> LinearCost:
    """Cost per token of every linear layer inside the given modules."""
    total = LinearCost()
    for module in modules:
        for layer in module.modules() if module is not None else ():
            if isinstance(layer, nn.Linear):
                bias = 0 if layer.bias is None else layer.out_features
                total = total + LinearCost(layer.in_features * layer.out_features, bias)
    return total
