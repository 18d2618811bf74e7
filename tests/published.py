"""The paper's models over raw tokens, as small modules, and the adapter that makes them known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import eventful
from eventful.rules.relative import relative_vectors
from eventful.rules.spec import BlockSpec, linear_cost
from eventful.surgery.adapters import Adapter
from eventful.tokens.layout import TokenLayout


@dataclass
class BlockArgs:
    """Sizes of one recorded block."""

    dim: int
    heads: int
    mlp_ratio: int
    window: tuple[int, int] | None = None
    relative: bool = False


class PublishedBlock(nn.Module):
    """Layers and parameter names of the recorded blocks."""

    def __init__(self, args: BlockArgs, weights: dict[str, Tensor]) -> None:
        super().__init__()
        dim = args.dim
        self.args = args
        self.input_layer_norm = nn.LayerNorm(dim, eps=1e-6)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.projection = nn.Linear(dim, dim)
        self.mlp_layer_norm = nn.LayerNorm(dim, eps=1e-6)
        self.mlp_1 = nn.Linear(dim, args.mlp_ratio * dim)
        self.mlp_2 = nn.Linear(args.mlp_ratio * dim, dim)
        if args.relative:
            self.relative_position = nn.Module()
            for axis in ("y_embedding", "x_embedding"):
                table = nn.Parameter(torch.empty_like(weights[f"relative_position.{axis}"]))
                self.relative_position.register_parameter(axis, table)
        self.load_state_dict(weights)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the recorded blocks run inside a stream only")


class PublishedTrunk(nn.Module):
    """Blocks, behind a position encoding where the recording is of a backbone."""

    def __init__(
        self, blocks: list[PublishedBlock], layout: TokenLayout, position: Tensor | None
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.layout = layout
        self.position = position

    def forward(self, x: Tensor) -> Tensor:
        if self.position is not None:
            x = x + self.position
        for block in self.blocks:
            x = block(x)
        return x


class PublishedAdapter(Adapter):
    """A user's adapter, as docs/adapters.md would have one write it."""

    name = "published"

    def __init__(self, positions: bool = False) -> None:
        self.adds_positions = positions

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, PublishedTrunk)

    def blocks(self, trunk: Any) -> list[tuple[str, nn.Module]]:
        return [(f"blocks.{i}", block) for i, block in enumerate(trunk.blocks)]

    def spec(self, trunk: nn.Module, block: Any) -> BlockSpec:
        args: BlockArgs = block.args

        def relative(grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
            tables = block.relative_position
            return (
                relative_vectors(tables.y_embedding, grid[0], "bicubic"),
                relative_vectors(tables.x_embedding, grid[1], "bicubic"),
            )

        return BlockSpec(
            module=block,
            dim=args.dim,
            heads=args.heads,
            head_dim=args.dim // args.heads,
            scale=(args.dim // args.heads) ** -0.5,
            norm1=block.input_layer_norm,
            qkv=lambda x, index, positions: block.qkv(x).chunk(3, dim=-1),
            project=block.projection,
            norm2=block.mlp_layer_norm,
            mlp=lambda y: block.mlp_2(F.gelu(block.mlp_1(y))),
            qkv_cost=linear_cost(block.qkv),
            project_cost=linear_cost(block.projection),
            mlp_cost=linear_cost(block.mlp_1, block.mlp_2),
            window=args.window,
            relative=relative if args.relative else None,
        )

    def layout(self, trunk: Any, size: tuple[int, int]) -> TokenLayout:
        return trunk.layout


def block_from(
    meta: dict[str, Any], weights: dict[str, Tensor], window: tuple[int, int] | None
) -> PublishedBlock:
    """One block from a recording's metadata and weights."""
    args = BlockArgs(
        meta["dim"],
        meta["heads"],
        meta["mlp_ratio"],
        window,
        meta.get("relative_embedding_size") is not None,
    )
    return PublishedBlock(args, weights)


def trunk_from(meta: dict[str, Any], weights: dict[str, Tensor]) -> PublishedTrunk:
    """The recorded model."""
    grid = tuple(meta["input_size"])
    if meta["kind"] == "block":
        window = tuple(meta["window_size"]) if meta.get("window_size") else None
        return PublishedTrunk([block_from(meta, weights, window)], TokenLayout(grid), None)
    config = meta["block_config"]
    blocks = []
    for i in range(meta["depth"]):
        start = f"blocks.{i}."
        own = {k.removeprefix(start): v for k, v in weights.items() if k.startswith(start)}
        window = tuple(config["window_size"]) if i in meta["window_indices"] else None
        blocks.append(block_from(config, own, window))
    special = int(meta["has_class_token"])
    encoding = weights["position_encoding.encoding"]
    first, rest = encoding[:, :special], encoding[:, special:]
    rest = rest.transpose(1, 2).unflatten(2, tuple(meta["position_encoding_size"]))
    rest = F.interpolate(rest, grid, mode="bicubic", align_corners=False).flatten(2).transpose(1, 2)
    return PublishedTrunk(
        blocks, TokenLayout(grid, prefix=special), torch.cat([first, rest], dim=1)
    )


def config_from(meta: dict[str, Any]) -> eventful.Config:
    """The update rule of a recording."""
    block = meta.get("block_config", meta)
    policies = {
        "top_r": eventful.TopR,
        "threshold": eventful.Threshold,
        "top_fraction": eventful.TopFraction,
    }
    policy = (
        eventful.Always()
        if meta["policy"] is None
        else policies[meta["policy"][0]](meta["policy"][1])
    )
    options: dict[str, Any] = {"pool": block.get("pool_size") or 1}
    if block.get("gate_before_ln"):
        options["gate"] = "before-norm"
    if block.get("matmul_2_cast"):
        options["accumulate"] = "half"
    if block.get("stgt"):
        return eventful.Config.stgt(policy, **options)
    attention = {
        "Block": "dense",
        "EventfulTokenwiseBlock": "dense",
        "EventfulMatmul1Block": "delta-qk",
        "EventfulBlock": "delta",
    }[meta["block_class"]]
    return eventful.Config.paper(policy, attention=attention, **options)
