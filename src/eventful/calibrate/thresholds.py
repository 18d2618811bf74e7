"""Thresholds of the paper's rule (Section 4.3): one per gate, or one for all at equal operations.

The size of errors differs from gate to gate, so one threshold lets many tokens through some gates
and none through others. A threshold per gate is the same quantile of each gate's own errors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eventful.bench.video.measure import Tick
from eventful.calibrate.measure import Clip
from eventful.calibrate.settings import GLOBAL, PER_GATE, Setting
from eventful.config import Config
from eventful.errors import ConfigError, DataError
from eventful.policies import Policy, Threshold, TopFraction
from eventful.stream import Stream
from eventful.surgery.conversion import convert

SHARES = (0.05, 0.1, 0.2, 0.4)  # of the tokens of each gate: the levels of cost
_TRIES = 6  # global thresholds to try for equal operations
_CLOSE = 0.02  # relative difference of operations that counts as equal


Errors = dict[str, Tensor]


class Tuned(Protocol):
    """Runs configs on the clips that thresholds are tuned on."""

    def errors(self, config: Config) -> Errors:
        """See `recorded_errors`."""

    def operations(self, config: Config) -> float:
        """See `operations`."""


@dataclass(frozen=True)
class TunedHere:
    """Runs them in this process."""

    clips: Sequence[Clip]

    def errors(self, config: Config) -> Errors:
        """See `Tuned`."""
        return recorded_errors(self.clips, config)

    def operations(self, config: Config) -> float:
        """See `Tuned`."""
        return operations(self.clips, config)


def tuned_settings(
    clips: Tuned, preset: str, tick: Tick = lambda *_: None, shares: Sequence[float] = ()
) -> list[Setting]:
    """For each share of the tokens, thresholds per gate and one threshold of equal operations."""
    if Config.preset(preset, TopFraction(0.1)).gating != "operator":
        raise ConfigError(
            f"--per-gate tunes a threshold for every gate, and {preset!r} has one gate per frame. "
            "Choose --preset paper, tokenwise, stgt or exact."
        )
    made: list[Setting] = []
    for share in shares or SHARES:
        ran = _counter(tick, f"tuning thresholds at {share:.0%}")
        errors = clips.errors(_config(preset, TopFraction(share)))
        ran()
        own = _config(preset, Threshold(thresholds(errors, share)))
        wanted = clips.operations(own)
        ran()
        level = _global_level(clips, preset, errors, share, wanted, ran)
        made += [
            Setting(f"{GLOBAL}, {share:.0%}", _config(preset, Threshold(level))),
            Setting(f"{PER_GATE}, {share:.0%}", own),
        ]
    return made


def _counter(tick: Tick, what: str) -> Callable[[], None]:
    """A function that reports one more run over all clips each time it is called."""
    done, most = 0, 2 + _TRIES

    def one() -> None:
        nonlocal done
        done += 1
        tick(what, done, most)

    tick(what, 0, most)
    return one


def recorded_errors(clips: Sequence[Clip], config: Config) -> Errors:
    """Error norms of all tokens and frames at each gate, (values,)."""
    return joined_errors([errors_of(clip, config) for clip in clips])


def errors_of(clip: Clip, config: Config) -> Errors:
    """The same of one clip; empty if every frame was recomputed as a whole."""
    found: dict[str, list[Tensor]] = {}
    stream = Stream(convert(clip.model, config), maps=True)
    for pixels in clip.pixels():
        stream(pixels)
        assert stream.last is not None
        for name, gate in stream.last.gates.items():
            if gate.error is not None and not any(stream.last.flushed):
                found.setdefault(name, []).append(gate.error.flatten().float().cpu())
    return {name: torch.cat(values) for name, values in found.items()}


def joined_errors(clips: Sequence[Errors]) -> Errors:
    """Errors of all clips by gate, in their order."""
    found: dict[str, list[Tensor]] = {}
    for errors in clips:
        for name, values in errors.items():
            found.setdefault(name, []).append(values)
    if not found:
        raise DataError(
            "Every frame was recomputed as a whole, so no gate has errors to tune a threshold by. "
            "Give a video without cuts, or another --preset."
        )
    return {name: torch.cat(values) for name, values in found.items()}


def thresholds(errors: Errors, share: float) -> dict[str, float]:
    """For each gate, the error that a share of its tokens exceeds."""
    return {name: _short(_quantile(values, 1 - share)) for name, values in errors.items()}


def operations(clips: Sequence[Clip], config: Config) -> float:
    """As a share of dense, the mean over all frames but the first of each clip."""
    return statistics.fmean(share for clip in clips for share in operations_of(clip, config))


def operations_of(clip: Clip, config: Config) -> list[float]:
    """The same for each frame of one clip but the first."""
    shares = []
    stream = Stream(convert(clip.model, config))
    for t, pixels in enumerate(clip.pixels()):
        stream(pixels)
        assert stream.last is not None
        if t:
            shares.append(stream.last.macs / max(stream.last.dense_macs, 1))
    return shares


def _global_level(
    clips: Tuned,
    preset: str,
    errors: Errors,
    share: float,
    wanted: float,
    ran: Callable[[], None],
) -> float:
    """One threshold for all gates with the wanted operations: tried, then interpolated."""
    level = max(_quantile(torch.cat(list(errors.values())), 1 - share), 1e-6)
    below: tuple[float, float] | None = None  # log threshold and cost, of one that costs more
    above: tuple[float, float] | None = None  # of one that costs less
    best = (math.inf, level)
    for _ in range(_TRIES):
        level = _short(level)
        cost = clips.operations(_config(preset, Threshold(level)))
        ran()
        best = min(best, (abs(cost / wanted - 1), level))
        if best[0] <= _CLOSE:
            break
        if cost > wanted:
            below = (math.log(level), cost)
        else:
            above = (math.log(level), cost)
        level = math.exp(_between(below, above, wanted))
    return best[1]


def _between(
    below: tuple[float, float] | None, above: tuple[float, float] | None, wanted: float
) -> float:
    """The next log threshold to try."""
    if below is None or above is None:
        known = below or above
        assert known is not None
        return known[0] + (1.0 if above is None else -1.0)
    # Kept off the ends, so that a curve with a bend still comes closer at each try.
    place = min(0.85, max(0.15, (below[1] - wanted) / max(below[1] - above[1], 1e-12)))
    return below[0] + place * (above[0] - below[0])


def _config(preset: str, policy: Policy) -> Config:
    return Config.preset(preset, policy)


def _quantile(values: Tensor, share: float) -> float:
    """Torch's own quantile refuses more than 16 million values."""
    place = min(len(values), max(1, math.ceil(share * len(values))))
    return float(values.kthvalue(place).values)


def _short(value: float) -> float:
    """Five digits, as they are written to a file."""
    return float(f"{value:.5g}")
