"""The timing run: every contender in turn on each frame of a clip; reading is timed apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from eventful.bench.dense import DensePaths
from eventful.bench.timing import Forward, in_turn, timed, wait
from eventful.bench.video.footage import Footage
from eventful.bench.video.model import Prepare
from eventful.bench.video.steps import Carrier, has_tokens
from eventful.stream import Stream
from eventful.tokens.layout import TokenLayout

WARM = 4  # first frames, which allocate, compile and capture graphs; they are timed apart
_PATHS = 2  # dense paths to run beside the others: the fastest by their trials
_CARRY = "carrying"  # held tokens along the motion of one frame


@dataclass
class Times:
    """Milliseconds of each frame.

    Attributes:
        dense: by path.
        streams: by contender.
        carry: carrying held tokens along the motion of the picture.
        read: reading, resizing and copying a frame to the device.
    """

    dense: dict[str, list[float]] = field(default_factory=dict)
    streams: dict[str, list[float]] = field(default_factory=dict)
    carry: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)

    @property
    def warm(self) -> int:
        """First frames that are left out."""
        return min(WARM, len(self.read) // 3)

    @property
    def best(self) -> str:
        """The fastest dense path."""
        return min(self.dense, key=lambda path: statistics.median(self.dense[path][self.warm :]))

    @property
    def dense_ms(self) -> list[float]:
        """The fastest dense path, without the first frames."""
        return self.dense[self.best][self.warm :]

    def fields(self, own: list[float]) -> dict[str, float | str | None]:
        """The columns of a row that are times, for a contender that runs on every frame."""
        steady, dense = own[self.warm :], self.dense_ms
        return {
            **self._shared(sum(steady)),
            "ms": statistics.median(steady),
            "first_ms": own[0],
            "time_median": statistics.median(a / b for a, b in zip(steady, dense, strict=True)),
        }

    def skip_fields(self, computed: list[bool], carried: bool) -> dict[str, float | str | None]:
        """The same for frame skipping: dense times where it computes, the carrying elsewhere."""
        own = self.skip_ms(computed, carried)[self.warm :]
        return {**self._shared(sum(own)), "ms": statistics.fmean(own)}

    def skip_ms(self, computed: list[bool], carried: bool) -> list[float]:
        """Milliseconds of each frame under frame skipping."""
        dense = self.dense[self.best]
        held = self.carry if carried else [0.0] * len(dense)
        return [a if due else b for a, b, due in zip(dense, held, computed, strict=True)]

    def share_of(self, contender: str, carried: bool) -> float:
        """The share of frames that dense can compute in the time of a stream."""
        own = statistics.fmean(self.streams[contender][self.warm :])
        dense = statistics.fmean(self.dense_ms)
        held = statistics.fmean(self.carry[self.warm :]) if carried else 0.0
        least = 1 / len(self.read)  # the first frame is always computed
        return 1.0 if dense <= held else min(1.0, max(least, (own - held) / (dense - held)))

    def _shared(self, total: float) -> dict[str, float | str | None]:
        dense, read = sum(self.dense_ms), sum(self.read[self.warm :])
        return {
            "dense_path": self.best,
            "dense_ms": statistics.median(self.dense_ms),
            "time": total / dense,
            "time_read": (total + read) / (dense + read),
            "read_ms": read / len(self.dense_ms),
        }


def time_clip(
    frames: Iterable[Tensor],
    dense: DensePaths,
    converted: Mapping[str, nn.Module],
    layout: TokenLayout,
    tick: Callable[[], None] = lambda: None,
) -> Times:
    """Run everything in turn on each frame of a clip, starting with another one.

    Args:
        frames: as the model takes them, (1, 3, H, W), on its device.
    """
    fastest = sorted(dense.trial_ms, key=lambda path: dense.trial_ms[path])[:_PATHS]
    runs: dict[str, Forward] = {path: dense.runs[path] for path in fastest}
    made = Times({path: [] for path in fastest}, {name: [] for name in converted})
    series: dict[str, list[float]] = {**made.dense}
    for name, model in converted.items():
        runs[f"stream {name}"] = Stream(model)
        series[f"stream {name}"] = made.streams[name]
    carrier, held = Carrier(layout), None
    for t, frame in enumerate(frames):
        if held is None:
            held = runs[fastest[0]](frame).clone()
            if has_tokens(held, layout):
                runs[_CARRY], series[_CARRY] = partial(carrier, held), made.carry
        for name in in_turn(list(runs), t):
            series[name].append(timed(runs[name], frame)[1])
        tick()
    return made


def time_reading(footage: Footage, prepare: Prepare) -> Iterator[float]:
    """Milliseconds of reading each frame and copying it to the device.

    Nothing else runs meanwhile: `eventful.read` decodes ahead in a thread, so that beside slower
    work reading would seem to take no time, and would take some of the others'.
    """
    source = iter(footage.read(prepare.size, (prepare.mean, prepare.std)))
    while True:
        began = time.perf_counter()
        frame = next(source, None)
        if frame is None:
            return
        wait(frame.to(prepare.device, prepare.dtype).device)
        yield (time.perf_counter() - began) * 1000
