"""Which part of a block does what, by name, and the block spec that follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful.cost.counting import LinearCost
from eventful.rules.spec import BlockSpec, QKVMap, TokenMap, linear_cost
from eventful.surgery.adapter import per_head, repeat_heads

Form = Literal["pre", "post", "parallel"]


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


# Activations that a block may call as functions, by the name they have in a recipe.
ACTIVATIONS: dict[str, TokenMap] = {
    "@gelu": F.gelu,
    "@gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "@relu": F.relu,
    "@silu": F.silu,
    "@quick_gelu": _quick_gelu,
    "@relu_squared": lambda x: F.relu(x).square(),
    "@sigmoid": torch.sigmoid,
    "@none": lambda x: x,
}


@dataclass(frozen=True)
class Gated:
    """A gated MLP whose layers the block calls itself: down(act(gate(x)) * up(x))."""

    gate: str
    up: str
    act: str


@dataclass(frozen=True)
class Recipe:
    """A block's parts by name, relative to the block.

    Attributes:
        norm1, norm2: norms; None without. Of form `post` they follow the residual sums.
        qkv: one layer for q, k and v, or two for q and for k and v, or three, or one
            `nn.MultiheadAttention`.
        packing: axes of a layer that serves q, k and v: `part` first, or `head` first, or
            `channel` first.
        biases: of q, k and v, where the block adds them itself.
        norms: of q and k; None without.
        project, mlp: parts that run one after another; names that begin with @ are activations.
        project_scale, mlp_scale: parameters that are layer scales.
        spatial: whether tokens come as (B, h, w, D).
        returns: how many entries the block's tuple has; None for a tensor.
        writes: attributes that the block's own forward sets, such as attention maps.
    """

    dim: int
    heads: int
    head_dim: int
    scale: float
    form: Form
    norm1: str | None
    qkv: tuple[str, ...]
    packing: str
    project: tuple[str, ...]
    norm2: str | None
    mlp: tuple[str | Gated, ...]
    biases: tuple[str | None, str | None, str | None] | None = None
    norms: tuple[str | None, str | None] = (None, None)
    project_scale: str | None = None
    mlp_scale: str | None = None
    spatial: bool = False
    returns: int | None = None
    writes: tuple[str, ...] = ()

    def spec(self, block: nn.Module) -> BlockSpec:
        """The spec of a block that this describes."""
        norm1, norm2 = (part_of(block, name) for name in (self.norm1, self.norm2))
        project, mlp = chain(block, self.project), chain(block, self.mlp)
        scales = [_scale(block, name) for name in (self.project_scale, self.mlp_scale)]
        if self.form == "post":
            mlp = _post_norm(norm1, norm2, mlp, scales[1])
            norm1, norm2, scales[1] = nn.Identity(), nn.Identity(), None
        return BlockSpec(
            module=block,
            dim=self.dim,
            heads=self.heads,
            head_dim=self.head_dim,
            scale=self.scale,
            norm1=norm1,
            qkv=self._qkv(block),
            project=project,
            norm2=norm2,
            mlp=mlp,
            qkv_cost=self._qkv_cost(block),
            project_cost=chain_cost(block, self.project),
            mlp_cost=chain_cost(block, self.mlp),
            project_scale=scales[0],
            mlp_scale=scales[1],
            parallel=self.form == "parallel",
        )

    def called(self, block: nn.Module) -> set[str]:
        """Names of the parts that run their own forward in a stream; the others do not."""
        names: set[str | None] = {self.norm1, self.norm2, *self.norms}
        for name in (*self.project, *self.mlp):
            names |= {name.gate, name.up} if isinstance(name, Gated) else {name}
        if self.biases is None and not _is_mha(block.get_submodule(self.qkv[0])):
            names |= set(self.qkv)
        return {name for name in names if name is not None and name[:1] != "@"}

    def _qkv(self, block: nn.Module) -> QKVMap:
        layers = self._layers(block)
        norms = [part_of(block, name) for name in self.norms]
        heads, size, packing = self.heads, self.head_dim, self.packing

        def qkv(x: Tensor, index: Tensor, positions: object) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = unpack(torch.cat([layer(x) for layer in layers], -1), heads, size, packing)
            q, k = (_normed(norm, part, size) for norm, part in zip(norms, (q, k), strict=True))
            return q, repeat_heads(k, heads, size), repeat_heads(v, heads, size)

        def separate(x: Tensor, index: Tensor, positions: object) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = (layer(x) for layer in layers)
            q, k = (_normed(norm, part, size) for norm, part in zip(norms, (q, k), strict=True))
            return q, repeat_heads(k, heads, size), repeat_heads(v, heads, size)

        return separate if len(layers) == 3 else qkv

    def _layers(self, block: nn.Module) -> list[TokenMap]:
        """The layers of q, k and v."""
        layer: Any = block.get_submodule(self.qkv[0])
        if _is_mha(layer):
            return [lambda x: F.linear(x, layer.in_proj_weight, layer.in_proj_bias)]
        if self.biases is not None:
            names = self.biases

            def biased(x: Tensor) -> Tensor:
                known = [None if name is None else value(block, name) for name in names]
                like = next(bias for bias in known if bias is not None)
                parts = [torch.zeros_like(like) if bias is None else bias for bias in known]
                return F.linear(x, layer.weight, torch.cat(parts))

            return [biased]
        return [block.get_submodule(name) for name in self.qkv]

    def _qkv_cost(self, block: nn.Module) -> LinearCost:
        layers: list[Any] = [block.get_submodule(name) for name in self.qkv]
        if _is_mha(layers[0]):
            weight, bias = layers[0].in_proj_weight, layers[0].in_proj_bias
            return LinearCost(weight.numel(), 0 if bias is None else bias.numel())
        added = 0 if self.biases is None else layers[0].out_features
        return linear_cost(*layers) + LinearCost(0, added)


def _is_mha(layer: nn.Module) -> bool:
    return isinstance(layer, nn.MultiheadAttention)


def unpack(packed: Tensor, heads: int, size: int, packing: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v from one tensor (B, M, C); k and v may have fewer heads than q.

    Args:
        packing: which axis of C comes first: `part`, `head`, or `channel`.
    """
    if packing == "part":
        rest = (packed.shape[-1] - heads * size) // 2
        q, k, v = packed.split([heads * size, rest, rest], dim=-1)
        return q, k, v
    if packing == "head":
        parts = packed.unflatten(-1, (heads, 3, size)).unbind(-2)
    else:
        parts = packed.unflatten(-1, (size, 3, heads)).transpose(-1, -3).unbind(-2)
    q, k, v = (part.flatten(-2) for part in parts)
    return q, k, v


def _normed(norm: nn.Module, tokens: Tensor, size: int) -> Tensor:
    """Apply the norm of q or k: over a head's channels, or over all."""
    if isinstance(norm, nn.Identity):
        return tokens
    if norm_width(norm) == size:
        return per_head(norm, tokens, tokens.shape[-1] // size)
    result: Tensor = norm(tokens)
    return result


def norm_width(norm: nn.Module) -> int | None:
    """Over how many channels a norm with weights is."""
    weight = next((p for p in norm.parameters() if p.dim() == 1), None)
    shape = getattr(norm, "normalized_shape", None)
    if weight is not None:
        return weight.numel()
    return math.prod(shape) if isinstance(shape, tuple) else None


def _post_norm(norm1: TokenMap, norm2: TokenMap, mlp: TokenMap, scale: Tensor | None) -> TokenMap:
    """What the second half of a block with norms after its residual sums adds to the first sum.

    With s = x + attention, the block returns norm2(n + mlp(n)) where n = norm1(s).
    """

    def added(total: Tensor) -> Tensor:
        normed = norm1(total)
        update = mlp(normed)
        return norm2(normed + (update if scale is None else update * scale)) - total

    return added


def part_of(block: nn.Module, name: str | None) -> Any:
    """A part by name; the identity for none."""
    return nn.Identity() if name is None else block.get_submodule(name)


def value(block: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its dotted name."""
    owner, _, leaf = name.rpartition(".")
    found: Tensor = getattr(block.get_submodule(owner), leaf)
    return found


def _scale(block: nn.Module, name: str | None) -> Tensor | None:
    return None if name is None else value(block, name).flatten()


def chain(block: nn.Module, names: tuple[str | Gated, ...]) -> TokenMap:
    """Parts that run one after another."""
    maps = [_link(block, name) for name in names]
    if len(maps) == 1:
        return maps[0]

    def run(x: Tensor) -> Tensor:
        for part in maps:
            x = part(x)
        return x

    return run


def _link(block: nn.Module, name: str | Gated) -> Callable[[Tensor], Tensor]:
    if isinstance(name, Gated):
        gate, up = block.get_submodule(name.gate), block.get_submodule(name.up)
        act = ACTIVATIONS[name.act]
        return lambda x: act(gate(x)) * up(x)
    if name.startswith("@"):
        return ACTIVATIONS[name]
    part: Callable[[Tensor], Tensor] = block.get_submodule(name)
    return part


def chain_cost(block: nn.Module, names: tuple[str | Gated, ...]) -> LinearCost:
    """Cost per token of the linear layers of a chain."""
    total = LinearCost()
    for name in names:
        paths = (name.gate, name.up) if isinstance(name, Gated) else (name,)
        total = total + linear_cost(*(block.get_submodule(p) for p in paths if p[:1] != "@"))
    return total
