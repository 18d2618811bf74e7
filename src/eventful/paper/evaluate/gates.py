"""A threshold for each gate of a detector, from the errors its gates see on other videos."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from torch import Tensor, cat

from eventful.calibrate.thresholds import thresholds
from eventful.errors import ConfigError, DataError
from eventful.models.vitdet.model import ViTDet
from eventful.paper.data.records import Video
from eventful.paper.evaluate.variants import Variant
from eventful.stream import Stream
from eventful.surgery.conversion import convert


def gate_thresholds(
    model: ViTDet, variant: Variant, videos: Sequence[Video], frames: int
) -> dict[str, float]:
    """For each gate, the error that a share of its tokens exceeds (`Variant.per_gate`).

    The errors are those under `TopFraction` of the same share, on the frames after the first.
    """
    config = variant.config()
    if config is None or variant.per_gate is None or config.gating != "operator":
        raise ConfigError(
            f"{variant.label}: per_gate is for presets with a gate around every operator: paper, "
            "tokenwise, stgt or exact."
        )
    found: dict[str, list[Tensor]] = {}
    for video in videos:
        stream = Stream(convert(model, config), maps=True)
        for frame in islice(video, frames):
            stream(model.prepare(frame.pixels)[0])
            assert stream.last is not None
            for name, gate in stream.last.gates.items():
                if gate.error is not None and not any(stream.last.flushed):
                    found.setdefault(name, []).append(gate.error.flatten().float().cpu())
    if not found:
        raise DataError("The videos to tune thresholds on need two frames at least.")
    return thresholds({name: cat(errors) for name, errors in found.items()}, variant.per_gate)
