"""Every preset beside the dense model, in turn on each frame of a synthetic clip."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from eventful import Config, Stream, TopFraction
from eventful.bench.contenders import Dense, Measured, Streamed
from eventful.config import PRESETS
from eventful.modelspec.timm_models import build
from eventful.surgery.conversion import convert
from eventful.video.synthetic import moving_objects

BUDGET = 0.125  # share of the tokens, for the presets that need a number
WARM = 3  # frames left out of the medians: the flush and the first steady ones


@dataclass
class Entry(Measured):
    """A contender by name, with shares of tokens updated and of dense operations."""

    name: str = ""
    updated: list[float] = field(default_factory=list)
    operations: list[float] = field(default_factory=list)


@dataclass
class Row:
    """One line of the table: medians over the steady frames."""

    preset: str
    policy: str
    tokens_updated: float
    tokens: int
    operations_ratio: float
    speedup: float
    feature_error: float


def measure(frames: int, model: str, size: int) -> list[dict[str, Any]]:
    """Rows of the table, one for each preset."""
    torch.manual_seed(0)
    contenders = _contenders(build(model.removeprefix("timm:"), img_size=size))
    for frame in moving_objects(frames, (size, size)):
        _step(contenders, (frame - 0.5) / 0.5)
    return [asdict(_row(contender, contenders[0])) for contender in contenders[1:]]


def _contenders(vit: nn.Module) -> list[Entry]:
    made = [Entry(Dense(vit), name="dense")]
    automatic = Stream(convert(vit, Config.fast()))
    made.append(Entry(Streamed(automatic), name="fast (its own threshold)"))
    for preset in PRESETS:
        stream = Stream(convert(vit, Config.preset(preset, TopFraction(BUDGET))))
        made.append(Entry(Streamed(stream), name=preset))
    return made


def _step(contenders: list[Entry], frame: Tensor) -> None:
    """Run one frame through all contenders in turn, under the same conditions."""
    dense: Tensor | None = None
    for contender in contenders:
        began = time.perf_counter()
        output = _features(contender.run(frame))
        contender.ms.append((time.perf_counter() - began) * 1000)
        dense = output if dense is None else dense
        contender.error.append(float((output - dense).norm() / dense.norm()))
        record = contender.run.record
        if record is not None:
            contender.updated.append(record.fraction)
            contender.operations.append(record.macs / record.dense_macs)


def _features(output: Any) -> Tensor:
    """The tensor to compare: the output itself, or its first field."""
    return output if isinstance(output, Tensor) else next(iter(output.values()))


def _row(contender: Entry, dense: Entry) -> Row:
    assert isinstance(contender.run, Streamed)
    assert contender.run.record is not None
    tokens = next(iter(contender.run.record.layouts.values())).tokens
    policy = contender.run.stream.policy
    ratios = [a / b for a, b in zip(dense.ms[WARM:], contender.ms[WARM:], strict=True)]
    return Row(
        preset=contender.name,
        policy=type(policy).__name__,
        tokens_updated=statistics.median(contender.updated[WARM:]) * tokens,
        tokens=tokens,
        operations_ratio=statistics.median(contender.operations[WARM:]),
        speedup=statistics.median(ratios),
        feature_error=statistics.median(contender.error[WARM:]),
    )
