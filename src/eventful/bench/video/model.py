"""The model of a run: a timm vision transformer that returns its tokens, at the size of a clip."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eventful.bench.cases import FirstTensor, convertible
from eventful.bench.video.footage import fitted_size
from eventful.errors import UnsupportedError
from eventful.models.vitdet.model import ViTDet
from eventful.models.vivit.model import ViViT
from eventful.modelspec.opening import open_named
from eventful.modelspec.size import parse_size
from eventful.video.normalization import IMAGENET, model_normalization


@dataclass(frozen=True)
class Prepare:
    """From a frame held in memory, uint8 (3, H, W), to what the model takes, (1, 3, H, W).

    The same to the bit as `eventful.read` at this size and with this mean and std, then copied.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def __call__(self, frame: Tensor) -> Tensor:
        """Copy to the device and normalise there."""
        pixels = frame[None].to(self.device).float()
        scale = [1 / (255 * std) for std in self.std]
        shift = [mean / std for mean, std in zip(self.mean, self.std, strict=True)]
        return (pixels * self._each(scale) - self._each(shift)).to(self.dtype)

    def _each(self, values: list[float]) -> Tensor:
        """A number for each channel."""
        return torch.tensor(values, device=self.device).view(1, 3, 1, 1)


@dataclass(frozen=True)
class Backbone:
    """A model of timm that takes any size of frame, with the weights to measure with.

    Attributes:
        model: returns all its tokens, (B, N, D).
        random: its weights are random.
    """

    name: str
    model: Any
    mean: tuple[float, ...] = IMAGENET[0]
    std: tuple[float, ...] = IMAGENET[1]
    random: bool = True

    def at(
        self, original: tuple[int, int], given: str, device: str, dtype: torch.dtype
    ) -> tuple[nn.Module, Prepare]:
        """A copy for frames of the shape of `original`, and what prepares them.

        Args:
            given: the size asked for; see `fitted_size`.
        """
        patch = tuple(self.model.patch_embed.patch_size)
        longest = max(self.model.patch_embed.img_size)
        size = fitted_size(original, given, patch, longest)
        model = copy.deepcopy(self.model)
        if tuple(model.patch_embed.img_size) != size:
            model.set_input_size(img_size=size)
        return self._placed(model, size, device, dtype)

    def _placed(
        self, model: nn.Module, size: tuple[int, int], device: str, dtype: torch.dtype
    ) -> tuple[nn.Module, Prepare]:
        made = model.to(device, dtype).eval().requires_grad_(False)
        return made, Prepare(size, self.mean, self.std, device, dtype)


@dataclass(frozen=True)
class SizedBackbone(Backbone):
    """Any other model, for one size of frames, into which pictures are stretched.

    Attributes:
        model: returns one tensor, the first of the model's own output.
    """

    size: tuple[int, int] = (224, 224)

    def at(
        self, original: tuple[int, int], given: str, device: str, dtype: torch.dtype
    ) -> tuple[nn.Module, Prepare]:
        """See `Backbone`; the model was made for the size that was asked for."""
        return self._placed(copy.deepcopy(self.model), self.size, device, dtype)


def load_backbone(name: str, weights: str | Path | None, size: str = "") -> Backbone:
    """A model by name, as `eventful.modelspec.opening.open_named` takes it.

    Args:
        size: HxW or one side; of a model of timm that takes any size it is looked at later.
    """
    given = parse_size(size)
    opened = open_named(name, weights=None if weights is None else str(weights), size=given)
    model: Any = opened.model
    normal = model_normalization(model)
    if all(hasattr(model, part) for part in ("set_input_size", "patch_embed", "reset_classifier")):
        model.reset_classifier(0, "")  # no pooling: the model returns its tokens
        short = name.removeprefix("timm:")
        return Backbone(short, model, normal.mean, normal.std, opened.random)
    if isinstance(model, ViViT):
        raise UnsupportedError(
            f"{name} takes clips, and this command compares single frames. `eventful run "
            "--compare` takes it."
        )
    if isinstance(model, ViTDet):
        model = model.backbone  # lists of boxes cannot be compared number by number
    found = convertible(name, model, given).size
    assert found is not None
    return SizedBackbone(name, FirstTensor(model), normal.mean, normal.std, opened.random, found)
