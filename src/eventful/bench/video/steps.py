"""The quality run, frame by frame: streams, frame skipping, the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from eventful import ops
from eventful.bench.contenders import schedule
from eventful.bench.video.configs import plain_config
from eventful.bench.video.model import Prepare
from eventful.bench.video.rows import Series
from eventful.policies import Always, GateContext
from eventful.rules.record import StepRecord
from eventful.stream import Stream
from eventful.surgery.conversion import convert
from eventful.tokens.layout import TokenLayout
from eventful.tokens.selection import Selection


@dataclass(frozen=True)
class Shot:
    """A clip in memory, and what the dense model says about it.

    Attributes:
        frames: uint8 (3, H, W) at the model's size.
        dense: output of every frame, on the CPU; tokens (1, N, D) if `by_token`.
        layout: where the patches are among the tokens.
    """

    model: nn.Module
    prepare: Prepare
    frames: list[Tensor]
    dense: list[Tensor]
    layout: TokenLayout

    @property
    def by_token(self) -> bool:
        """Whether an output has a row for each token, which can be carried along."""
        return has_tokens(self.dense[0], self.layout)

    def pixels(self) -> Iterator[Tensor]:
        """Frames as the model takes them."""
        for frame in self.frames:
            yield self.prepare(frame)

    def told(self, t: int) -> Tensor:
        """The dense output of a frame on the model's device."""
        return self.dense[t].to(self.prepare.device)


@dataclass(frozen=True)
class Step:
    """One frame of one contender. Shares are of the tokens, and of the dense operations."""

    output: Tensor
    updated: float
    operations: float
    record: StepRecord | None = None


@dataclass
class Outcome:
    """The series of a contender, its config, and what a head found in its outputs."""

    series: Series = field(default_factory=Series)
    config: str = ""
    found: list[Any] = field(default_factory=list)


def judged(
    shot: Shot,
    steps: Iterator[Step],
    detect: Callable[[Tensor], Any] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run a contender and compare each of its outputs with the dense one."""
    made = Outcome()
    for t, step in enumerate(steps):
        made.series.updated.append(step.updated)
        made.series.operations.append(step.operations)
        made.series.judge(step.output, shot.dense[t])
        _note(made.series, step.record, shot.layout.tokens)
        if step.record is not None:
            made.config = repr(step.record.config)
        if detect is not None:
            made.found.append(detect(step.output))
        tick()
    for name in ("estimate", "stale", "at_ceiling", "wanted"):
        values = getattr(made.series, name)
        if all(value is None for value in values):
            values.clear()
        else:
            blank = math.nan if name in ("estimate", "wanted") else False
            values[:] = [blank if value is None else value for value in values]
    return made


def _note(series: Series, record: StepRecord | None, tokens: int) -> None:
    """What the record says beyond counts; None where this version of it does not."""
    series.estimate.append(_number(getattr(record, "estimate", None)))  # type: ignore[arg-type]
    wanted = _number(getattr(record, "wanted", None))
    series.wanted.append(None if wanted is None else wanted / tokens)  # type: ignore[arg-type]
    for name in ("stale", "at_ceiling"):
        flag = _number(getattr(record, name, None))
        getattr(series, name).append(None if flag is None else flag > 0)


def _number(value: Any) -> float | None:
    """A value of one stream, or the mean over streams; a record may have either."""
    if value is None:
        return None
    return float(torch.as_tensor(value).float().mean())


def dense_outputs(
    model: nn.Module, pixels: Iterator[Tensor], tick: Callable[[], None] = lambda: None
) -> list[Tensor]:
    """Tokens of every frame by the dense model, on the CPU."""
    made = []
    for frame in pixels:
        with torch.no_grad():
            made.append(model(frame).cpu().clone())
        tick()
    return made


def layout_of(model: nn.Module, frame: Tensor) -> TokenLayout:
    """Where the patches are among the model's tokens."""
    stream = Stream(convert(model, plain_config(Always())))
    stream(frame)
    assert stream.last is not None
    return next(iter(stream.last.layouts.values()))


def has_tokens(output: Tensor, layout: TokenLayout) -> bool:
    """Whether an output is the tokens of a layout, (1, N, D)."""
    return output.dim() == 3 and output.shape[1] == layout.tokens


def dense_steps(shot: Shot) -> Iterator[Step]:
    """The dense model on every frame."""
    for t in range(len(shot.frames)):
        yield Step(shot.told(t), 1.0, 1.0)


def stream_steps(shot: Shot, converted: nn.Module) -> Iterator[Step]:
    """A converted model in a stream."""
    stream = Stream(converted)
    for frame in shot.pixels():
        output = stream(frame)
        record = stream.last
        assert record is not None
        yield Step(output, record.fraction, record.macs / max(record.dense_macs, 1), record)


def skip_steps(shot: Shot, share: float, carrier: Carrier | None = None) -> Iterator[Step]:
    """The dense model on a share of the frames, evenly; in between its tokens are held.

    Args:
        carrier: carries the held tokens along the motion of the picture.
    """
    held = shot.told(0)
    for t, (due, frame) in enumerate(zip(schedule(share), shot.pixels(), strict=False)):
        if due:
            held = shot.told(t)
            if carrier is not None:
                carrier.see(frame)
        elif carrier is not None:
            held = carrier(held, frame)
        yield Step(held, float(due), float(due))


class Carrier:
    """Carries held tokens along the motion from one frame to the next.

    Args:
        layout: of the tokens.
    """

    def __init__(self, layout: TokenLayout) -> None:
        self._layout = layout
        self._before: Tensor | None = None

    def see(self, frame: Tensor) -> Tensor:
        """Remember a frame (1, 3, H, W), to find the motion from it to the next."""
        self._before = ops.grey_picture(frame, self._layout.grid)
        return self._before

    def __call__(self, tokens: Tensor, frame: Tensor) -> Tensor:
        """Tokens (1, N, D) of the frame before, where their content is in this one."""
        before = self._before
        now = self.see(frame)
        if before is None:
            return tokens
        motion = ops.match_blocks(now, before, None)
        return ops.carry(tokens, motion, self._layout.prefix, None)


@dataclass(frozen=True, eq=False)
class Chosen:
    """A policy that takes given tokens: those with the highest scores.

    Attributes:
        score: (N,).
        count: tokens to take. Forced ones are among them.
    """

    score: Tensor
    count: int
    order: float = 2.0

    def select(self, error: Tensor, context: GateContext) -> Selection:
        """See `Policy`."""
        score = self.score.to(error)[None].expand_as(error)
        if context.forced is not None:
            score = score.masked_fill(context.forced, math.inf)
        return Selection.top(score, self.count)


def oracle_steps(shot: Shot, updated: Sequence[float]) -> Iterator[Step]:
    """The plain rule, with tokens chosen by how wrong their held output truly is.

    Args:
        updated: share of the tokens to update in each frame.
    """
    stream = Stream(convert(shot.model, plain_config(Always())))
    held: Tensor | None = None
    for t, frame in enumerate(shot.pixels()):
        if held is not None:
            wrong = (held.float() - shot.told(t).float()).norm(dim=-1)[0]
            stream.policy = Chosen(wrong, round(updated[t] * shot.layout.tokens))
        output = stream(frame)
        held = output.clone()
        record = stream.last
        assert record is not None
        yield Step(output, record.fraction, record.macs / max(record.dense_macs, 1))
