"""Running a forward call of a converted model as a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from eventful.errors import ConcurrentUseError, UnsupportedError
from eventful.rules.step import Step
from eventful.surgery.session import Session


class NotReached(Exception):
    """A forward call raised before it reached a converted block; `error` is what it raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def launch(session: Session, step: Step, forward: Callable[[], Any]) -> Any:
    """Run `forward` with `step` as the model's running step.

    Raises:
        NotReached: the call failed ahead of the first block.
    """
    if session.step is not None:
        raise ConcurrentUseError(
            "A stream of this model is in the middle of a step, and something in the model "
            "stepped another. Step it after the first has returned."
        )
    session.step = step
    try:
        with torch.no_grad():
            result = forward()
    except Exception as error:
        if step.record.gates:
            raise
        raise NotReached(error) from error
    finally:
        session.step = None
    if not step.record.gates:
        raise UnsupportedError(
            f"The call reached no converted block; they are in {_places(session)}. Call a "
            "method of the model that runs them on the frame, e.g. stream.call("
            "'forward_features', frame) for timm, 'get_image_features' for vision towers."
        )
    if step.unfinished and step.config.gating == "frame":
        raise UnsupportedError(
            "The model's call ended before the last converted block of "
            f"{', '.join(map(repr, step.unfinished))}. With gating='frame' every block is called "
            "for every frame. Use Config.exact() or gating='block', or convert fewer blocks "
            "(`where`)."
        )
    return result


def _places(session: Session) -> str:
    """Where in the model the converted blocks are."""
    names = [name for name in session.trunks if name]
    return " and ".join(names) if names else "the model itself"
