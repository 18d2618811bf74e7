"""Small models of nobody's library, written in the ways people write transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZE = (32, 40)  # 4 x 5 patches of 8 x 8


class Split(nn.Module):
    """Attention with separate layers under names of its own; the key has no bias."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wv, self.out = (nn.Linear(dim, dim) for _ in range(3))
        self.wk = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Interleaved(nn.Module):
    """Attention with one layer, q, k and v of each head side by side."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.to_qkv, self.to_out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (self.heads, 3, -1)).transpose(1, 3).unbind(1)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class PreNorm(nn.Module):
    """Norms before, a layer scale that starts near zero, a gated MLP written out."""

    def __init__(self, dim: int, attention: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.mix = nn.LayerNorm(dim), nn.LayerNorm(dim), attention
        self.gate, self.up = nn.Linear(dim, 48), nn.Linear(dim, 48)
        self.down = nn.Linear(48, dim)
        self.small = nn.Parameter(torch.full((dim,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.small * self.mix(self.a(x))
        y = self.b(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Parallel(nn.Module):
    """Attention and MLP of the same norm, added at once; returns a tuple."""

    def __init__(self, dim: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(dim), attention
        self.mlp = nn.Sequential(nn.Linear(dim, 48), nn.GELU(), nn.Linear(48, dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor]:
        y = self.norm(x)
        return (x + self.mix(y) + self.mlp(y),)


class Nested(nn.Module):
    """Norms after the sums, parts nested as in BERT."""

    def __init__(self, dim: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.first = attention, nn.LayerNorm(dim)
        self.intermediate = nn.Sequential(nn.Linear(dim, 48), nn.GELU())
        self.output, self.second = nn.Linear(48, dim), nn.LayerNorm(dim)

    def forward(self, hidden_states: Tensor) -> Tensor:
        y = self.first(hidden_states + self.attention(hidden_states))
        return self.second(y + self.output(self.intermediate(y)))


class Trunk(nn.Module):
    """A patch embedding, two special tokens, positions and a loop."""

    def __init__(self, *blocks: nn.Module, dim: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 8, 8)
        self.special = nn.Parameter(torch.randn(1, 2, dim))
        self.places = nn.Parameter(torch.randn(1, 22, dim))
        self.stages = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(dim)
        self.img_size = SIZE

    def embed(self, frame: Tensor) -> Tensor:
        patches = self.stem(frame).flatten(2).mT
        return torch.cat([self.special.expand(len(frame), -1, -1), patches], 1) + self.places

    def forward(self, frame: Tensor, every: bool = False) -> Any:
        x, kept = self.embed(frame), []
        for block in self.stages:
            found = block(x)
            x = found[0] if isinstance(found, tuple) else found
            kept.append(x)
        return torch.stack(kept, 1) if every else self.norm(x)


def split() -> nn.Module:
    """Separate layers, a layer scale, a gated MLP."""
    return Trunk(*(PreNorm(32, Split(32, 4)) for _ in range(3)))


def interleaved() -> nn.Module:
    """One layer for q, k and v, head by head; attention and MLP in parallel."""
    return Trunk(*(Parallel(32, Interleaved(32, 4)) for _ in range(3)))


def nested() -> nn.Module:
    """Norms after the sums."""
    return Trunk(*(Nested(32, Split(32, 2)) for _ in range(3)))


def torch_layers(**options: Any) -> nn.Module:
    """Torch's own encoder layers."""
    layer = {"batch_first": True, "dropout": 0.0} | options
    return Trunk(*(nn.TransformerEncoderLayer(32, 4, 48, **layer) for _ in range(3)))
