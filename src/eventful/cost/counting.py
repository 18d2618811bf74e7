"""Operations and bytes, computed from shapes in the paper's convention (Supplement C).

A multiply-accumulate is one operation. Linear transforms and their biases, matrix products,
the einsums of relative position, residual and position additions, gates and accumulators
count; embedding and heads do not. Nothing here runs a model: every number is a closed form
in the sizes of a block and in how many tokens each gate let through. `docs/counting.md`
derives the forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from eventful.errors import ConfigError


@dataclass(frozen=True)
class LinearCost:
    """What token-wise layers cost for one token."""

    macs: int = 0
    bias: int = 0

    def __add__(self, other: LinearCost) -> LinearCost:
        return LinearCost(self.macs + other.macs, self.bias + other.bias)

    @classmethod
    def layer(cls, inputs: int, outputs: int, *, bias: bool = True) -> LinearCost:
        """One `inputs` -> `outputs` linear transform."""
        return cls(inputs * outputs, outputs if bias else 0)


@dataclass(frozen=True)
class Operations:
    """Operations by type; they add up over blocks and multiply over frames."""

    linear: int = 0
    bias: int = 0
    matmul: int = 0
    einsum: int = 0
    add: int = 0
    gate: int = 0
    accumulator: int = 0
    motion: int = 0

    @property
    def total(self) -> int:
        """All types together."""
        return sum(vars(self).values())

    def __add__(self, other: Operations) -> Operations:
        return Operations(*map(int.__add__, vars(self).values(), vars(other).values()))

    def __mul__(self, times: int) -> Operations:
        return Operations(*(count * times for count in vars(self).values()))

    __rmul__ = __mul__

    def as_dict(self) -> dict[str, int]:
        """Type -> operations, in the order of the fields."""
        return dict(vars(self))


@dataclass(frozen=True)
class BlockShape:
    """The sizes of one transformer block on one token sequence.

    Attributes:
        tokens: N.
        heads: H.
        head_dim: channels of one head.
        dim: D, width of the residual stream.
        qkv: cost per token of the query, key and value transforms.
        projection: cost per token of the output transform of attention.
        mlp: cost per token of the MLP.
        grid: (h, w) of the patch tokens; needed with `window`, `relative` or `pool`.
        window: (h, w) of an attention window; None is global attention.
        window_pads: windows that reach over the border hold padding tokens; else they end there.
        relative: decomposed relative position terms.
        pool: side of the cells over which K and V are averaged; global attention only.
    """

    tokens: int
    heads: int
    head_dim: int
    dim: int
    qkv: LinearCost
    projection: LinearCost
    mlp: LinearCost
    grid: tuple[int, int] | None = None
    window: tuple[int, int] | None = None
    relative: bool = False
    pool: int = 1
    window_pads: bool = True

    def __post_init__(self) -> None:
        if self.grid is None and (self.window is not None or self.relative or self.pool > 1):
            raise ConfigError(
                "Windows, relative position and pooling are counted on a grid of patch tokens; "
                "pass grid=(h, w) to BlockShape."
            )
        if self.window is not None and self.pool > 1:
            raise ConfigError(
                "Pooling of K and V belongs to global attention; leave pool=1 in a windowed block."
            )

    @classmethod
    def plain(
        cls,
        *,
        tokens: int,
        dim: int,
        heads: int,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        grid: tuple[int, int] | None = None,
        window: tuple[int, int] | None = None,
        relative: bool = False,
        pool: int = 1,
    ) -> BlockShape:
        """The standard ViT block: fused QKV, projection and a two-layer MLP, all as wide as D."""
        hidden = int(dim * mlp_ratio)
        return cls(
            tokens=tokens,
            heads=heads,
            head_dim=dim // heads,
            dim=dim,
            qkv=LinearCost.layer(dim, 3 * dim, bias=qkv_bias),
            projection=LinearCost.layer(dim, dim),
            mlp=LinearCost.layer(dim, hidden) + LinearCost.layer(hidden, dim),
            grid=grid,
            window=window,
            relative=relative,
            pool=pool,
        )

    @property
    def width(self) -> int:
        """Channels of all heads together."""
        return self.heads * self.head_dim

    @property
    def extra(self) -> int:
        """Class, register and other tokens outside the grid; they are never pooled."""
        return self.tokens - self.grid[0] * self.grid[1] if self.grid else 0

    @property
    def keys(self) -> int:
        """N_k: the keys one query of global attention meets."""
        if self.grid is None:
            return self.tokens
        height, width = self._tiles((self.pool, self.pool))
        return self.extra + height * width

    @property
    def windows(self) -> int:
        """Windows that cover the grid; one for global attention."""
        if self.window is None:
            return 1
        rows, columns = self._tiles(self.window)
        return rows * columns

    @property
    def window_tokens(self) -> float:
        """S: tokens of one window, padding included, or the mean; all for global attention."""
        if self.window is None or not self.window_pads:
            return self.tokens / self.windows
        return self.window[0] * self.window[1]

    @property
    def padded(self) -> bool:
        """Whether windows reach past the grid, so that padding tokens attend."""
        if self.window is None or self.grid is None or not self.window_pads:
            return False
        return self.grid[0] % self.window[0] > 0 or self.grid[1] % self.window[1] > 0

    @property
    def window_keys(self) -> float:
        """Keys that a query of a windowed block meets; the mean where windows end at the border."""
        if self.window is None or self.grid is None or self.window_pads:
            return self.window_tokens
        sides = zip(self.grid, self.window, strict=True)
        each = [(side // step * step**2 + (side % step) ** 2) / side for side, step in sides]
        return each[0] * each[1]

    @property
    def sides(self) -> int:
        """Rows plus columns of the keys: the relative vectors one query meets."""
        return sum(self.window) if self.window else sum(self._tiles((self.pool, self.pool)))

    def _tiles(self, tile: tuple[int, int]) -> tuple[int, int]:
        height, width = self.grid or (0, 0)
        return -(-height // tile[0]), -(-width // tile[1])


@dataclass(frozen=True)
class BlockWork:
    """What one step of one stream did in one block.

    Attributes:
        qkv: M, tokens let through by the QKV gate (or by the block's, or the frame's).
        keys: M_k, pooled keys among them; equals `qkv` without pooling.
        projection: tokens let through by the projection gate.
        mlp: tokens let through by the MLP gate.
        windows: windows computed; None is all of them.
        rebased: query rows that `exact` recomputed for precision.
        waiting: rows that it recomputes in later steps; they cost nothing now.
        context: changed keys whose effect on all tokens selection by context followed.
        flush: everything was computed; the other fields do not matter.
    """

    qkv: int
    keys: int
    projection: int
    mlp: int
    windows: int | None = None
    rebased: int = 0
    waiting: int = 0
    context: int = 0
    flush: bool = False

    @classmethod
    def uniform(cls, selected: int, keys: int | None = None) -> BlockWork:
        """The same number of tokens at every gate, as top-r selects them."""
        return cls(selected, selected if keys is None else keys, selected, selected)


class Rule(Protocol):
    """The part of a configuration that decides what is computed; `Config` is one."""

    @property
    def gating(self) -> str:
        """`operator`, `block` or `frame`."""

    @property
    def attention(self) -> str:
        """`delta`, `delta-qk`, `delta-av`, `dense`, `exact` or `query`."""

    @property
    def overlap(self) -> str:
        """`twice` or `once`: how often `delta` computes a changed query on a changed key."""

    @property
    def windows(self) -> str:
        """`all` or `touched`."""


def count_dense(shape: BlockShape) -> Operations:
    """One block, everything computed: the original model, and also a flush."""
    tokens = shape.tokens
    operations = _tokenwise(shape, tokens, tokens, tokens) + _residuals(shape, tokens)
    if shape.window is None:
        return operations + _rows(shape, tokens, shape.keys)
    return operations + _windows(shape, round(shape.windows * shape.window_tokens))


def count_block(shape: BlockShape, rule: Rule, work: BlockWork) -> Operations:
    """One block, one step of one stream.

    Under `gating="frame"` the block has no gate of its own: add `count_frame_gate` once
    per step. A flush counts as the dense block, without gates and accumulators.
    """
    return _count(shape, _Rule(rule.gating, rule.attention, rule.overlap, rule.windows), work)


def count_frame_gate(tokens: int, dim: int) -> Operations:
    """The single gate of `gating="frame"`, on the embedded tokens, once per step."""
    return Operations(gate=tokens * dim)


def count_motion(grid_tokens: int, dim: int, carried: int) -> Operations:
    """Finding the motion of one frame and carrying memory along it, once per step.

    A comparison of two pixels is one operation. Sampling a row takes four numbers for each channel.

    Args:
        grid_tokens: tokens of the grid of patches.
        carried: tensors of that many rows, `dim` wide, that are carried.
    """
    return Operations(motion=grid_tokens * (_COMPARED + 4 * dim * carried))


def count_positions(tokens: int, dim: int) -> Operations:
    """Adding the position encoding ahead of the first block."""
    return Operations(add=tokens * dim)


def count_backbone(
    shapes: Sequence[BlockShape],
    rule: Rule | None = None,
    works: Sequence[BlockWork] | None = None,
) -> Operations:
    """One step of all blocks and the position encoding; dense where `rule` and `works` are None."""
    first = shapes[0]
    operations = count_positions(first.tokens, first.dim)
    if rule is None or works is None:
        return sum(map(count_dense, shapes), operations)
    if rule.gating == "frame" and not works[0].flush:
        operations += count_frame_gate(first.tokens, first.dim)
    for shape, work in zip(shapes, works, strict=True):
        operations += count_block(shape, rule, work)
    return operations


def token_bytes(tokens: int, dim: int, itemsize: int) -> int:
    """One token gate or buffer: N x D elements."""
    return tokens * dim * itemsize


def attention_bytes(heads: int, tokens: int, keys: int, itemsize: int) -> int:
    """One state the size of the attention matrix: H x N x N_k elements."""
    return heads * tokens * keys * itemsize


# Pixels that `ops.match_blocks` compares for a token: 13 x 13 offsets of 8 x 8 coarse pixels, then
# no motion and 3 x 3 offsets of 16 x 16 fine ones.
_COMPARED = 169 * 64 + 10 * 256


class _Rule(NamedTuple):
    """A rule without the rest of its configuration, to look counts up by."""

    gating: str
    attention: str
    overlap: str
    windows: str


@lru_cache(maxsize=1024)
def _count(shape: BlockShape, rule: _Rule, work: BlockWork) -> Operations:
    """`count_block`, remembered: the blocks of a step, and its steps, mostly repeat each other."""
    if work.flush:
        return count_dense(shape)
    per_operator = rule.gating == "operator"
    operations = (
        _tokenwise(shape, work.qkv, work.projection, work.mlp)
        + _residuals(shape, shape.tokens if per_operator else work.qkv)
        + _gates(shape, rule)
    )
    if shape.window is not None:
        return operations + _windows(shape, _window_queries(shape, rule, work))
    if rule.attention == "query":
        return operations + _rows(shape, work.qkv, shape.keys) + _context(shape, work)
    if rule.attention == "exact":
        return operations + _exact(shape, work)
    if rule.attention not in ("dense", "delta", "delta-qk", "delta-av"):
        raise ConfigError(f"Operations of attention={rule.attention!r} are not counted yet.")
    return operations + _products(shape, rule, work)


def _tokenwise(shape: BlockShape, qkv: int, projection: int, mlp: int) -> Operations:
    return Operations(
        linear=qkv * shape.qkv.macs + projection * shape.projection.macs + mlp * shape.mlp.macs,
        bias=qkv * shape.qkv.bias + projection * shape.projection.bias + mlp * shape.mlp.bias,
    )


def _residuals(shape: BlockShape, tokens: int) -> Operations:
    return Operations(add=2 * tokens * shape.dim)


def _gates(shape: BlockShape, rule: Rule) -> Operations:
    """The token gates; those of v and A belong to the attention-value product."""
    if rule.gating == "frame":
        return Operations()
    gated = shape.dim if rule.gating == "block" else 2 * shape.dim + shape.width
    return Operations(gate=shape.tokens * gated)


def _rows(shape: BlockShape, queries: int, keys: float) -> Operations:
    """Ordinary attention: both products of `queries` whole rows over `keys` keys each."""
    pairs = round(queries * keys)
    return Operations(matmul=2 * pairs * shape.width) + _relative(shape, queries, pairs)


def _relative(shape: BlockShape, queries: int, pairs: int) -> Operations:
    """Relative position: one einsum per axis, and both terms added to each query-key pair."""
    if not shape.relative:
        return Operations()
    return Operations(einsum=queries * shape.sides * shape.width, add=2 * shape.heads * pairs)


def _windows(shape: BlockShape, queries: int) -> Operations:
    """`queries` rows over the keys of their window; ragged windows need one padding token's QKV.

    That token is the same wherever it appears, and the QKV of a zero input is the bias alone.
    """
    rows = _rows(shape, queries, shape.window_keys)
    return rows + Operations(bias=shape.qkv.bias) if shape.padded and queries else rows


def _window_queries(shape: BlockShape, rule: Rule, work: BlockWork) -> int:
    """Rows of windowed attention: the selected ones, or all of the windows computed."""
    touched = rule.windows == "touched"
    if rule.gating != "operator" or (touched and rule.attention == "query"):
        return work.qkv
    windows = work.windows if touched and work.windows is not None else shape.windows
    return round(windows * shape.window_tokens)


def _products(shape: BlockShape, rule: Rule, work: BlockWork) -> Operations:
    """The paper's two products (Section 4.2), each sparse or dense on the buffers.

    Relative position is applied afresh to all of B, whichever product is sparse.
    """
    tokens, keys, width = shape.tokens, shape.keys, shape.width
    query_key = attention_value = tokens * keys
    if rule.attention in ("delta", "delta-qk"):
        others = tokens if rule.overlap == "twice" else tokens - work.qkv
        query_key = work.qkv * keys + others * work.keys
    operations = _relative(shape, tokens, tokens * keys)
    if rule.attention in ("delta", "delta-av"):
        attention_value = 2 * tokens * work.keys
        operations += Operations(
            gate=keys * width + shape.heads * tokens * keys,
            accumulator=(work.keys + 2 * tokens) * width,
        )
    return operations + Operations(matmul=(query_key + attention_value) * width)


def _context(shape: BlockShape, work: BlockWork) -> Operations:
    """Old and new attention of all queries over the changed keys, and the norm of what it adds."""
    if not work.context:
        return Operations()
    products = Operations(
        matmul=4 * shape.tokens * work.context * shape.width,
        accumulator=2 * shape.tokens * shape.width,
        gate=shape.tokens * shape.width,
    )
    return products + _relative(shape, shape.tokens, 2 * shape.tokens * work.context)


def _exact(shape: BlockShape, work: BlockWork) -> Operations:
    """Changed rows in full, the others corrected by old and new attention over the changed keys."""
    if not work.qkv:
        return Operations()
    others = shape.tokens - work.qkv
    correction = Operations(
        matmul=4 * others * work.keys * shape.width, accumulator=2 * others * shape.width
    )
    return (
        _rows(shape, work.qkv + work.rebased, shape.keys)
        + correction
        + _relative(shape, others, 2 * others * work.keys)
    )
