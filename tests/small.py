"""Tiny random models over raw tokens, for laws that need no library."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import eventful
from eventful.tokens.layout import TokenLayout
from published import BlockArgs, PublishedAdapter, PublishedBlock, PublishedTrunk


def random_block(args: BlockArgs, grid: tuple[int, int], gain: float = 1.0) -> PublishedBlock:
    """A block with weights large enough that attention is far from uniform."""
    dim, side = args.dim, args.window or grid
    hidden = args.mlp_ratio * dim
    shapes = {
        "input_layer_norm.weight": (dim,),
        "input_layer_norm.bias": (dim,),
        "qkv.weight": (3 * dim, dim),
        "qkv.bias": (3 * dim,),
        "projection.weight": (dim, dim),
        "projection.bias": (dim,),
        "mlp_layer_norm.weight": (dim,),
        "mlp_layer_norm.bias": (dim,),
        "mlp_1.weight": (hidden, dim),
        "mlp_1.bias": (hidden,),
        "mlp_2.weight": (dim, hidden),
        "mlp_2.bias": (dim,),
    }
    weights = {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    weights["qkv.weight"][: 2 * dim] *= gain
    if args.relative:
        for axis, length in zip(("y_embedding", "x_embedding"), side, strict=True):
            table = 0.3 * torch.randn(2 * length - 1, dim // args.heads)
            weights[f"relative_position.{axis}"] = table
    return PublishedBlock(args, weights)


def random_trunk(
    grid: tuple[int, int],
    *,
    depth: int = 2,
    dim: int = 16,
    heads: int = 2,
    window: tuple[int, int] | None = None,
    relative: bool = False,
    special: int = 0,
    gain: float = 1.0,
    seed: int = 0,
) -> nn.Module:
    """Blocks with `window` in all but the last."""
    torch.manual_seed(seed)
    blocks = []
    for i in range(depth):
        args = BlockArgs(dim, heads, 2, window if i < depth - 1 else None, relative)
        blocks.append(random_block(args, grid, gain))
    return PublishedTrunk(blocks, TokenLayout(grid, prefix=special), None).eval()


def drifting_tokens(
    frames: int, batch: int, count: int, dim: int, *, share: float, seed: int = 0
) -> list[Tensor]:
    """Tokens of which a random share changes at each frame."""
    make = torch.Generator().manual_seed(seed)
    tokens = torch.randn(batch, count, dim, generator=make)
    clip = [tokens]
    for _ in range(frames - 1):
        moved = torch.rand(batch, count, 1, generator=make) < share
        clip.append(clip[-1] + moved * torch.randn(batch, count, dim, generator=make))
    return clip


eventful.register_adapter(PublishedAdapter())
