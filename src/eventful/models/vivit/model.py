"""ViViT with a factorised encoder: a spatial model step by step, then a temporal one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eventful.errors import ConfigError, FrameError
from eventful.models.blocks import (
    NORM_EPS,
    Block,
    PositionedTrunk,
    init_transformer,
    resized_positions,
)


@dataclass(frozen=True)
class ViViTConfig:
    """Sizes of a factorised ViViT; the defaults are those of the paper's EPIC-Kitchens model.

    Attributes:
        classes: number of actions.
        size: side of the frames in pixels the position table was learned for.
        frames: frames of one view.
        tubelet: frames of one step.
        depth: blocks of the spatial model.
        temporal_depth: blocks of the temporal model.
        dropout: ahead of the classifier, in training.
    """

    classes: int = 97
    size: int = 320
    frames: int = 32
    tubelet: int = 2
    patch: int = 16
    channels: int = 3
    dim: int = 768
    depth: int = 12
    temporal_depth: int = 4
    heads: int = 12
    mlp_ratio: float = 4.0
    dropout: float = 0.5

    def __post_init__(self) -> None:
        if self.frames % self.tubelet:
            raise ConfigError(
                f"{self.frames} frames are not a whole number of steps of {self.tubelet} frames."
            )

    @property
    def steps(self) -> int:
        """Steps of one view."""
        return self.frames // self.tubelet

    def to_dict(self) -> dict[str, Any]:
        """As values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ViViTConfig:
        """The inverse of `to_dict`."""
        return cls(**data)


class SpatialModel(PositionedTrunk):
    """One step: two frames (B, 3, 2, H, W) to a vector (B, D), through a class token.

    This is what becomes eventful: convert it, and step a `Stream` over the steps of a view.
    """

    special_tokens = 1

    def __init__(self, config: ViViTConfig) -> None:
        super().__init__()
        self.config = config
        dim, kernel = config.dim, (config.tubelet, config.patch, config.patch)
        self.embed = nn.Conv3d(config.channels, dim, kernel, stride=kernel)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        slots = (config.size // config.patch) ** 2 + 1
        self.positions = nn.Parameter(torch.zeros(1, slots, dim))
        self.blocks = nn.ModuleList(
            Block(dim, config.heads, config.mlp_ratio) for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        for table in (self.class_token, self.positions):
            nn.init.trunc_normal_(table, std=0.02)
        init_transformer(self)

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Patches of frames of `size` (height, width) pixels."""
        return size[0] // self.config.patch, size[1] // self.config.patch

    def compute_tables(self, grid: tuple[int, int]) -> tuple[Tensor, ...]:
        """The position embedding (1, 1 + h*w, D)."""
        return (resized_positions(self.positions, grid, self.special_tokens),)

    def tokens(self, clip: Tensor) -> Tensor:
        """Embedded patches behind the class token, without positions: (B, 1 + h*w, D)."""
        if clip.dim() != 5 or clip.shape[2] != self.config.tubelet:
            raise FrameError(
                f"A step is {self.config.tubelet} frames (B, {self.config.channels}, "
                f"{self.config.tubelet}, height, width), got {tuple(clip.shape)}; "
                "eventful.models.vivit.steps cuts a video into steps."
            )
        patches = self.embed(clip).flatten(2).transpose(1, 2)
        return torch.cat([self.class_token.expand(len(clip), -1, -1), patches], dim=1)

    def forward_features(self, clip: Tensor) -> Tensor:
        """All tokens (B, 1 + h*w, D) behind the last block, ahead of the norm."""
        grid = self.grid((clip.shape[-2], clip.shape[-1]))
        tokens = self.tokens(clip) + self.tables(grid)[0]
        for block in self.blocks:
            tokens = block(tokens, grid)
        return tokens

    def forward(self, clip: Tensor) -> Tensor:
        """See the class."""
        vector: Tensor = self.norm(self.forward_features(clip)[:, 0])
        return vector


class TemporalModel(nn.Module):
    """The vectors of all steps (B, T, D) to one (B, D), through a class token."""

    def __init__(self, config: ViViTConfig) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.dim))
        self.positions = nn.Parameter(torch.zeros(1, config.steps + 1, config.dim))
        self.blocks = nn.ModuleList(
            Block(config.dim, config.heads, config.mlp_ratio) for _ in range(config.temporal_depth)
        )
        self.norm = nn.LayerNorm(config.dim, eps=NORM_EPS)
        for table in (self.class_token, self.positions):
            nn.init.trunc_normal_(table, std=0.02)
        init_transformer(self)

    def forward(self, vectors: Tensor) -> Tensor:
        """See the class."""
        steps = self.positions.shape[1] - 1
        if vectors.shape[1] != steps:
            raise FrameError(
                f"The temporal model takes the vectors of {steps} steps, got {vectors.shape[1]}."
            )
        tokens = torch.cat([self.class_token.expand(len(vectors), -1, -1), vectors], dim=1)
        tokens = tokens + self.positions
        for block in self.blocks:
            tokens = block(tokens, (1, steps))
        out: Tensor = self.norm(tokens[:, 0])
        return out


class ViViT(nn.Module):
    """A view (B, 3, 32, H, W) to class logits (B, classes)."""

    def __init__(self, config: ViViTConfig) -> None:
        super().__init__()
        self.config = config
        self.spatial = SpatialModel(config)
        self.temporal = TemporalModel(config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.dim, config.classes)
        nn.init.trunc_normal_(self.classifier.weight, std=0.02)
        nn.init.zeros_(self.classifier.bias)

    def classify(self, vectors: Tensor) -> Tensor:
        """Logits from the spatial model's vectors (B, steps, D)."""
        logits: Tensor = self.classifier(self.dropout(self.temporal(vectors)))
        return logits

    def forward(self, video: Tensor) -> Tensor:
        """Dense: all steps of all views go through the spatial model as one batch."""
        clips = torch.stack(steps(video, self.config.tubelet), dim=1)  # (B, T, 3, 2, H, W)
        vectors = self.spatial(clips.flatten(0, 1)).unflatten(0, clips.shape[:2])
        return self.classify(vectors)


def steps(video: Tensor, tubelet: int = 2) -> list[Tensor]:
    """A video (B, 3, T, H, W) as its steps (B, 3, tubelet, H, W), one after the other."""
    if video.dim() != 5 or video.shape[2] % tubelet:
        raise FrameError(
            f"A video is (B, 3, frames, height, width) with whole steps of {tubelet} frames, got "
            f"{tuple(video.shape)}."
        )
    return list(video.split(tubelet, dim=2))


def vivit_b(classes: int = 97, size: int = 320) -> ViViT:
    """ViViT-B with random weights, in eval mode."""
    return ViViT(ViViTConfig(classes, size)).eval()


def vivit_b_epic() -> ViViT:
    """The paper's EPIC-Kitchens model: 320 px, 97 verbs."""
    return vivit_b(97, 320)


def vivit_b_kinetics() -> ViViT:
    """The paper's Kinetics-400 model: 224 px."""
    return vivit_b(400, 224)
