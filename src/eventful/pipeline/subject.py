"""A model with all that is between a picture and its prediction: size, pixels, meaning of outputs.

`open_subject("detector")` gives a `Subject`. `subject.at(height, width)` sets it up for pictures of
one size, and the `ReadySubject` prepares pictures and reads outputs:

    ready = open_subject("detector").at(288, 512)
    prepared = ready.prepare([picture])  # (3, 288, 512) uint8
    prediction = ready.read(ready.model(*prepared.args), prepared)
"""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eventful.errors import ConfigError, UnsupportedError
from eventful.models.focus import FocusViT
from eventful.models.vitdet.model import ViTDet
from eventful.models.vivit.model import ViViT
from eventful.models.vivit.views import PIXEL_MEAN, PIXEL_STD
from eventful.modelspec.hollow import picture_method
from eventful.modelspec.size import Longest, Size, both_sides, fit_of, in_words, whole_patches
from eventful.pipeline.models import OpenedModel, label_names, open_model
from eventful.pipeline.predictions import Kind, Prediction, read_output
from eventful.video.fitting import Fitting, resized
from eventful.video.frame import Frame, Region
from eventful.video.normalization import Normalization, input_size, model_normalization

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FOCUS_SIZE = 448  # longer side of frames for the saliency model, which takes any size


class SquareWarning(UserWarning):
    """Frames are squares though the model takes the shape of the picture."""


@dataclass(frozen=True)
class Prepared:
    """One step's input.

    Attributes:
        args: what the model is called with.
        frame: the last frame of the step as the model sees it, with where the picture lies in it.
    """

    args: tuple[Any, ...]
    frame: Frame


class Head:
    """What turns outputs of the model's eventful part into predictions; it may remember."""

    def __call__(self, output: Any) -> Any:
        """The model's whole output, of one step's."""
        return output

    def memory(self) -> dict[str, Tensor]:
        """What it remembers, by name."""
        return {}

    def restore(self, memory: dict[str, Tensor]) -> None:
        """Remember what another one did."""


class ReadySubject(ABC):
    """A model set up for pictures of one size.

    Attributes:
        model: the part that becomes eventful, or the whole model; not converted.
        method: of the model, to call for each step.
        step_frames: pictures of one step.
    """

    method = "forward"
    step_frames = 1

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    @abstractmethod
    def size(self) -> tuple[int, int]:
        """Height and width of the frames that the model sees."""

    @abstractmethod
    def prepare(self, pictures: list[Tensor]) -> Prepared:
        """Pictures (3, H, W) uint8 RGB as one step's input."""

    @abstractmethod
    def read(self, output: Any, prepared: Prepared) -> Prediction:
        """The meaning of an output of the head."""

    def head(self) -> Head:
        """The rest of the model, for one source."""
        return Head()

    def feature_part(self, model: nn.Module) -> nn.Module | None:
        """The part of a (converted) model whose outputs are compared; None for the output."""
        return None

    def _placed(self, pixels: Tensor) -> Tensor:
        like = next(self.model.parameters())
        return pixels.to(like.device, like.dtype)


class Subject:
    """A model that can be run on video.

    Attributes:
        kind: of its predictions; None where its first output will show it.
        classes: names of the labels.
    """

    def __init__(self, opened: OpenedModel, size: Size | None = None) -> None:
        self.name, self.model, self.classes = opened.name, opened.model, opened.classes
        self.random = opened.random
        self._size = size
        self.kind = _kind_of(self.model)
        self._made: tuple[tuple[int, int], ReadySubject] | None = None

    @property
    def step_frames(self) -> int:
        """Frames of one step: more than one for a model of clips."""
        return self.model.config.tubelet if isinstance(self.model, ViViT) else 1

    def at(self, height: int, width: int) -> ReadySubject:
        """The model for pictures of this size; the last one made is kept."""
        if self._made is None or self._made[0] != (height, width):
            self._made = (height, width), self._ready(height, width)
        return self._made[1]

    def to(self, device: str, dtype: str = "float32") -> Subject:
        """The same, moved."""
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UnsupportedError("No CUDA device here (`eventful doctor`); use --device cpu.")
        try:
            self.model = self.model.to(torch.device(device), DTYPES[dtype])
        except (RuntimeError, KeyError) as error:
            raise ConfigError(f"device {device!r}, dtype {dtype!r}: {error}") from None
        self._made = None
        return self

    def _ready(self, height: int, width: int) -> ReadySubject:
        if isinstance(self.model, ViTDet):
            return DetectorSubject(self.model)
        if isinstance(self.model, ViViT):
            return ClipSubject(self.model, self._size)
        return FrameSubject(self.model, self._size, (height, width))


def open_subject(
    model: str | nn.Module, *, weights: str | None = None, size: Size | None = None
) -> Subject:
    """A model by name, or one of your own, ready to be run on video.

    Args:
        model: see `eventful.pipeline.models.open_model`.
        size: of the frames in pixels: height and width, or one side of a square; pictures keep
            their shape. `Longest` for frames with the shape of the picture.
    """
    if isinstance(model, nn.Module):
        name = type(model).__name__
        return Subject(OpenedModel(name, model.eval(), label_names(model)), size)
    return Subject(open_model(model, weights=weights, size=size), size)


def _kind_of(model: nn.Module) -> Kind | None:
    """What a model predicts, where that is known without running it."""
    if isinstance(model, ViTDet):
        return "detections"
    if isinstance(model, ViViT):
        return "labels"
    if isinstance(model, FocusViT):
        return "saliency"
    kind = type(model).__name__
    if kind.endswith("ForObjectDetection"):
        return "detections"
    if kind.endswith("ForImageClassification"):
        return "labels"
    if hasattr(model, "forward_features") and hasattr(model, "num_classes"):  # timm
        return "labels" if model.num_classes else "features"
    return None


class DetectorSubject(ReadySubject):
    """A ViTDet: frames are squares, padded at the right and the bottom."""

    model: ViTDet

    @property
    def size(self) -> tuple[int, int]:
        """See `ReadySubject`."""
        side = self.model.config.backbone.size
        return side, side

    def prepare(self, pictures: list[Tensor]) -> Prepared:
        """See `ReadySubject`."""
        pixels, place = self.model.prepare(pictures[-1])
        region = Region(0.0, 0.0, float(place.content[0]), float(place.content[1]))
        frame = Frame(pixels, original_size=place.original, region=region)
        return Prepared((pixels, [place]), frame)

    def read(self, output: Any, prepared: Prepared) -> Prediction:
        """See `ReadySubject`; the model itself gives boxes in pixels of the picture."""
        return Prediction("detections", detections=output[0].boxes_on_cpu())

    def feature_part(self, model: nn.Module) -> nn.Module | None:
        """Boxes cannot be compared number by number: what the backbone gives is."""
        part: nn.Module = model.backbone  # type: ignore[assignment]
        return part


class ClipSubject(ReadySubject):
    """A ViViT: its spatial model is stepped, its temporal model sees the last steps of a clip."""

    def __init__(self, model: ViViT, size: Size | None) -> None:
        super().__init__(model.spatial)
        self._whole = model
        self.step_frames = model.config.tubelet
        patch = model.config.patch
        height, width = (side - side % patch for side in both_sides(size or model.config.size))
        normal = Normalization((PIXEL_MEAN,) * 3, (PIXEL_STD,) * 3)
        self._fitting = Fitting((height, width), "crop", 1, normal)

    @property
    def size(self) -> tuple[int, int]:
        """See `ReadySubject`."""
        assert self._fitting.size is not None
        return self._fitting.size

    def prepare(self, pictures: list[Tensor]) -> Prepared:
        """See `ReadySubject`."""
        frames = [fitted(self._fitting, picture) for picture in pictures]
        clip = torch.stack([frame.as_subclass(Tensor) for frame in frames], dim=2)
        return Prepared((self._placed(clip),), frames[-1])

    def read(self, output: Any, prepared: Prepared) -> Prediction:
        """See `ReadySubject`."""
        if output is None:
            return Prediction("labels", probabilities=torch.zeros(0))
        return Prediction("labels", probabilities=output[0].float().softmax(dim=0).cpu())

    def head(self) -> Head:
        """See `ReadySubject`."""
        return ClipHead(self._whole)


class ClipHead(Head):
    """The temporal model and the classifier over the vectors of the last steps."""

    def __init__(self, model: ViViT) -> None:
        self._model = model
        self._vectors: deque[Tensor] = deque(maxlen=model.config.steps)

    def __call__(self, output: Any) -> Any:
        """Logits, once there are vectors of a whole clip; None before."""
        self._vectors.append(output.detach())
        if len(self._vectors) < self._model.config.steps:
            return None
        with torch.no_grad():
            return self._model.classify(torch.stack(list(self._vectors), dim=1))

    def memory(self) -> dict[str, Tensor]:
        """See `Head`."""
        return {} if not self._vectors else {"vectors": torch.stack(list(self._vectors))}

    def restore(self, memory: dict[str, Tensor]) -> None:
        """See `Head`."""
        like = next(self._model.parameters())
        self._vectors.extend(memory.get("vectors", torch.zeros(0)).to(like.device))


class FrameSubject(ReadySubject):
    """Any model of single frames: timm, transformers, torchvision, the saliency model, your own."""

    def __init__(self, model: nn.Module, size: Size | None, picture: tuple[int, int]) -> None:
        fitting = _fitting_of(model, size, picture)
        if hasattr(model, "set_input_size"):
            # It resizes the table of positions for good: another size would start from that.
            model = copy.deepcopy(model)
            model.set_input_size(img_size=fitting.size)  # type: ignore[operator]
        super().__init__(model)
        self._fitting = fitting
        self._labels = bool(label_names(model))
        known = getattr(getattr(model, "config", None), "num_labels", None)
        self._classes = known if isinstance(known, int) else None
        if _kind_of(model) == "features":
            self.method = "forward_features"  # all tokens, where `forward` gives one vector
        else:
            self.method = picture_method(model)

    @property
    def size(self) -> tuple[int, int]:
        """See `ReadySubject`."""
        assert self._fitting.size is not None
        return self._fitting.size

    def prepare(self, pictures: list[Tensor]) -> Prepared:
        """See `ReadySubject`."""
        frame = fitted(self._fitting, pictures[-1])
        return Prepared((self._placed(frame.as_subclass(Tensor)),), frame)

    def read(self, output: Any, prepared: Prepared) -> Prediction:
        """See `ReadySubject`."""
        return read_output(output, prepared.frame, labels=self._labels, classes=self._classes)


def fitted(fitting: Fitting, picture: Tensor) -> Frame:
    """A picture (3, H, W) uint8 as a frame, in the way of `eventful.read`."""
    height, width = int(picture.shape[1]), int(picture.shape[2])
    layout = fitting.layout(height, width)
    planes = resized(picture.permute(1, 2, 0).numpy(), *layout.scaled)
    pixels = fitting.pixels(layout, planes)
    return Frame(pixels, original_size=(height, width), region=layout.region)


def _fitting_of(model: nn.Module, size: Size | None, picture: tuple[int, int]) -> Fitting:
    """How pictures of one size become frames of a model.

    Without a size, a model that takes any shape gets the shape of the picture, in whole patches.
    """
    own, normal = input_size(model), model_normalization(model)
    if isinstance(model, FocusViT):
        patch = (model.config.patch,) * 2
        return any_shape(size or Longest(FOCUS_SIZE), picture, patch, normal)
    if hasattr(model, "set_input_size"):
        patch = model.patch_embed.patch_size  # type: ignore[union-attr,assignment]
        return any_shape(size or Longest(max(own or (224, 224))), picture, patch, normal)
    if own is None and size is None:
        raise ConfigError(
            f"{type(model).__name__} does not say which size of frames it takes: give --size."
        )
    # Other families are built for --size where they do not take frames of any size.
    return Fitting(both_sides(size) if size is not None else own, "pad", 1, normal)


def any_shape(
    size: Size, picture: tuple[int, int], patch: tuple[int, int], normal: Normalization
) -> Fitting:
    """How pictures become frames of a model that takes any number of whole patches."""
    shape = whole_patches(size, picture, patch)
    fit = fit_of(shape, picture)
    if fit == "pad" and isinstance(size, int):
        content = min(picture) / max(picture)
        warnings.warn(
            f"--size {size} is a square, and {1 - content:.0%} of each frame is padding. "
            f"--size {in_words(Longest(size))} gives frames the shape of the picture.",
            SquareWarning,
            stacklevel=2,
        )
    return Fitting(shape, fit, 1, normal)
