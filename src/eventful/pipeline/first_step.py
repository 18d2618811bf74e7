"""A trial of the first two steps of a stream, without the arithmetic of models known by name.

Some models convert and then refuse their first frame, such as one that cuts a frame into a batch of
pictures.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
from torch import nn

from eventful.errors import EventfulError
from eventful.modelspec.hollow import no_arithmetic, takes, without_weights
from eventful.modelspec.names import first_line
from eventful.modelspec.size import Size
from eventful.pipeline.models import OpenedModel
from eventful.pipeline.subject import ReadySubject, Subject
from eventful.stream import Stream
from eventful.surgery.conversion import convert
from eventful.surgery.matching import named_trunks

STEPS = 2  # the first computes everything, the second what changed


def refusal(model: nn.Module, size: tuple[int, int], given: Size | None) -> str | None:
    """Why a stream of a model would refuse its first frames; None if it takes them.

    Args:
        model: not converted; it may be on the meta device.
        size: height and width of the pictures.
        given: size of the frames that the user asked for.
    """
    by_name = next(named_trunks(model), None) is not None  # a structure is tried with arithmetic
    tried = without_weights(model) if by_name else copy.deepcopy(model)
    try:
        ready = Subject(OpenedModel(type(model).__name__, tried, ()), given or size).at(*size)
        with no_arithmetic() if by_name else nullcontext():
            _step(ready)
    except EventfulError as error:
        return str(error)
    except Exception as error:  # code of a library fails in any way
        what = f"{type(error).__name__}: {first_line(error)}"
        if takes(model, size):
            return f"a step of the converted model fails ({what}). The model itself does not."
        return f"the model itself fails on it ({what}). Give another --size, or another config."
    return None


def _step(ready: ReadySubject) -> None:
    height, width = ready.size
    picture = torch.zeros(3, height, width, dtype=torch.uint8)
    prepared = ready.prepare([picture] * ready.step_frames)
    stream = Stream(convert(ready.model))
    for _ in range(STEPS):
        stream.call(ready.method, *prepared.args)
