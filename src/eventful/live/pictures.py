"""Pictures of the page: the last frame of a source with its prediction and an overlay, as JPEG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from torch import Tensor
from torch.nn import functional as F

from eventful.errors import ConfigError
from eventful.live.channels import Shown
from eventful.pipeline.annotate import with_heat, with_text
from eventful.pipeline.pictures import draw_on, from_image, mark_updated, to_image
from eventful.pipeline.predictions import Prediction, name_of

if TYPE_CHECKING:
    from PIL.Image import Image

Overlay = Literal["none", "mask", "error"]
WIDTHS = (160, 1280)  # of pictures that a viewer may ask for
_QUALITY = 80


@dataclass(frozen=True)
class View:
    """How a viewer wants to see pictures.

    Attributes:
        overlay: nothing, the tokens that were computed, or how much each has changed.
        predictions: draw what the model found.
        width: most pixels across.
    """

    overlay: Overlay = "none"
    predictions: bool = True
    width: int = 640

    def __post_init__(self) -> None:
        if self.overlay not in get_args(Overlay):
            raise ConfigError(f"An overlay is {', '.join(get_args(Overlay))}.")
        if not isinstance(self.predictions, bool):
            raise ConfigError("predictions is true or false.")
        whole = isinstance(self.width, int) and not isinstance(self.width, bool)
        if not whole or not WIDTHS[0] <= self.width <= WIDTHS[1]:
            raise ConfigError(f"width is a whole number from {WIDTHS[0]} to {WIDTHS[1]}.")


def jpeg(shown: Shown, view: View, classes: Sequence[str]) -> bytes:
    """The picture that a viewer gets."""
    file = io.BytesIO()
    picture(shown, view, classes).save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def picture(shown: Shown, view: View, classes: Sequence[str]) -> Image:
    """The same, before it is encoded."""
    height, width = shown.picture.shape[1:]
    factor = min(1.0, view.width / width)
    small = _resized(shown.picture, max(1, round(height * factor)), max(1, round(width * factor)))
    prediction = shown.prediction if view.predictions else None
    if prediction is not None and prediction.saliency is not None:
        small = with_heat(small, prediction.saliency)
    canvas = to_image(small)
    if view.overlay == "mask" and shown.updated is not None:
        canvas = mark_updated(canvas, shown.updated)
    elif view.overlay == "error":
        canvas = to_image(_with_error(from_image(canvas), shown.error))
    if prediction is not None and prediction.detections is not None:
        found = prediction.detections
        draw_on(canvas, found.boxes * factor, found.labels, found.scores, classes)
    elif prediction is not None and prediction.probabilities is not None:
        canvas = to_image(with_text(from_image(canvas), _labels(prediction, classes), bottom=True))
    return canvas


def description(shown: Shown, classes: Sequence[str]) -> str:
    """What the model says of a frame, in words."""
    prediction = shown.prediction
    if prediction.detections is not None:
        names = [name_of(classes, label) for label in prediction.detections.labels.tolist()]
        counts = {name: names.count(name) for name in sorted(set(names))}
        return ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing found"
    if prediction.probabilities is not None:
        return "; ".join(_labels(prediction, classes))
    return "saliency" if prediction.saliency is not None else "features"


def _labels(prediction: Prediction, classes: Sequence[str]) -> list[str]:
    best = prediction.best(classes)[:3]
    lines = [f"{entry['label']} {entry['score']:.0%}" for entry in best]
    return lines or ["waiting for a whole clip"]


def _with_error(image: Tensor, error: Tensor | None) -> Tensor:
    """A picture with the errors of its tokens over it; none after a flush."""
    if error is None:
        return image
    size = (int(image.shape[1]), int(image.shape[2]))
    return with_heat(image, F.interpolate(error[None, None], size, mode="nearest")[0, 0])


def _resized(image: Tensor, height: int, width: int) -> Tensor:
    if (height, width) == tuple(image.shape[1:]):
        return image
    return from_image(to_image(image).resize((width, height)))
