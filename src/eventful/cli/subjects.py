"""Models that `eventful visualize` can show: a detector with boxes, others with features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eventful.errors import UnsupportedError
from eventful.models.vitdet.model import ViTDet
from eventful.models.vivit.model import ViViT
from eventful.modelspec.size import Longest, Size
from eventful.pipeline.models import OpenedModel, label_names, open_model
from eventful.pipeline.subject import Subject as RunSubject
from eventful.pipeline.subject import any_shape, fitted
from eventful.stream import Stream
from eventful.surgery.outputs import real_tensors
from eventful.tokens.layout import TokenLayout
from eventful.video.fitting import Fitting
from eventful.video.normalization import Normalization, choose_normalization
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

    def __init__(self, model: Any, size: Size | None) -> None:
        self.model = model
        self._size = size
        cfg = model.pretrained_cfg
        self._normal = Normalization(cfg["mean"], cfg["std"])
        self._fitting: Fitting | None = None
        self._colours = Colours()

    def fit(self, height: int, width: int) -> None:
        """Set the model up for frames of this shape, in whole patches."""
        patches = self.model.patch_embed
        size = self._size or Longest(max(patches.img_size))
        self._fitting = any_shape(size, (height, width), patches.patch_size, self._normal)
        self.model.set_input_size(img_size=self._fitting.size)

    def step(self, stream: Stream, frame: Tensor) -> tuple[Tensor, Tensor]:
        """See `Subject`."""
        assert self._fitting is not None
        pixels = fitted(self._fitting, frame).as_subclass(Tensor)
        plain = replace(self._fitting, normalization=choose_normalization("none"))
        shown = fitted(plain, frame).as_subclass(Tensor)[0].clamp(0, 1)
        device = next(self.model.parameters()).device
        tokens = stream.call("forward_features", pixels.to(device))[0].float().cpu()
        assert stream.last is not None
        layout = next(iter(stream.last.layouts.values()))
        patches = tokens[layout.prefix : layout.tokens - layout.suffix]
        features = patches.T.unflatten(1, layout.grid)
        size = int(shown.shape[1]), int(shown.shape[2])
        return shown, 0.35 * shown + 0.65 * self._colours.of(features, size)

    def content(self, layout: TokenLayout) -> tuple[int, int]:
        """See `Subject`."""
        return layout.grid


class Outputs:
    """Any other model: its prediction is its output as colours, where that has places."""

    shows = "outputs"

    def __init__(self, opened: OpenedModel, size: Size | None) -> None:
        self.model = opened.model
        self._subject = RunSubject(opened, size)
        self._colours = Colours()

    def step(self, stream: Stream, frame: Tensor) -> tuple[Tensor, Tensor]:
        """See `Subject`."""
        ready = self._subject.at(int(frame.shape[1]), int(frame.shape[2]))
        prepared = ready.prepare([frame])
        output = stream.call(ready.method, *prepared.args)
        shown = F.interpolate(frame.float()[None] / 255, ready.size, mode="bilinear")[0]
        assert stream.last is not None
        grid = _map_of(output, next(iter(stream.last.layouts.values())))
        if grid is None:
            return shown, shown
        return shown, 0.35 * shown + 0.65 * self._colours.of(grid, ready.size)

    def content(self, layout: TokenLayout) -> tuple[int, int]:
        """See `Subject`."""
        return layout.grid


class Colours:
    """Features as colours, by the three main directions of the first ones."""

    def __init__(self) -> None:
        self._basis: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def of(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """A picture (3, H, W) in [0, 1] of features (D, h, w)."""
        grid = (int(features.shape[1]), int(features.shape[2]))
        patches = features.flatten(1).T
        if self._basis is None:
            mean = patches.mean(dim=0)
            found = torch.linalg.svd(patches - mean, full_matrices=False).Vh[:3]
            # Two patches, or two features, have only two directions.
            directions = F.pad(found, (0, 0, 0, 3 - len(found)))
            along = (patches - mean) @ directions.T
            low, high = along.quantile(0.02, dim=0), along.quantile(0.98, dim=0)
            self._basis = mean, directions, low, high
        mean, directions, low, high = self._basis
        colours = ((patches - mean) @ directions.T - low) / (high - low).clamp_min(1e-6)
        picture = colours.clamp(0, 1).T.unflatten(1, grid)
        return F.interpolate(picture[None], size, mode="bicubic")[0].clamp(0, 1)


def _map_of(output: Any, layout: TokenLayout) -> Tensor | None:
    """The first part of an output that has places, as (D, h, w); None if there is none."""
    for values in real_tensors(output):
        found = values.detach()[0].float().cpu()
        if values.dim() == 4:
            return found
        if values.dim() == 3 and values.shape[1] == layout.tokens:
            patches = found[layout.prefix : layout.tokens - layout.suffix]
            return patches.T.unflatten(1, layout.grid)
        if values.dim() == 3 and values.shape[1] * values.shape[2] > 4 * layout.tokens:
            return found[None]  # one number a pixel, such as depth
    return None


def subject(
    name: str, weights: str | None, size: Size | None, score: float, device: str
) -> Subject:
    """A model by name, as `eventful.modelspec.opening.open_named` takes it."""
    opened = open_model(name, weights=weights, size=size)
    model: Any = opened.model.to(device)
    if isinstance(model, ViTDet):
        return Detector(model, score)
    if isinstance(model, ViViT):
        raise UnsupportedError(f"{name} sees clips, not frames, and cannot be shown.")
    if hasattr(model, "set_input_size") and hasattr(model, "forward_features"):
        return Features(model, size)
    return Outputs(opened, size)
