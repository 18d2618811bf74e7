"""Contenders in turn on each frame, so that all of them meet the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor, nn

from eventful.bench.cases import clip, subject
from eventful.bench.dense import Forward, dense_paths
from eventful.bench.memory import peak_of
from eventful.config import Config
from eventful.conversion import convert, inspect
from eventful.errors import ParityError
from eventful.policies import TopR
from eventful.stream import Stream

WARM = 2  # frames left out of the medians: the flush, and the first steady one
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Setting:
    """One run: a model on a device, and what to compare on it."""

    model: str
    presets: tuple[str, ...] = ("fast", "exact")
    r: tuple[int, ...] = ()
    batch: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    frames: int = 12
    compiled: bool = True


@dataclass(frozen=True)
class Row:
    """One measurement. Times are medians over steady frames, in milliseconds.

    Attributes:
        dense_best: which dense path was fastest.
        speedup: median over frames of dense_best over this contender, the same frame.
        macs_ratio: operations against dense, steady frames.
        feature_error: relative error of the output against dense, steady frames.
        skip_every: running dense on every k-th frame costs the same operations.
        skip_error: relative error of that.
        peak_bytes: memory in use at the peak of a steady step, above what was held before it.
    """

    model: str
    preset: str
    r: int
    tokens: int
    batch: int
    device: str
    dtype: str
    dense_eager_ms: float
    dense_best: str
    dense_best_ms: float
    ms: float
    ms_p20: float
    ms_p80: float
    flush_ms: float
    speedup: float
    macs_ratio: float
    feature_error: float
    skip_every: int
    skip_error: float
    peak_bytes: int
    dense_peak_bytes: int
    state_bytes: int


@dataclass
class Contender:
    """One way to run the model: its times and outputs' errors, frame by frame."""

    run: Forward
    ms: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)


def measure(setting: Setting, tick: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Measure every preset at every r beside the dense paths.

    Args:
        tick: told what is being done.
    """
    made = subject(setting.model)
    device, dtype = torch.device(setting.device), getattr(torch, setting.dtype)
    torch.manual_seed(0)
    model = made.make().to(device, dtype)
    frames = [
        frame.to(device, dtype)
        for frame in islice(clip(made.size, batch=setting.batch), setting.frames)
    ]
    tick("preparing the dense paths")
    dense = {
        name: Contender(run)
        for name, run in dense_paths(model, frames[0], compiled=setting.compiled).items()
    }
    streams: dict[tuple[str, int], tuple[Stream, Contender]] = {}
    for preset in setting.presets:
        tick(f"checking {preset}")
        _verify(model, preset, frames[:3])
        for r in setting.r or (made.r,):
            stream = Stream(convert(model, Config.preset(preset, TopR(r), **_plain(preset))))
            streams[preset, r] = (stream, Contender(_stepper(stream)))
    outputs: list[Tensor] = []
    contenders = [*dense.values(), *(contender for _, contender in streams.values())]
    for t, frame in enumerate(frames):
        tick(f"frame {t + 1} of {len(frames)}")
        outputs.append(dense["eager"].run(frame).clone())
        for contender in contenders:
            output, ms = _timed(contender.run, frame)
            contender.ms.append(ms)
            contender.error.append(_gap(output, outputs[-1]))
    return [
        _row(setting, key, stream, contender, dense, outputs, frames[-1])
        for key, (stream, contender) in streams.items()
    ]


def _plain(preset: str) -> dict[str, object]:
    """A benchmark decides itself what is a flush."""
    return {"scene_cut": None} if preset in ("fast", "exact") else {}


def _stepper(stream: Stream) -> Forward:
    def run(frame: Tensor) -> Tensor:
        result: Tensor = stream(frame)
        return result

    return run


def _verify(model: nn.Module, preset: str, frames: Sequence[Tensor]) -> None:
    """Refuse to time a rule that is not dense when every token is selected."""
    stream = Stream(convert(model, Config.preset(preset, TopR(10**9), **_plain(preset))))
    for frame in frames:
        with torch.no_grad():
            gap = _gap(stream(frame), model(frame))
        if not gap <= TOLERANCE[frame.dtype]:
            raise ParityError(
                f"{preset} with every token selected differs from dense by {gap:.1e} (limit "
                f"{TOLERANCE[frame.dtype]:.0e}); nothing was measured. Run `make test`."
            )


def _timed(run: Forward, frame: Tensor) -> tuple[Tensor, float]:
    if frame.is_cuda:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        output = run(frame)
        end.record()
        end.synchronize()
        return output, float(start.elapsed_time(end))
    began = time.perf_counter()
    output = run(frame)
    return output, (time.perf_counter() - began) * 1000


def _gap(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def _row(
    setting: Setting,
    key: tuple[str, int],
    stream: Stream,
    contender: Contender,
    dense: dict[str, Contender],
    outputs: list[Tensor],
    frame: Tensor,
) -> Row:
    preset, r = key
    medians = {name: statistics.median(path.ms[WARM:]) for name, path in dense.items()}
    best = min(medians, key=lambda name: medians[name])
    steady = contender.ms[WARM:]
    ratios = [a / b for a, b in zip(dense[best].ms[WARM:], steady, strict=True)]
    assert stream.last is not None
    ratio = stream.last.macs / stream.last.dense_macs
    every = max(1, round(1 / ratio))
    stale = [_gap(outputs[t - t % every], outputs[t]) for t in range(WARM, len(outputs))]
    tokens = next(iter(stream.last.layouts.values())).tokens
    fifth = statistics.quantiles(steady, n=5) if len(steady) > 1 else [steady[0]] * 4
    return Row(
        model=setting.model,
        preset=preset,
        r=r,
        tokens=tokens,
        batch=setting.batch,
        device=setting.device,
        dtype=setting.dtype,
        dense_eager_ms=medians["eager"],
        dense_best=best,
        dense_best_ms=medians[best],
        ms=statistics.median(steady),
        ms_p20=fifth[0],
        ms_p80=fifth[-1],
        flush_ms=contender.ms[0],
        speedup=statistics.median(ratios),
        macs_ratio=ratio,
        feature_error=statistics.median(contender.error[WARM:]),
        skip_every=every,
        skip_error=statistics.median(stale),
        peak_bytes=peak_of(lambda: contender.run(frame), frame.device),
        dense_peak_bytes=peak_of(lambda: dense["eager"].run(frame), frame.device),
        state_bytes=stream.nbytes,
    )


def state_needed(setting: Setting) -> int:
    """Bytes of state of all streams of a run, before anything is built."""
    made = subject(setting.model)
    with torch.device("meta"):
        model = made.make().to(getattr(torch, setting.dtype))
    held = inspect(model, made.size).state_bytes
    budgets = len(setting.r or (made.r,))
    return setting.batch * budgets * sum(held[preset] for preset in setting.presets)
