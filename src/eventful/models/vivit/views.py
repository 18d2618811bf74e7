"""Views of a video: their pixels, their steps through a stream, and their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from eventful.errors import FrameError
from eventful.models.vivit.model import ViViT, steps
from eventful.rules.record import StepRecord
from eventful.stream import Stream

Observer = Callable[[StepRecord], None]

PIXEL_MEAN, PIXEL_STD = 0.45, 0.225


def prepare(frames: Tensor) -> Tensor:
    """Frames (T, H, W, 3), uint8 or 0 to 1, as a video (1, 3, T, H, W) of normalised pixels."""
    if frames.dim() != 4 or frames.shape[-1] != 3:
        raise FrameError(f"prepare takes frames (T, height, width, 3), got {tuple(frames.shape)}.")
    unit = frames.float() / 255 if frames.dtype == torch.uint8 else frames
    return ((unit - PIXEL_MEAN) / PIXEL_STD).permute(3, 0, 1, 2)[None]


def spatial_vectors(
    stream: Stream, video: Tensor, tubelet: int = 2, observe: Observer | None = None
) -> Tensor:
    """Vectors (B, T, D) of a view's steps through a stream of the converted spatial model.

    The stream is reset first: a view is a video of its own.

    Args:
        observe: called with the record of each step, e.g. to add up operations.
    """
    stream.reset()
    vectors = []
    for step in steps(video, tubelet):
        vectors.append(stream(step))
        if observe is not None and stream.last is not None:
            observe(stream.last)
    return torch.stack(vectors, dim=1)


@torch.no_grad()
def classify_views(
    model: ViViT,
    views: Iterable[Tensor],
    stream: Stream | None = None,
    observe: Observer | None = None,
) -> Tensor:
    """Class probabilities (classes,) of one video from its views.

    Args:
        views: (3, T, H, W) or (1, 3, T, H, W) each: 4 temporal x 3 spatial in the paper.
        stream: of the converted `model.spatial`; without one the model runs dense.
        observe: called with the record of each step of the stream.
    """
    logits = []
    for view in views:
        video = view if view.dim() == 5 else view[None]
        if stream is None:
            logits.append(model(video))
        else:
            vectors = spatial_vectors(stream, video, model.config.tubelet, observe)
            logits.append(model.classify(vectors))
    if not logits:
        raise FrameError("No views to classify; pass at least one.")
    return average_views(torch.cat(logits))


def average_views(logits: Tensor) -> Tensor:
    """Probabilities (classes,) from the logits (V, classes) of the views: mean, then softmax."""
    return logits.float().mean(dim=0).softmax(dim=0)
