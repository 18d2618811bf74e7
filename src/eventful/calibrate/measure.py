"""The settings side by side: on each frame of a clip, dense and all settings run in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from eventful.bench.dense import DenseSpec, dense_paths
from eventful.bench.timing import Forward, gap, in_turn, timed
from eventful.bench.video.footage import Footage
from eventful.bench.video.measure import Head, Tick, VideoPlan
from eventful.bench.video.model import Prepare
from eventful.calibrate.settings import Setting
from eventful.errors import DataError
from eventful.stream import Stream
from eventful.surgery.conversion import convert

LEAST = 8  # frames of a clip
STILL = 4  # a pixel that changes by at most so many of 255 levels does not count as changed
EAGER = "eager"  # the dense path whose outputs are the truth


@dataclass(frozen=True)
class Clip:
    """A clip in memory, at the size of the model.

    Attributes:
        frames: uint8 (3, H, W).
        head: makes detections of outputs, and scores them; None without labels.
    """

    name: str
    about: str
    model: nn.Module
    prepare: Prepare
    frames: list[Tensor]
    head: Head | None = None

    @property
    def size(self) -> str:
        """Of its frames, HxW."""
        return "x".join(map(str, self.prepare.size))

    @property
    def still(self) -> bool:
        """Whether no pixel changes by more than compression noise."""
        first = self.frames[0].short()
        return all(int((frame.short() - first).abs().max()) <= STILL for frame in self.frames[1:])

    def pixels(self) -> Iterator[Tensor]:
        """Frames as the model takes them."""
        return map(self.prepare, self.frames)


@dataclass(frozen=True)
class Sample:
    """One frame under one setting.

    Attributes:
        updated: share of the tokens.
        operations: as a share of dense.
        error: relative error of the output tokens against dense.
        ms: time of the step; 0 for frame skipping, whose times are those of dense.
        found: detections, where there is a head.
    """

    updated: float
    operations: float
    error: float
    ms: float = 0.0
    found: Any = None


@dataclass(frozen=True)
class FrameSamples:
    """One frame under every setting, and the milliseconds of each dense path."""

    settings: Mapping[str, Sample]
    dense_ms: Mapping[str, float]
    dense_found: Any = None


@dataclass
class Measured:
    """What was measured so far.

    Attributes:
        frames: of each clip that was begun.
        timed: times mean something.
        interrupted: the user stopped before the end.
        notes: what a reader should know.
    """

    clips: Sequence[Clip]
    settings: Sequence[Setting]
    timed: bool = True
    frames: list[list[FrameSamples]] = field(default_factory=list)
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)


def load_clip(plan: VideoPlan, footage: Footage, head: Head | None = None) -> Clip:
    """Read a clip and put the model to its size."""
    model, prepare = plan.backbone.at(footage.size, plan.size, plan.device, plan.dtype)
    frames = list(footage.pictures(prepare.size))
    if len(frames) < LEAST:
        raise DataError(
            f"{footage.name} has {len(frames)} frames; a calibration needs at least {LEAST}, and "
            "some seconds of video to mean something. Give a longer video, or more --frames."
        )
    return Clip(footage.name, footage.about, model, prepare, frames, head)


def refuse_still(clips: Sequence[Clip]) -> list[str]:
    """Notes about clips in which nothing changes; an error if that is all of them."""
    still = [clip.name for clip in clips if clip.still]
    if len(still) == len(clips):
        raise DataError(
            f"Nothing changes in {' and '.join(still)}: every setting costs next to nothing "
            "there and has no error, so there is nothing to choose. Give a video with the motion "
            "that the camera usually sees, or more --frames of it."
        )
    return [f"Nothing changes in {name}: it lowers the errors and costs shown." for name in still]


def measure(
    plan: VideoPlan,
    clips: Sequence[Clip],
    settings: Sequence[Setting],
    tick: Tick = lambda *_: None,
) -> Measured:
    """Every setting on every clip. On ctrl-C, what was measured until then.

    Args:
        tick: called with what is going on, the frames done and all frames.
    """
    made = Measured(clips, settings, plan.timed, notes=refuse_still(clips))
    try:
        for clip in clips:
            made.frames.append([])
            _measure_clip(plan, clip, settings, made, tick)
    except KeyboardInterrupt:
        made.interrupted = True
    return made


def _measure_clip(
    plan: VideoPlan, clip: Clip, settings: Sequence[Setting], made: Measured, tick: Tick
) -> None:
    dense = _dense(plan, clip, made, tick)
    streams = {
        setting.name: Stream(convert(clip.model, setting.config))
        for setting in settings
        if setting.config is not None
    }
    side_by_side = _SideBySide(clip, settings, dense, streams)
    for t, pixels in enumerate(clip.pixels()):
        made.frames[-1].append(side_by_side.step(t, pixels))  # whole frames, also on ctrl-C
        tick(f"measuring {clip.name}", t + 1, len(clip.frames))


@torch.no_grad()
def dense_outputs(clip: Clip) -> list[Tensor]:
    """What the dense model gives for each frame: the truth of `samples_of`."""
    return [clip.model(pixels).clone() for pixels in clip.pixels()]


def samples_of(
    clip: Clip, settings: Sequence[Setting], truths: Sequence[Tensor]
) -> Iterator[FrameSamples]:
    """Settings on every frame, beside dense outputs that are known; times mean nothing.

    Args:
        truths: see `dense_outputs`.
    """
    known = iter(truths)
    streams = {
        setting.name: Stream(convert(clip.model, setting.config))
        for setting in settings
        if setting.config is not None
    }
    side_by_side = _SideBySide(clip, settings, {EAGER: lambda _: next(known)}, streams)
    for t, pixels in enumerate(clip.pixels()):
        yield side_by_side.step(t, pixels)


def _dense(plan: VideoPlan, clip: Clip, made: Measured, tick: Tick) -> dict[str, Forward]:
    """Eager, whose outputs are the truth, and the fastest other path if it is faster."""
    example = clip.prepare(clip.frames[0])
    spec = DenseSpec(clip.model, example, plan.compiled and plan.timed, plan.compile_mode)
    if not plan.timed:
        return {EAGER: clip.model}
    paths = dense_paths(spec, lambda what: tick(what, 0, len(clip.frames)))
    made.notes += [note for note in paths.notes if note not in made.notes]
    fastest = min(paths.trial_ms, key=lambda path: paths.trial_ms[path])
    return {path: paths.runs[path] for path in dict.fromkeys((EAGER, fastest))}


@dataclass
class _SideBySide:
    """Runs everything in turn on one frame after the other."""

    clip: Clip
    settings: Sequence[Setting]
    dense: Mapping[str, Forward]
    streams: Mapping[str, Stream]
    held: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def step(self, t: int, pixels: Tensor) -> FrameSamples:
        """The next frame; each frame starts with another one of them."""
        runs: dict[tuple[str, str], Forward] = {("dense", n): run for n, run in self.dense.items()}
        runs |= {("stream", name): stream for name, stream in self.streams.items()}
        outputs: dict[tuple[str, str], Tensor] = {}
        ms: dict[tuple[str, str], float] = {}
        for key in in_turn(list(runs), t):
            outputs[key], ms[key] = timed(runs[key], pixels)
        truth = outputs["dense", EAGER].clone()
        samples = {}
        for setting in self.settings:
            key = ("stream", setting.name)
            if setting.config is None:
                samples[setting.name] = self._skipped(t, setting, truth)
            else:
                samples[setting.name] = self._stepped(key[1], outputs[key], truth, ms[key])
        times = {path: ms["dense", path] for path in self.dense}
        return FrameSamples(samples, times, self._found(truth))

    def _stepped(self, name: str, output: Tensor, truth: Tensor, ms: float) -> Sample:
        record = self.streams[name].last
        assert record is not None
        share = record.macs / max(record.dense_macs, 1)
        return Sample(record.fraction, share, gap(output, truth), ms, self._found(output))

    def _skipped(self, t: int, setting: Setting, truth: Tensor) -> Sample:
        due = t % setting.every == 0
        if due:
            self.held[setting.name] = truth
        held = self.held[setting.name]
        return Sample(float(due), float(due), gap(held, truth), found=self._found(held))

    def _found(self, tokens: Tensor) -> Any:
        head = self.clip.head
        return None if head is None else head.detect(tokens, self.clip.prepare.size)
