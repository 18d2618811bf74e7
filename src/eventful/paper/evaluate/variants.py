"""Variants: how to run a model, dense, under an update rule, or skipping frames."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from eventful.config import PRESETS, Config
from eventful.errors import ConfigError
from eventful.policies import Always, Policy, Threshold, TopFraction, TopR

DENSE, SKIP = "dense", "skip"
RUN_PRESETS = (DENSE, *PRESETS, SKIP)
BASE = "base"
_OWN_POLICY = ("fast", "exact")  # presets with a default policy


@dataclass(frozen=True)
class Published:
    """What the paper prints for a variant.

    Attributes:
        accuracy: mAP50 or top-1, in percent.
        operations: GFlops per frame (ViTDet) or TFlops per video (ViViT).
        gpu_ms: milliseconds per frame or video on the paper's GPU.
        cpu_ms: the same on its CPU.
    """

    accuracy: float | None = None
    operations: float | None = None
    gpu_ms: float | None = None
    cpu_ms: float | None = None


@dataclass(frozen=True)
class Variant:
    """One row of a table, one point of a figure.

    Attributes:
        label: variants of one label make up a line of the figure.
        preset: `dense`, `skip` or a preset of `Config`.
        model: `vitdet` or `vivit`.
        size: side of the frames in pixels; None for the model's own.
        r: tokens to update; None for another policy.
        fraction: share of the tokens to update.
        h: threshold on the error.
        per_gate: a threshold for each gate, which this share of its tokens exceeds on other videos.
        gates: those thresholds, once they are known.
        share: of a `skip`, the share of the frames it computes.
        like: of a `skip`, the key of the variant whose measured cost it matches.
        weights: which of the given weights, where an experiment needs several.
        tuned_r: r the weights were tuned at.
        options: further settings of `Config`; of a `dense`, only `pool`.
        remark: the paper's text where it prints no number.
    """

    label: str
    preset: str
    model: str = "vitdet"
    size: int | None = None
    r: int | None = None
    fraction: float | None = None
    h: float | None = None
    per_gate: float | None = None
    gates: Mapping[str, float] | None = None
    share: float | None = None
    like: str | None = None
    weights: str = BASE
    tuned_r: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    published: Published = field(default_factory=Published)
    remark: str = ""

    def __post_init__(self) -> None:
        if self.preset not in RUN_PRESETS:
            raise ConfigError(
                f"No preset {self.preset!r} to evaluate; there are {', '.join(RUN_PRESETS)}."
            )
        if self.model not in ("vitdet", "vivit"):
            raise ConfigError(f"No model {self.model!r} to evaluate; there are vitdet and vivit.")
        if self.share is not None and not 0.0 < self.share <= 1.0:
            raise ConfigError(f"Skipping computes a share of the frames in (0, 1]: {self.share!r}.")
        self.config()

    @property
    def key(self) -> str:
        """A name for files, unique within an experiment."""
        size = "" if self.size is None else f"{self.size}px"
        parts = [self.label, size, self.budget]
        if self.tuned_r is not None:
            parts.append(f"tuned {self.tuned_r}")
        return re.sub(r"[^a-z0-9.%]+", "-", " ".join(filter(None, parts)).lower()).strip("-")

    @property
    def budget(self) -> str:
        """The policy as a short text; '' for none."""
        if self.r is not None:
            return f"r{self.r}"
        if self.fraction is not None:
            return f"{self.fraction:.4g}".replace("0.", "f.", 1)
        if self.per_gate is not None:
            return f"gates{self.per_gate:g}"
        return "" if self.h is None else f"h{self.h:g}"

    @property
    def pool(self) -> int:
        """Side of the cells over which keys and values are averaged."""
        return int(self.options.get("pool", 1))

    def policy(self) -> Policy | None:
        """The selection policy; None for the preset's default."""
        if self.r is not None:
            return TopR(self.r)
        if self.fraction is not None:
            return TopFraction(self.fraction)
        if self.gates is not None:
            return Threshold(dict(self.gates))
        if self.per_gate is not None:
            return TopFraction(self.per_gate)  # under which the errors of the gates are recorded
        return None if self.h is None else Threshold(self.h)

    def config(self) -> Config | None:
        """The update rule; None for the unchanged dense model."""
        if self.preset in (DENSE, SKIP):
            if set(self.options) - {"pool"}:
                raise ConfigError(f"{self.preset} takes no option but pool: {dict(self.options)}.")
            return Config.tokenwise(Always(), pool=self.pool) if self.pool > 1 else None
        policy = self.policy()
        if policy is None and self.preset not in _OWN_POLICY:
            raise ConfigError(
                f"{self.preset} needs to know how many tokens to update: give r (a number, or a "
                "percentage of the tokens) or a threshold h."
            )
        options = {"fallback": False, **self.options}  # results must not depend on measured times
        try:
            return Config.preset(self.preset, policy, **options)
        except TypeError as error:
            raise ConfigError(f"{self.label}: {error}.") from None

    def to_dict(self) -> dict[str, Any]:
        """Everything its numbers depend on, as values for JSON; without published numbers."""
        kept = (f.name for f in fields(self) if f.name not in ("published", "remark"))
        values = {name: getattr(self, name) for name in kept}
        config = self.config()
        values["options"] = dict(self.options)
        values["gates"] = None if self.gates is None else dict(self.gates)
        values["config"] = None if config is None else config.to_dict()
        return {name: value for name, value in values.items() if value is not None}
