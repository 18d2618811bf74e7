"""Models by name, set up for the frames that their graphs will take, and one such frame."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eventful.errors import UnsupportedError
from eventful.modelspec.size import Size, both_sides
from eventful.pipeline.subject import open_subject
from eventful.surgery.conversion import inspect

# `eventful run` shows all features of a model without a head; its graph gives what a call gives.
_CALLED = ("forward", "forward_features")


def open_for_export(
    name: str, weights: str | None = None, size: Size | None = None
) -> tuple[nn.Module, Tensor]:
    """A model as `eventful run` takes it, and a frame (1, C, height, width) as it sees it.

    Args:
        size: of the frames in pixels; the model's own if left out.

    Raises:
        UnsupportedError: it does not take one frame at a time, or has no size of its own.
    """
    subject = open_subject(name, weights=weights, size=size)
    own = both_sides(size) if size is not None else inspect(subject.model).size
    if own is None:
        raise UnsupportedError(f"{name} has no frame size of its own: give --size HxW.")
    ready = subject.at(*own)
    tower = "eventful.export.export(model.vision_model, frame, FOLDER)"
    if ready.step_frames != 1:
        raise UnsupportedError(
            f"{name} takes {ready.step_frames} frames in one step, and a graph takes one. Export a "
            f"part of it that takes one: {tower}."
        )
    if ready.method not in _CALLED:
        raise UnsupportedError(
            f"{name} sees pictures through its method `{ready.method}`, and a graph is made of a "
            f"call of the model itself. Export its tower: {tower}."
        )
    draw = torch.Generator().manual_seed(0)
    picture = torch.randint(0, 256, (3, *ready.size), generator=draw, dtype=torch.uint8)
    frame = next(one for one in ready.prepare([picture]).args if isinstance(one, Tensor))
    return ready.model, frame.float()
