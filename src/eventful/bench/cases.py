"""What is measured: models by name, and the clip they are measured on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eventful.adapters import libraries
from eventful.errors import UnsupportedError


@dataclass(frozen=True)
class Subject:
    """A model of a fixed frame size, with random weights.

    Attributes:
        size: side of the frame in pixels.
        r: tokens to update where none is asked for, about an eighth.
    """

    make: Callable[[], nn.Module]
    size: int
    r: int
    about: str


def _vitdet(size: int) -> nn.Module:
    """ViTDet-B's backbone: 8 windowed (14x14) and 4 global blocks, decomposed relative position."""
    timm = libraries.load("timm.models.vision_transformer_sam")
    model: nn.Module = timm.VisionTransformerSAM(
        img_size=size,
        patch_size=16,
        embed_dim=768,
        depth=12,
        num_heads=12,
        window_size=14,
        global_attn_indexes=(2, 5, 8, 11),
        use_rel_pos=True,
        num_classes=0,
    )
    for name, parameter in model.named_parameters():
        if "rel_pos" in name:
            nn.init.normal_(parameter, std=0.1)
    model.neck = nn.Identity()  # the necks and heads of detectors are the same for all contenders
    model.head = nn.Identity()
    return model.eval()


def _vit(name: str, size: int) -> nn.Module:
    timm = libraries.load("timm")
    model: nn.Module = timm.create_model(name, img_size=size, num_classes=0, global_pool="").eval()
    return model


SUBJECTS = {
    "vitdet-b-1024": Subject(lambda: _vitdet(1024), 1024, 512, "ViTDet-B, 4096 tokens"),
    "vitdet-b-672": Subject(lambda: _vitdet(672), 672, 256, "ViTDet-B, 1764 tokens"),
    "vit-b-1369": Subject(
        lambda: _vit("vit_base_patch14_dinov2", 518), 518, 128, "ViT-B, global, 37x37 tokens"
    ),
    "vit-b-4096": Subject(
        lambda: _vit("vit_base_patch16_224", 1024), 1024, 512, "ViT-B, global, 64x64 tokens"
    ),
    "vit-l-4096": Subject(
        lambda: _vit("vit_large_patch16_224", 1024), 1024, 512, "ViT-L, global, 64x64 tokens"
    ),
    "vit-s-576": Subject(
        lambda: _vit("vit_small_patch16_224", 384), 384, 72, "ViT-S, global, 24x24 tokens"
    ),
}


def subject(name: str) -> Subject:
    """A subject by name."""
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
