"""How a run is done: all that the options of `eventful run` say."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from eventful.budget import (
    Budget,
    ErrorBudget,
    LatencyBudget,
    MemoryBudget,
    OperationsBudget,
    RateBudget,
)
from eventful.config import PRESETS, Config
from eventful.errors import ConfigError
from eventful.modelspec.size import Longest, Size, both_sides, in_words
from eventful.policies import Policy, Threshold
from eventful.video.budgets import parse_budget

Format = Literal["jsonl", "parquet", "npz"]
TrackerName = Literal["bytetrack", "sort"]

BUDGETS = {
    "error": ErrorBudget,
    "latency": LatencyBudget,
    "rate": RateBudget,
    "operations": lambda share: OperationsBudget(share=share),
    "memory": MemoryBudget,
}
# What another value may have when a run is resumed: it changes no result.
_FREE = ("out", "frames", "device", "video", "report", "resume", "overwrite", "labels")
_IN_RULE = ("preset", "r", "h", "config")  # they come to one update rule


@dataclass(frozen=True)
class RunSettings:
    """How a run is done; the defaults are those of `eventful run`.

    Attributes:
        out: folder of everything that is written.
        weights: of a model of a library: a .safetensors file, or `pretrained`; None for random.
        size: of the frames in pixels, see `open_subject`.
        preset, r, h: update rule and number of tokens, `256` or `12%`, or threshold.
        config: a TOML file in place of these three.
        error, latency, rate, operations, memory: at most one, a budget (docs/budgets.md).
        dense: run the whole model, without memory.
        compare: run both on every frame.
        track: the tracker of detections; None for none.
        frames: at most so many frames of each source, those of a resumed run included.
        every: take every so many-th frame.
        score: detections below it are left out.
        labels: a dataset with the truth of the sources.
    """

    out: Path = Path("eventful-run")
    weights: str | None = None
    size: Size | None = None
    device: str = "cpu"
    dtype: str = "float32"
    preset: str | None = None
    r: str | None = None
    h: float | None = None
    config: Path | None = None
    error: float | None = None
    latency: float | None = None
    rate: float | None = None
    operations: float | None = None
    memory: float | None = None
    dense: bool = False
    compare: bool = False
    track: TrackerName | None = None
    frames: int | None = None
    every: int = 1
    score: float = 0.5
    format: Format = "jsonl"
    video: bool = True
    report: bool = True
    resume: bool = False
    overwrite: bool = False
    labels: Path | None = None

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise ConfigError(f"--format is {', '.join(get_args(Format))}; got {self.format!r}.")
        if self.track is not None and self.track not in get_args(TrackerName):
            raise ConfigError(f"A tracker is {', '.join(get_args(TrackerName))}; got {self.track}.")
        sides = self.size.side if isinstance(self.size, Longest) else None
        if self.size is not None and sides is None:
            sides = min(both_sides(self.size))
        for name, value in (("frames", self.frames), ("every", self.every), ("size", sides)):
            if value is not None and value < 1:
                raise ConfigError(f"--{name} is a whole number from 1 up; got {value}.")
        refuse_both(self, "dense", "compare")
        refuse_both(self, "resume", "overwrite")
        refuse_both(self, *BUDGETS)
        chosen = [name for name in ("preset", "r", "h", "config") if self._given(name)]
        if self.config is not None:
            refuse_both(self, "config", *(name for name in chosen if name != "config"))
        held = [name for name in BUDGETS if name != "memory" and self._given(name)]
        refuse_both(self, "r", "h", *held)
        if self.dense and (chosen or self.budget() is not None):
            given = [*chosen, *(name for name in BUDGETS if self._given(name))][0]
            raise ConfigError(f"--dense runs the whole model, so --{given} has no effect; drop it.")

    def _given(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and value is not False

    def update_rule(self) -> Config:
        """The config that these settings describe."""
        if self.config is not None:
            return Config.load(self.config)
        policy: Policy | None = None if self.h is None else Threshold(self.h)
        if self.r is not None:
            policy = parse_budget(self.r).policy
        held = self.budget() is not None and self.memory is None
        return made_config(self.preset or "fast", policy, needed=not held)

    def budget(self) -> Budget | None:
        """The budget that they ask for."""
        for name, make in BUDGETS.items():
            value = getattr(self, name)
            if value is not None:
                made: Budget = make(value)  # type: ignore[operator]
                return made
        return None

    def fixed(self) -> dict[str, Any]:
        """What a resumed run must have in common, as values for JSON."""
        names = [f.name for f in fields(self) if f.name not in (*_FREE, *_IN_RULE)]
        rule = None if self.dense else repr(self.update_rule())
        fixed = {name: getattr(self, name) for name in names}
        if self.size is not None:
            fixed["size"] = in_words(self.size)  # JSON has neither tuples nor classes
        return {**fixed, "update rule": rule}

    def shown(self) -> dict[str, str]:
        """Settings by name, as a reader of the report wants them; defaults are left out."""
        shown = {"mode": "dense" if self.dense else "eventful"}
        if self.compare:
            shown["mode"] = "eventful, compared with dense"
        if not self.dense:
            shown["update rule"] = repr(self.update_rule())
        if (budget := self.budget()) is not None:
            shown["budget"] = repr(budget)
        shown |= {"device": self.device, "precision": self.dtype}
        usual = RunSettings()
        for name in ("weights", "size", "frames", "every", "score", "track"):
            if getattr(self, name) != getattr(usual, name):
                shown[name] = str(getattr(self, name))
        if self.size is not None:
            shown["size"] = in_words(self.size)
        return shown


def refuse_both(settings: RunSettings, *names: str) -> None:
    """Raise where more than one of some options is given."""
    given = [name for name in names if settings._given(name)]
    if len(given) > 1:
        raise ConfigError(f"--{given[0]} and --{given[1]} exclude each other; give one.")


def made_config(
    preset: str, policy: Policy | None, *, needed: bool = True, **options: Any
) -> Config:
    """A preset by name, as a command line names it.

    Args:
        needed: no budget will choose the policy.

    Raises:
        ConfigError: There is no such preset, or it needs a policy.
    """
    if preset not in PRESETS:
        raise ConfigError(f"There is no preset {preset!r}: {', '.join(PRESETS)}.")
    if needed and policy is None and preset not in ("fast", "exact"):
        raise ConfigError(f"--preset {preset} needs --r or --h.")
    return Config.preset(preset, policy, **options)
