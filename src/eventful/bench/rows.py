"""Settings of one benchmark run, and the row of one measurement."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from eventful.bench.cases import Subject, subject
from eventful.config import Config
from eventful.modelspec.size import Size
from eventful.policies import TopR


@dataclass(frozen=True)
class Setting:
    """One run: a model on a device, and what to compare on it.

    Attributes:
        r: tokens to update, one contender each; the subject's own where none is given.
        frames: steady frames that are timed, after warm-up and flush.
        compiled: measure `torch.compile` of the dense model too.
        compile_mode: of `torch.compile`; "" for the usual one of the device.
        weights: of a model that is no benchmark model.
        size: side of the frame in pixels, or height and width; 0 for the subject's.
        depth: blocks; 0 for the subject's.
        notes: remarks for every row of the run.
    """

    model: str
    presets: tuple[str, ...] = ("fast", "exact")
    r: tuple[int, ...] = ()
    batch: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    frames: int = 12
    compiled: bool = True
    compile_mode: str = ""
    weights: str | None = None
    size: Size = 0
    depth: int = 0
    notes: tuple[str, ...] = ()

    @property
    def subject(self) -> Subject:
        """What is measured."""
        return subject(self.model, self.weights, self.size or None)

    @property
    def pixels(self) -> Size:
        """Side of the frame, or its height and width."""
        return self.size or self.subject.size

    @property
    def blocks(self) -> int:
        """Depth of the model."""
        return self.depth or self.subject.depth

    @property
    def budgets(self) -> tuple[int, ...]:
        """Tokens to update: one contender per preset and budget."""
        return self.r or (self.subject.r,)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of the weights and frames."""
        made: torch.dtype = getattr(torch, self.dtype)
        return made

    def config(self, preset: str, r: int) -> Config:
        """The update rule of one contender, with scene cuts and fallback off."""
        fixed: dict[str, object] = {}
        if preset in ("fast", "exact"):
            fixed = {"scene_cut": None, "fallback": False}
        return Config.preset(preset, TopR(r), **fixed)


@dataclass(frozen=True)
class Row:
    """One measurement. Times are medians over steady frames, in milliseconds.

    Attributes:
        dense_eager_ms: the dense model in eager mode.
        dense_best: which dense path was fastest.
        dense_ms: time of every dense path that could be built.
        dense_pipelined_ms: per frame with several frames enqueued, the fastest dense path.
        ms_pipelined: the same for this contender.
        flush_ms: a frame that recomputes everything.
        speedup: median over frames of dense_best over this contender, the same frame.
        speedup_pipelined: dense_pipelined_ms over ms_pipelined.
        paper_ms: the paper's preset at the same r in the same run; None where not measured.
        macs_ratio: operations against dense, steady frames.
        feature_error: relative error of the output against dense, steady frames.
        skip_every: running dense on every k-th frame costs the same operations.
        skip_ms: mean time per frame of that, by the fastest dense path.
        skip_error: relative error of that.
        peak_bytes: memory of a steady step at its peak, above what was held before it.
        dense_peak_bytes: the same of the eager dense model.
        notes: what could not be measured, and why.
    """

    model: str
    preset: str
    r: int
    tokens: int
    depth: int
    batch: int
    device: str
    dtype: str
    dense_eager_ms: float
    dense_best: str
    dense_best_ms: float
    ms: float
    ms_p20: float
    ms_p80: float
    ms_pipelined: float
    dense_pipelined_ms: float
    flush_ms: float
    speedup: float
    speedup_pipelined: float
    paper_ms: float | None
    macs_ratio: float
    feature_error: float
    skip_every: int
    skip_ms: float
    skip_error: float
    peak_bytes: int
    dense_peak_bytes: int
    state_bytes: int
    frames: int
    dense_ms: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
