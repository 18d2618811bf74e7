"""One clip under every contender: a timing run, then a quality run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from eventful.bench.contenders import schedule
from eventful.bench.dense import DenseSpec, dense_paths
from eventful.bench.video.footage import Footage
from eventful.bench.video.model import Backbone
from eventful.bench.video.rows import Series, VideoRow, quality_fields
from eventful.bench.video.steps import (
    Carrier,
    Shot,
    Step,
    dense_outputs,
    dense_steps,
    judged,
    layout_of,
    oracle_steps,
    skip_steps,
    stream_steps,
)
from eventful.bench.video.times import Times, time_clip, time_reading
from eventful.config import Config
from eventful.surgery.conversion import convert

DENSE, DEFAULT, ORACLE = "dense", "default", "oracle"
Tick = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Head:
    """How the outputs of a clip become detections, and detections a number.

    Attributes:
        detect: from output tokens (1, N, D), with the frame's height and width.
        score: average precision of the detections of all frames.
    """

    detect: Callable[[Tensor, tuple[int, int]], Any]
    score: Callable[[Sequence[Any], tuple[int, int]], float]


@dataclass(frozen=True)
class VideoPlan:
    """What to measure on every clip.

    Attributes:
        size: HxW, one side, or "" for the model's own; see `fitted_size`.
        configs: more contenders by name, beside the default.
        timed: measure times, too; without them there is no skipping at equal time.
        compiled: let the dense model use torch.compile.
    """

    backbone: Backbone
    size: str = ""
    device: str = "cpu"
    precision: str = "float32"
    configs: Mapping[str, Config] = field(default_factory=dict)
    timed: bool = True
    compiled: bool = True
    compile_mode: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and frames."""
        made: torch.dtype = getattr(torch, self.precision)
        return made


@dataclass(frozen=True)
class ClipResult:
    """The rows of one clip, and its frames for a picture, uint8 (3, H, W)."""

    rows: list[VideoRow]
    frames: list[Tensor]


def measure(
    plan: VideoPlan, footage: Footage, head: Head | None = None, tick: Tick = lambda *_: None
) -> ClipResult:
    """Every contender on one clip.

    Args:
        tick: called with what is going on, the frames done and all frames.
    """
    model, prepare = plan.backbone.at(footage.size, plan.size, plan.device, plan.dtype)
    frames = list(footage.pictures(prepare.size))
    example = prepare(frames[0])
    layout = layout_of(model, example)
    converted = {DEFAULT: convert(model)}
    converted |= {name: convert(model, config) for name, config in plan.configs.items()}
    count, times, notes = len(frames), None, []
    if plan.timed:
        spec = DenseSpec(model, example, plan.compiled, plan.compile_mode)
        paths = dense_paths(spec, lambda what: tick(what, 0, count))
        notes += paths.notes
        done = _counter(tick, "timing", count)
        times = time_clip(map(prepare, frames), paths, converted, layout, done)
        times.read.extend(time_reading(footage, prepare))
    dense = dense_outputs(model, map(prepare, frames), _counter(tick, "dense outputs", count))
    shot = Shot(model, prepare, frames, dense, layout)
    rows = _Rows(plan, footage, shot, head, times, tuple(notes), tick)
    return ClipResult(list(rows.make(converted)), frames)


@dataclass
class _Rows:
    """Makes the rows of one clip."""

    plan: VideoPlan
    footage: Footage
    shot: Shot
    head: Head | None
    times: Times | None
    notes: tuple[str, ...]
    tick: Tick

    def make(self, converted: Mapping[str, nn.Module]) -> Iterator[VideoRow]:
        """Rows in the order they are shown."""
        yield self._timed_row(DENSE, dense_steps(self.shot), self._own_ms(DENSE))
        default: Series | None = None
        for name, model in converted.items():
            row = self._timed_row(name, stream_steps(self.shot, model), self._own_ms(name))
            default = row.by_frame if default is None else default
            yield row
        assert default is not None
        share = min(1.0, sum(default.operations) / len(default.operations))
        ways = (False, True) if self.shot.by_token else (False,)
        for carried in ways:
            yield self._skip_row("skip", share, carried)
        if self.times is not None:
            for carried in ways:
                share = self.times.share_of(DEFAULT, carried)
                yield self._skip_row("skip-time", share, carried)
        if self.shot.by_token:
            yield self._row(ORACLE, oracle_steps(self.shot, default.updated), {})

    def _own_ms(self, name: str) -> list[float] | None:
        if self.times is None:
            return None
        return self.times.dense[self.times.best] if name == DENSE else self.times.streams[name]

    def _timed_row(self, name: str, steps: Iterator[Step], ms: list[float] | None) -> VideoRow:
        if self.times is None or ms is None:
            return self._row(name, steps, {})
        row = self._row(name, steps, self.times.fields(ms))
        row.by_frame.ms.extend(ms)
        return row

    def _skip_row(self, kind: str, share: float, carried: bool) -> VideoRow:
        name = f"{kind}-carried" if carried else kind
        count = len(self.shot.frames)
        carrier = Carrier(self.shot.layout) if carried else None
        steps = skip_steps(self.shot, share, carrier)
        if self.times is None:
            return self._row(name, steps, {})
        due = [due for _, due in zip(range(count), schedule(share), strict=False)]
        row = self._row(name, steps, self.times.skip_fields(due, carried))
        row.by_frame.ms.extend(self.times.skip_ms(due, carried))
        return row

    def _row(self, name: str, steps: Iterator[Step], times: Mapping[str, Any]) -> VideoRow:
        done = _counter(self.tick, name, len(self.shot.frames))
        size = self.shot.prepare.size
        head = self.head
        detect = None if head is None else (lambda tokens: head.detect(tokens, size))
        outcome = judged(self.shot, steps, detect, done)
        numbers: dict[str, Any] = {**quality_fields(outcome.series), **times}
        return VideoRow(
            clip=self.footage.name,
            contender=name,
            config=outcome.config,
            model=self.plan.backbone.name,
            size=f"{size[0]}x{size[1]}",
            tokens=self.shot.layout.tokens,
            frames=len(self.shot.frames),
            device=self.plan.device,
            precision=self.plan.precision,
            map50=None if head is None else head.score(outcome.found, size),
            notes=self.notes,
            by_frame=outcome.series,
            **numbers,
        )


def _counter(tick: Tick, what: str, count: int) -> Callable[[], None]:
    """A function that reports one more frame each time it is called."""
    done = 0

    def one() -> None:
        nonlocal done
        done += 1
        tick(what, done, count)

    return one
