"""Benchmark models by name, and the clip they are measured on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eventful.errors import UnsupportedError
from eventful.models.vitdet import BackboneConfig, ViTDetBackbone
from eventful.surgery import libraries


@dataclass(frozen=True)
class Subject:
    """A model with random weights, at any frame size and depth.

    Attributes:
        make: the model for frames of `size` pixels, with `depth` blocks under `blocks`.
        size: default side of the frame in pixels.
        r: default number of tokens to update, about an eighth.
        patch: side of a patch in pixels.
        depth: default number of blocks.
    """

    make: Callable[[int, int], nn.Module]
    size: int
    r: int
    about: str
    patch: int = 16
    depth: int = 12

    @property
    def patches(self) -> int:
        """Patch tokens of a frame of the default size."""
        return (self.size // self.patch) ** 2


def _vitdet(size: int, depth: int) -> nn.Module:
    """ViTDet's backbone: windows of 14x14, every third block global, decomposed relative position.

    At 12 blocks, 8 are windowed and 4 global.
    """
    config = BackboneConfig(
        size=size,
        trained_size=size,  # no table needs resizing, so that only the blocks are measured
        pretrained_grid=size // 16,
        depth=depth,
        global_blocks=tuple(range(2, depth, 3)),
        rel_pos_resize="linear",
    )
    model = ViTDetBackbone(config)
    for name, parameter in model.named_parameters():
        if "rel_pos" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


def _vit(name: str) -> Callable[[int, int], nn.Module]:
    def make(size: int, depth: int) -> nn.Module:
        timm = libraries.load("timm")
        model: nn.Module = timm.create_model(
            name, img_size=size, depth=depth, num_classes=0, global_pool=""
        )
        return model.eval()

    return make


_DINO, _BASE, _LARGE, _SMALL = (
    _vit(name)
    for name in (
        "vit_base_patch14_dinov2",
        "vit_base_patch16_224",
        "vit_large_patch16_224",
        "vit_small_patch16_224",
    )
)

SUBJECTS = {
    "vitdet-b-1024": Subject(_vitdet, 1024, 512, "ViTDet-B, 4096 tokens"),
    "vitdet-b-672": Subject(_vitdet, 672, 256, "ViTDet-B, 1764 tokens"),
    "vit-b-1369": Subject(_DINO, 518, 128, "ViT-B, global, 37x37 tokens", patch=14),
    "vit-b-4096": Subject(_BASE, 1024, 512, "ViT-B, global, 64x64 tokens"),
    "vit-l-4096": Subject(_LARGE, 1024, 512, "ViT-L, global, 64x64 tokens", depth=24),
    "vit-s-576": Subject(_SMALL, 384, 72, "ViT-S, global, 24x24 tokens"),
}


def subject(name: str) -> Subject:
    """A benchmark model by name."""
    if name not in SUBJECTS:
        known = ", ".join(SUBJECTS)
        raise UnsupportedError(f"There is no benchmark model {name!r}; there are {known}.")
    return SUBJECTS[name]


def clip(size: int, *, batch: int, noise: float = 0.01, seed: int = 0) -> Iterator[Tensor]:
    """Endless frames (B, 3, size, size): a square of 30 % of the side changes, in sensor noise."""
    make = torch.Generator().manual_seed(seed)
    ground = torch.rand(batch, 3, size, size, generator=make)
    side = int(0.3 * size)
    t = 0
    while True:
        frame = ground + noise * torch.randn(ground.shape, generator=make)
        place = (t * side // 4) % (size - side)
        patch = torch.rand(batch, 3, side, side, generator=make)
        frame[:, :, place : place + side, place : place + side] = patch
        yield (frame - 0.5) / 0.5
        t += 1
