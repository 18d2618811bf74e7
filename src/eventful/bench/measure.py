"""Times contenders in turn on each frame, so that all run under the same conditions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from eventful.bench.cases import clip
from eventful.bench.contenders import Dense, Measured, Streamed
from eventful.bench.dense import DensePaths, DenseSpec, dense_paths
from eventful.bench.memory import graph_pool_bytes, peak_of
from eventful.bench.parity import open_stream, verify
from eventful.bench.rows import Row, Setting
from eventful.bench.timing import gap, in_turn, pipelined, timed
from eventful.errors import ParityError
from eventful.modelspec.size import both_sides
from eventful.surgery.conversion import inspect

WARM = 3  # steps of every contender before any is timed: a flush and two steady ones
FLUSHES = {"cpu": 1, "cuda": 5}
ROUNDS, IN_FLIGHT = 5, 8  # of pipelined frames
DISTINCT = 16  # distinct frames; a longer run repeats them
UNSTEADY = 1.5  # ratio of the slow to the fast fifth of dense frames from which on a note is made
SLOW = 1.5  # a dense path this many times slower than the fastest is not run on every frame

Tick = Callable[[str], None]


@dataclass
class Entry(Measured):
    """A contender with its times in flight and of flushes.

    Attributes:
        pool: bytes of CUDA graphs that it captured.
    """

    pool: int = 0
    pipelined_ms: list[float] = field(default_factory=list)
    flush_ms: list[float] = field(default_factory=list)


@dataclass
class Run:
    """All contenders of one setting on the same frames.

    Attributes:
        dense: the dense paths that take their turn on every frame.
        trials: every dense path that could be built, with the times of its trial.
        streams: by preset and r.
        truth: the eager dense output of each frame held.
    """

    setting: Setting
    frames: list[Tensor]
    trials: DensePaths
    dense: dict[str, Entry]
    streams: dict[tuple[str, int], Entry]
    truth: dict[int, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.frames[0].device

    @property
    def contenders(self) -> list[Entry]:
        """Dense paths and streams."""
        return [*self.dense.values(), *self.streams.values()]

    def frame(self, number: int) -> Tensor:
        """Frame by number, modulo the number of distinct frames."""
        return self.frames[number % len(self.frames)]


def measure(setting: Setting, tick: Tick = lambda _: None) -> list[Row]:
    """Check parity, then measure every preset at every r beside the dense paths.

    Args:
        tick: called with a description of each stage.

    Raises:
        ParityError: a contender does not compute what it should; nothing was timed.
    """
    run = prepare(setting, tick)
    _warm_up(run, tick)
    _time_flushes(run, tick)
    _time_steady(run, tick)
    _time_pipelined(run, tick)
    run.notes += _unsteady(run.dense["eager"].ms)
    tick("peak memory")
    return [_row(run, preset, r) for preset, r in run.streams]


def check(setting: Setting, tick: Tick = lambda _: None) -> None:
    """Only check parity."""
    model, frames = _build(setting, tick)
    verify(setting, model, frames, tick)


def prepare(setting: Setting, tick: Tick) -> Run:
    """Build the model, check parity, and create every contender."""
    model, frames = _build(setting, tick)
    verify(setting, model, frames, tick)
    spec = DenseSpec(model, frames[0], setting.compiled, setting.compile_mode)
    trials = dense_paths(spec, tick)
    fastest = min(trials.trial_ms.values())
    dense, notes = {}, [*setting.notes, *trials.notes]
    if not setting.subject.returns_tokens:
        notes.append("checked against dense with all tokens selected alone")
    for name, run in trials.runs.items():
        if name == "eager" or trials.trial_ms[name] <= SLOW * fastest:
            dense[name] = Entry(Dense(run))
        else:
            notes.append(f"dense {name} timed in its trial only: slow")
    streams = {
        (preset, r): Entry(Streamed(open_stream(model, setting.config(preset, r), setting.batch)))
        for preset in setting.presets
        for r in setting.budgets
    }
    return Run(setting, frames, trials, dense, streams, notes=notes)


def _build(setting: Setting, tick: Tick) -> tuple[torch.nn.Module, list[Tensor]]:
    tick("building the model and its frames")
    device, dtype = torch.device(setting.device), setting.torch_dtype
    torch.manual_seed(0)
    model = setting.subject.make(setting.pixels, setting.blocks).to(device, dtype)
    wanted = min(DISTINCT, max(WARM, setting.frames))
    made = islice(clip(setting.pixels, batch=setting.batch), wanted)
    return model, [frame.to(device, dtype) for frame in made]


def _warm_up(run: Run, tick: Tick) -> None:
    """Warm up one contender after the other, to know which captured which CUDA graphs."""
    for number, contender in enumerate(run.contenders):
        tick(f"warming up contender {number + 1} of {len(run.contenders)}")
        before = graph_pool_bytes(run.device)
        for t in range(WARM if isinstance(contender.run, Streamed) else 1):
            contender.run(run.frame(t - WARM))
        contender.pool = graph_pool_bytes(run.device) - before


def _time_flushes(run: Run, tick: Tick) -> None:
    """Time flushes, each followed by a steady step that is not timed."""
    streams = list(run.streams.values())
    for turn in range(FLUSHES[run.device.type]):
        tick("timing flushes")
        for contender in in_turn(streams, turn):
            contender.run.flush()
            contender.flush_ms.append(timed(contender.run, run.frame(-2))[1])
            contender.run(run.frame(-1))


def _time_steady(run: Run, tick: Tick) -> None:
    contenders = run.contenders
    for t in range(run.setting.frames):
        tick(f"frame {t + 1} of {run.setting.frames}")
        outputs = []
        for contender in in_turn(contenders, t):
            output, ms = timed(contender.run, run.frame(t))
            contender.ms.append(ms)
            outputs.append((contender, output.clone()))  # the next call may overwrite the output
        truth = next(output for contender, output in outputs if contender is run.dense["eager"])
        run.truth.setdefault(t % len(run.frames), truth)
        for contender, output in outputs:
            contender.error.append(gap(output, truth))
    for (preset, r), contender in run.streams.items():
        if not all(math.isfinite(error) for error in contender.error):
            raise ParityError(
                f"{run.setting.model}: {preset} at r = {r} gave NaN or Inf while it was timed. "
                "Nothing was written; run `make test` to find the cause."
            )


def _time_pipelined(run: Run, tick: Tick) -> None:
    """Several frames in flight. A CPU has none: a call returns when it is done."""
    if run.device.type == "cpu":
        for contender in run.contenders:
            contender.pipelined_ms.append(statistics.mean(contender.ms))
        return
    for turn in range(ROUNDS):
        tick(f"pipelined frames, round {turn + 1} of {ROUNDS}")
        start = run.setting.frames + turn * IN_FLIGHT
        frames = [run.frame(start + t) for t in range(IN_FLIGHT)]
        for contender in in_turn(run.contenders, turn):
            contender.pipelined_ms.append(pipelined(contender.run, frames))


def _row(run: Run, preset: str, r: int) -> Row:
    setting, contender = run.setting, run.streams[preset, r]
    assert isinstance(contender.run, Streamed)
    stream = contender.run.stream
    assert stream.last is not None
    medians = {name: statistics.median(path.ms) for name, path in run.dense.items()}
    best = min(medians, key=lambda name: medians[name])
    dense_pipelined = min(statistics.median(p.pipelined_ms) for p in run.dense.values())
    ratio = stream.last.macs / stream.last.dense_macs
    every = max(1, round(1 / ratio)) if ratio > 0 else setting.frames
    paper = run.streams.get(("paper", r))
    low, high = _fifths(contender.ms)
    frame = run.frame(0)
    in_flight = statistics.median(contender.pipelined_ms)
    return Row(
        model=setting.model,
        preset=preset,
        r=r,
        tokens=next(iter(stream.last.layouts.values())).tokens,
        depth=setting.blocks,
        batch=setting.batch,
        device=setting.device,
        dtype=setting.dtype,
        dense_eager_ms=medians["eager"],
        dense_best=best,
        dense_best_ms=medians[best],
        ms=statistics.median(contender.ms),
        ms_p20=low,
        ms_p80=high,
        ms_pipelined=in_flight,
        dense_pipelined_ms=dense_pipelined,
        flush_ms=statistics.median(contender.flush_ms),
        speedup=statistics.median(
            dense / own for dense, own in zip(run.dense[best].ms, contender.ms, strict=True)
        ),
        speedup_pipelined=dense_pipelined / in_flight,
        paper_ms=None if paper is None else statistics.median(paper.ms),
        macs_ratio=ratio,
        feature_error=statistics.median(contender.error),
        skip_every=every,
        skip_ms=medians[best] / every,
        skip_error=_skip_error(run.truth, every),
        peak_bytes=peak_of(lambda: contender.run(frame), run.device) + contender.pool,
        dense_peak_bytes=peak_of(lambda: run.dense["eager"].run(frame), run.device),
        state_bytes=stream.nbytes,
        frames=setting.frames,
        dense_ms={**run.trials.trial_ms, **medians},
        notes=tuple(run.notes),
    )


def _unsteady(dense_ms: Sequence[float]) -> list[str]:
    """A note if dense times vary much, which other load on the machine causes."""
    low, high = _fifths(dense_ms)
    if high <= UNSTEADY * low:
        return []
    return [f"unsteady machine: dense eager took {low:.3g} to {high:.3g} ms a frame"]


def _fifths(values: Sequence[float]) -> tuple[float, float]:
    """The 20th and the 80th percentile."""
    if len(values) < 2:
        return values[0], values[0]
    cuts = statistics.quantiles(values, n=5)
    return cuts[0], cuts[-1]


def _skip_error(truth: dict[int, Tensor], every: int) -> float:
    """Error of showing the output of every k-th frame until the next, over all k places to start.

    A clip too short for that shows its first output throughout.
    """
    lags = [lag for lag in range(every) if lag < len(truth)]
    by_lag = [
        statistics.median(gap(truth[t - lag], truth[t]) for t in range(lag, len(truth)))
        for lag in lags
    ]
    return statistics.mean(by_lag)


def state_needed(setting: Setting) -> dict[str, int]:
    """Bytes of state of all streams of a run by preset, before anything is built."""
    held = setting.subject.held
    if not held:
        with torch.device("meta"):
            model = setting.subject.make(setting.pixels, setting.blocks).to(setting.torch_dtype)
        held = inspect(model, both_sides(setting.pixels)).state_bytes
    return {
        preset: setting.batch * len(setting.budgets) * held[preset] for preset in setting.presets
    }
