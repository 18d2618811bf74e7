"""What is known of a run: frame by frame, a few frames as pictures, and of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class FrameRow:
    """One frame of one source.

    Attributes:
        index: place in the source, from 0.
        seconds: time in the source, None where it has none.
        ms: milliseconds of the model's step, without decoding and drawing.
        dense_ms: those of the whole model on the same frame, where it ran too.
        tokens: of the frame; `updated` of them were computed.
        operations: multiply-adds of the step; `dense_operations` those of the whole model.
        error: |output - dense| / |dense| of the features, where the dense model ran too.
        estimate: what the stream estimates of that error, None where it does not.
        stale: the stream says that its output should not be relied on.
        flushed: everything was computed anew.
        found: number of detections, None for a model that makes none.
    """

    source: str
    index: int
    seconds: float | None
    ms: float
    tokens: int
    updated: float
    operations: float
    dense_operations: float
    dense_ms: float | None = None
    error: float | None = None
    estimate: float | None = None
    stale: bool = False
    flushed: bool = False
    found: int | None = None


@dataclass(frozen=True)
class Still:
    """One frame as pictures, (3, H, W) bytes each, of one size.

    Attributes:
        eventful: the frame with the predictions drawn on it; `dense` with those of the whole model.
        updated: (h, w) which tokens were computed, true or false; None where it is not known.
    """

    source: str
    index: int
    eventful: Tensor
    dense: Tensor | None = None
    updated: Tensor | None = None


@dataclass(frozen=True)
class Totals:
    """Sums over all frames of a source, where the rows are only some of them.

    Attributes:
        steps: of the model, one row each. A step of a model of clips has several frames.
        saved: operations of the whole model divided by those that were done.
        share: of the tokens, how many were computed.
    """

    steps: int
    frames: int
    flushed: int
    stale: int
    saved: float | None
    share: float | None


@dataclass(frozen=True)
class RunFacts:
    """A run as a whole.

    Attributes:
        settings: budget, device, precision and so on, by name, as they are to be read.
        accuracy: scores by name, `{"mAP50": {"eventful": 0.8, "dense": 0.9}}`; none without labels.
        lost: frames that were damaged, dropped or skipped, by reason.
        memory: bytes that the streams keep.
        versions: of the package, torch, Python and the device's name.
        totals: by source, and of all of them under `""`; what is not there is taken of the rows.
    """

    model: str
    sources: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    accuracy: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)
    memory: int = 0
    versions: Mapping[str, Any] = field(default_factory=dict)
    totals: Mapping[str, Totals] = field(default_factory=dict)
