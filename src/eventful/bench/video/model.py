"""The model of a run: a timm vision transformer that returns its tokens, at the size of a clip."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eventful.bench.video.footage import fitted_size
from eventful.errors import UnsupportedError
from eventful.modelspec import timm_models
from eventful.modelspec.opening import LIBRARIES, warn_random
from eventful.modelspec.weights import load_state


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
    """A timm model with the weights to measure with.

    Attributes:
        model: returns all its tokens, (B, N, D).
    """

    name: str
    model: Any
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

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
        made: nn.Module = model.to(device, dtype).eval().requires_grad_(False)
        return made, Prepare(size, self.mean, self.std, device, dtype)


def load_backbone(name: str, weights: Path | None) -> Backbone:
    """A timm model by name, with random weights where no file is given.

    Args:
        name: `timm:NAME`, or the name alone.
    """
    short = name.removeprefix("timm:")
    if short.partition(":")[0] in LIBRARIES or Path(short).suffix:
        raise UnsupportedError(
            f"{name} is not a model of timm, which this command needs: it compares tokens at the "
            "size of each video. `eventful bench` and `eventful run --compare` take other models."
        )
    torch.manual_seed(0)
    model: Any = timm_models.build(short, num_classes=0)
    if not hasattr(model, "set_input_size") or not hasattr(model, "patch_embed"):
        raise UnsupportedError(f"{short} takes one size of frame only; measure another model.")
    if weights is None:
        warn_random(short)
    else:
        load_state(model, weights, short)
    model.reset_classifier(0, "")  # no pooling: the model returns its tokens
    cfg = model.pretrained_cfg
    return Backbone(short, model, tuple(cfg["mean"]), tuple(cfg["std"]))
