"""A threshold for each gate of a detector, from the errors its gates see on other videos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from torch import Tensor, cat

from eventful.calibrate.thresholds import thresholds
from eventful.errors import ConfigError, DataError
from eventful.paper.data.records import Video
from eventful.paper.evaluate.models import Weights
from eventful.paper.evaluate.runs import VideoResult
from eventful.paper.evaluate.variants import SKIP, Variant
from eventful.paper.evaluate.workers import Tick
from eventful.stream import Stream
from eventful.surgery.conversion import convert


@dataclass(frozen=True)
class GateJob:
    """Record the errors at each gate on a video, under `TopFraction` of the variant's share.

    Attributes:
        frames: limit for each video. The first one has no errors.
    """

    weights: Weights
    variant: Variant
    frames: int

    def length(self, video: Video) -> int:
        """See `Job`."""
        try:
            return min(len(video), self.frames)
        except DataError:
            return 0

    def run(self, video: Video, device: str, tick: Tick) -> VideoResult:
        """See `Job`; the tensors are the errors of all tokens and frames, (values,), by gate."""
        config = self.variant.config()
        assert config is not None
        model = self.weights.vitdet(device)
        found: dict[str, list[Tensor]] = {}
        stream = Stream(convert(model, config), maps=True)
        for frame in islice(video, self.frames):
            stream(model.prepare(frame.pixels)[0])
            assert stream.last is not None
            for name, gate in stream.last.gates.items():
                if gate.error is not None and not any(stream.last.flushed):
                    found.setdefault(name, []).append(gate.error.flatten().float().cpu())
            tick(1)
        errors = {name: cat(values) for name, values in found.items()}
        return VideoResult(errors, {"name": video.name, "order": list(errors)})


def needs_tuning(variant: Variant) -> bool:
    """Whether a variant has a threshold for each gate, which other videos must show.

    Raises:
        ConfigError: its preset has no gate around every operator.
    """
    if variant.per_gate is None or variant.preset == SKIP:
        return False
    config = variant.config()
    if config is None or config.gating != "operator":
        raise ConfigError(
            f"{variant.label}: per_gate is for presets with a gate around every operator: paper, "
            "tokenwise, stgt or exact."
        )
    return True


def with_gates(variant: Variant, results: Sequence[VideoResult]) -> Variant:
    """The variant with a threshold for each gate: what `per_gate` of its errors exceed.

    Args:
        results: of a `GateJob`, one for each video.
    """
    found: dict[str, list[Tensor]] = {}
    for result in results:
        for name in result.facts["order"]:  # that of the model; a file has another one
            found.setdefault(name, []).append(result.tensors[name])
    if not found:
        raise DataError("The videos to tune thresholds on need two frames at least.")
    assert variant.per_gate is not None
    errors = {name: cat(values) for name, values in found.items()}
    return replace(variant, gates=thresholds(errors, variant.per_gate))
