"""Models that `eventful visualize` can show: a detector with boxes, others with features."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful.errors import UnsupportedError
from eventful.models.loading import load_model
from eventful.models.vitdet.model import ViTDet
from eventful.pipeline.models import label_names, load_state
from eventful.stream import Stream
from eventful.surgery import libraries
from eventful.tokens.layout import TokenLayout
from eventful.video.scene import with_boxes


class Subject(Protocol):
    """A model that `eventful visualize` can show.

    Attributes:
        model: the module to convert.
        shows: short name of its prediction.
    """

    @property
    def model(self) -> nn.Module:
        """See above."""
        ...

    @property
    def shows(self) -> str:
        """See above."""
        ...

    def step(self, stream: Stream, frame: Tensor) -> tuple[Tensor, Tensor]:
        """Step with a frame (3, H, W), uint8.

        Returns:
            The frame as it is shown and the prediction, (3, h, w) in [0, 1] each.
        """
        ...

    def content(self, layout: TokenLayout) -> tuple[int, int]:
        """Rows and columns of tokens the last frame takes up; the others are padding."""
        ...


class Detector:
    """A ViTDet: its prediction is the frame with boxes.

    Args:
        score: boxes below it are not shown.
    """

    shows = "predictions"

    def __init__(self, model: ViTDet, score: float) -> None:
        self.model = model
        self._names = label_names(model)
        self._score = score
        self._content = (0, 0)

    def step(self, stream: Stream, frame: Tensor) -> tuple[Tensor, Tensor]:
        """See `Subject`."""
        pixels, placement = self.model.prepare(frame)
        (found,) = stream(pixels, [placement])
        self._content = placement.content
        shown = self._whole_tokens(frame.float().cpu() / 255)
        kept = found[found.scores >= self._score]
        texts = [
            f"{self._names[label]} {score:.0%}"
            for label, score in zip(kept.labels.tolist(), kept.scores.tolist(), strict=True)
        ]
        return shown, with_boxes(shown, kept, texts)

    def content(self, layout: TokenLayout) -> tuple[int, int]:
        """See `Subject`."""
        patch = self.model.config.backbone.patch
        height, width = (-(-side // patch) for side in self._content)
        return height, width

    def _whole_tokens(self, frame: Tensor) -> Tensor:
        """The frame with black where its last row and column of tokens reach beyond it."""
        patch = self.model.config.backbone.patch
        missing = [
            round(side * (-(-content // patch) * patch / content)) - side
            for side, content in zip(frame.shape[-2:], self._content, strict=True)
        ]
        return F.pad(frame, (0, missing[1], 0, missing[0]))


class Features:
    """A timm model: its prediction is its features as colours, by their three main directions."""

    shows = "features"

    def __init__(self, model: Any, size: int | None) -> None:
        self.model = model
        self._size = size
        cfg = model.pretrained_cfg
        self._mean = torch.tensor(cfg["mean"])[:, None, None]
        self._std = torch.tensor(cfg["std"])[:, None, None]
        self._fitted: tuple[int, int] | None = None
        self._basis: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def fit(self, height: int, width: int) -> None:
        """Set the model up for frames of this shape, in whole patches."""
        patch = self.model.patch_embed.patch_size[0]
        longest = self._size or max(self.model.patch_embed.img_size)
        scale = longest / max(height, width)
        self._fitted = tuple(
            max(1, round(side * scale / patch)) * patch for side in (height, width)
        )
        self.model.set_input_size(img_size=self._fitted)

    def step(self, stream: Stream, frame: Tensor) -> tuple[Tensor, Tensor]:
        """See `Subject`."""
        assert self._fitted is not None
        image = frame.float()[None] / 255
        shown = F.interpolate(image, self._fitted, mode="bilinear", antialias=True)[0].clamp(0, 1)
        pixels = ((shown - self._mean) / self._std)[None]
        device = next(self.model.parameters()).device
        tokens = stream.call("forward_features", pixels.to(device))[0].float().cpu()
        assert stream.last is not None
        layout = next(iter(stream.last.layouts.values()))
        patches = tokens[layout.prefix : layout.tokens - layout.suffix]
        return shown, 0.35 * shown + 0.65 * self._coloured(patches, layout)

    def content(self, layout: TokenLayout) -> tuple[int, int]:
        """See `Subject`."""
        return layout.grid

    def _coloured(self, patches: Tensor, layout: TokenLayout) -> Tensor:
        if self._basis is None:
            mean = patches.mean(dim=0)
            found = torch.linalg.svd(patches - mean, full_matrices=False).Vh[:3]
            directions = F.pad(
                found, (0, 0, 0, 3 - len(found))
            )  # two patches have only two directions
            along = (patches - mean) @ directions.T
            low, high = along.quantile(0.02, dim=0), along.quantile(0.98, dim=0)
            self._basis = mean, directions, low, high
        mean, directions, low, high = self._basis
        colours = ((patches - mean) @ directions.T - low) / (high - low).clamp_min(1e-6)
        grid = colours.clamp(0, 1).T.unflatten(1, layout.grid)
        assert self._fitted is not None
        return F.interpolate(grid[None], self._fitted, mode="bicubic")[0].clamp(0, 1)


def subject(
    name: str, weights: Path | None, size: int | None, score: float, device: str
) -> Subject:
    """A model by file or name."""
    family, _, rest = name.partition(":")
    if family == "timm" and rest:
        return Features(_timm(rest, weights).to(device), size)
    path = Path(name)
    if path.suffix != ".safetensors":
        raise UnsupportedError(
            f"{name!r} names no model to show: give timm:NAME, or a .safetensors file of a ViTDet "
            "made by eventful.save_model or `eventful weights convert`."
        )
    model = load_model(path, **({} if size is None else {"size": size}))
    if not isinstance(model, ViTDet):
        raise UnsupportedError(
            f"{path} holds a {type(model).__name__}; only a whole ViTDet can be shown."
        )
    return Detector(model.to(device), score)


def _timm(name: str, weights: Path | None) -> Any:
    timm = libraries.load("timm")
    if not timm.is_model(name):
        raise UnsupportedError(f"timm has no model {name!r}.")
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=0).eval()
    if not hasattr(model, "set_input_size"):
        raise UnsupportedError(f"{name} takes one size of frame only; show another model.")
    if weights is not None:
        load_state(model, weights, name)
    return model
