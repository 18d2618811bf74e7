"""ViTDet's backbone: a plain ViT with windowed blocks and a few global ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eventful.errors import ConfigError
from eventful.models.blocks import (
    Block,
    PositionedTrunk,
    Resize,
    init_transformer,
    resized_positions,
)


@dataclass(frozen=True)
class BackboneConfig:
    """Sizes of a ViTDet backbone; the defaults are ViTDet-B's.

    Attributes:
        size: side of the frames in pixels; others run too.
        trained_size: size the relative position tables of the global blocks belong to.
        pretrained_grid: tokens on a side of the absolute position table.
        class_slot: whether that table begins with a row of the class token, which is not used.
        global_blocks: blocks that attend globally; the others attend in windows.
        rel_pos_resize: how relative tables are brought to another grid. `linear` is detectron2's
            way, `bicubic` that of the paper's authors.
    """

    size: int = 1024
    trained_size: int = 1024
    patch: int = 16
    channels: int = 3
    dim: int = 768
    depth: int = 12
    heads: int = 12
    mlp_ratio: float = 4.0
    window: int = 14
    global_blocks: tuple[int, ...] = (2, 5, 8, 11)
    pretrained_grid: int = 14
    class_slot: bool = True
    relative: bool = True
    rel_pos_resize: Resize = "linear"
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_blocks", tuple(self.global_blocks))
        if self.size < self.patch:
            raise ConfigError(
                f"Frames of {self.size} px are smaller than a {self.patch} px patch; use larger."
            )
        if not 0 <= self.drop_path < 1:
            raise ConfigError(f"drop_path={self.drop_path}; it is a probability below 1.")
        if self.rel_pos_resize not in ("linear", "bicubic"):
            raise ConfigError(
                f"rel_pos_resize={self.rel_pos_resize!r}; it is 'linear' (detectron2, "
                "transformers) or 'bicubic' (the paper's authors)."
            )


class ViTDetBackbone(PositionedTrunk):
    """Frames (B, 3, H, W) to one feature map (B, D, H/16, W/16), of any size and aspect."""

    special_tokens = 0

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.config = config
        dim, slots = config.dim, config.pretrained_grid**2 + int(config.class_slot)
        self.patch_embed = nn.Conv2d(config.channels, dim, config.patch, stride=config.patch)
        self.pos_embed = nn.Parameter(torch.zeros(1, slots, dim))
        self.blocks = nn.ModuleList(self._block(index) for index in range(config.depth))
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        init_transformer(self)

    def _block(self, index: int) -> Block:
        config = self.config
        window = None if index in config.global_blocks else config.window
        table = (window or config.trained_size // config.patch) if config.relative else None
        return Block(
            config.dim,
            config.heads,
            config.mlp_ratio,
            window=window,
            table=table,
            resize=config.rel_pos_resize,
            drop_path=config.drop_path * index / max(config.depth - 1, 1),
        )

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Tokens of a frame of `size` (height, width) pixels; cut patches are dropped."""
        return size[0] // self.config.patch, size[1] // self.config.patch

    def compute_tables(self, grid: tuple[int, int]) -> tuple[Tensor, ...]:
        """The position embedding (1, h*w, D)."""
        table = self.pos_embed[:, int(self.config.class_slot) :]
        return (resized_positions(table, grid, 0),)

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalised pixels in, the last block's tokens as an image out."""
        image = self.patch_embed(pixels)
        grid = (image.shape[2], image.shape[3])
        tokens = image.flatten(2).transpose(1, 2) + self.tables(grid)[0]
        for block in self.blocks:
            tokens = block(tokens, grid)
        return tokens.transpose(1, 2).unflatten(2, grid)
