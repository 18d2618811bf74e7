"""Benchmark models by name, and the clip they are measured on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from eventful.errors import ConfigError, NoMatchError, UnsupportedError
from eventful.models.vitdet import BackboneConfig, ViTDetBackbone
from eventful.modelspec.hollow import picture_method
from eventful.modelspec.names import nearest
from eventful.modelspec.opening import open_named
from eventful.modelspec.size import Size, both_sides
from eventful.surgery import libraries
from eventful.surgery.inspection import Inspection, inspect
from eventful.surgery.outputs import real_tensors


@dataclass(frozen=True)
class Subject:
    """A model with random weights, at any frame size and depth.

    Attributes:
        make: the model for frames of `size` pixels, with `depth` blocks under `blocks`.
        size: default side of the frame in pixels.
        r: default number of tokens to update, about an eighth.
        patch: side of a patch in pixels.
        depth: default number of blocks.
        returns_tokens: the output has a row for each token, and the blocks are under `blocks`.
        held: bytes that a stream keeps, by preset; empty where `make` works without weights.
    """

    make: Callable[[Any, int], nn.Module]
    size: Size
    r: int
    about: str
    patch: int = 16
    depth: int = 12
    returns_tokens: bool = True
    held: Mapping[str, int] = field(default_factory=dict)

    @property
    def patches(self) -> int:
        """Patch tokens of a frame of the default size."""
        height, width = both_sides(self.size)
        return (height // self.patch) * (width // self.patch)


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


def subject(name: str, weights: str | None = None, size: Size | None = None) -> Subject:
    """A benchmark model by name, or any model that `eventful run` takes.

    Args:
        weights: of a model that is no benchmark model; random if not given.
        size: of the frames it is built for; the model's own if not given.
    """
    if name not in SUBJECTS:
        return _named(name, weights, size)
    if weights is not None or isinstance(size, tuple):
        raise ConfigError(
            f"{name} is a benchmark model: it has random weights and square frames. Leave "
            "--weights out and give one side as --size, or name a model such as timm:NAME."
        )
    return SUBJECTS[name]


@functools.lru_cache(maxsize=4)
def _named(name: str, weights: str | None, size: Size | None) -> Subject:
    """A model of a library or of the user's own."""
    try:
        plain = open_named(name, weights=weights, size=size, weightless=True).model
    except UnsupportedError as error:
        near = nearest(name, SUBJECTS) or f" Benchmark models: {', '.join(SUBJECTS)}."
        raise UnsupportedError(f"{error}{near}") from None
    report = convertible(name, plain, size)
    tokens = sum(report.tokens.values())
    shape = report.size
    assert shape is not None

    def make(_: Size, __: int) -> nn.Module:
        model: Any = open_named(name, weights=weights, size=size).model
        if hasattr(model, "set_input_size"):
            model.set_input_size(img_size=shape)
        return FirstTensor(model).eval()

    return Subject(
        make, shape, max(1, tokens // 8), f"{name}, {tokens} tokens", depth=len(report.blocks),
        returns_tokens=False, held=report.state_bytes,
    )  # fmt: skip


def convertible(name: str, model: nn.Module, size: Size | None) -> Inspection:
    """What `convert` would do to a model; raises where no block can be made eventful."""
    report = inspect(model, None if size is None else both_sides(size))
    if not report.matched or report.size is None:
        raise NoMatchError(
            f"{name} has no blocks that can be made eventful: `eventful inspect {name}` says why."
        )
    return report


class FirstTensor(nn.Module):
    """A model of a library whose output is one tensor: the first one of its own output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.eval()
        self._method = picture_method(model)

    def forward(self, frame: Tensor) -> Tensor:
        """The first tensor of real numbers in the model's output."""
        found = real_tensors(getattr(self.model, self._method)(frame))
        if not found:
            raise UnsupportedError(f"{type(self.model).__name__} returns no tensor to compare.")
        return found[0]


def clip(size: Size, *, batch: int, noise: float = 0.01, seed: int = 0) -> Iterator[Tensor]:
    """Endless frames (B, 3, H, W): a square of 30 % of the side changes, in sensor noise."""
    make = torch.Generator().manual_seed(seed)
    shape = both_sides(size)
    ground = torch.rand(batch, 3, *shape, generator=make)
    side = int(0.3 * min(shape))
    t = 0
    while True:
        frame = ground + noise * torch.randn(ground.shape, generator=make)
        place = (t * side // 4) % (min(shape) - side)
        patch = torch.rand(batch, 3, side, side, generator=make)
        frame[:, :, place : place + side, place : place + side] = patch
        yield (frame - 0.5) / 0.5
        t += 1
