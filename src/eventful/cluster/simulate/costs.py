"""Times of steps, fitted to measurements: `fixed + per_stream * B + per_token * T` milliseconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eventful.errors import ConfigError

MEASURED = Path(__file__).with_name("measured.json")


@dataclass(frozen=True)
class Costs:
    """What steps of one model on one device take.

    Attributes:
        tokens: of one frame.
        state_bytes: memory of one stream.
        most: streams of the largest step that was measured; larger ones are not assumed.
        fixed: milliseconds of a step.
        per_stream: milliseconds for each stream of a step.
        per_token: milliseconds for each token that is computed.
        dense_fixed: milliseconds of a dense forward pass.
        dense_per_stream: milliseconds for each of its frames.
        gap: largest relative difference between a measurement and the fit.
        source: where the measurements are from.
    """

    tokens: int
    state_bytes: int
    most: int
    fixed: float
    per_stream: float
    per_token: float
    dense_fixed: float
    dense_per_stream: float
    gap: float = 0.0
    source: str = ""

    @classmethod
    def measured(cls, name: str) -> Costs:
        """Costs by name, from the results of this package."""
        known: dict[str, Any] = json.loads(MEASURED.read_text())["costs"]
        if name not in known:
            raise ConfigError(f"No measured costs named {name!r}; there are {', '.join(known)}.")
        return cls.fitted(known[name])

    @classmethod
    def fitted(cls, points: dict[str, Any]) -> Costs:
        """Fit to `steps` (streams, tokens, ms) and `dense` (streams, ms), relative errors alike."""
        steps = np.asarray(points["steps"], dtype=float)
        dense = np.asarray(points["dense"], dtype=float)
        (fixed, per_stream, per_token), gap = _fit(steps[:, :2], steps[:, 2])
        (dense_fixed, dense_per_stream), dense_gap = _fit(dense[:, :1], dense[:, 1])
        return cls(
            tokens=int(points["tokens"]),
            state_bytes=int(points["state_bytes"]),
            most=int(steps[:, 0].max()),
            fixed=fixed,
            per_stream=per_stream,
            per_token=per_token,
            dense_fixed=dense_fixed,
            dense_per_stream=dense_per_stream,
            gap=max(gap, dense_gap),
            source=f"{points['device']}, {points['from']}, commits {', '.join(points['commits'])}",
        )

    def step_ms(self, streams: float, tokens: float) -> float:
        """A step of so many streams that computes so many tokens."""
        return self.fixed + self.per_stream * streams + self.per_token * tokens

    def dense(self) -> Costs:
        """The same device with the dense model: every frame costs the same, nothing is held."""
        return Costs(
            self.tokens, 0, self.most, self.dense_fixed, self.dense_per_stream, 0.0,
            self.dense_fixed, self.dense_per_stream, self.gap, self.source,
        )  # fmt: skip


def measured_shares() -> dict[str, float]:
    """Share of the tokens that the default updated on each measured clip, a median."""
    shares: dict[str, float] = json.loads(MEASURED.read_text())["shares"]
    return shares


def names() -> list[str]:
    """Names of the measured costs."""
    return list(json.loads(MEASURED.read_text())["costs"])


def _fit(sizes: np.ndarray, ms: np.ndarray) -> tuple[Sequence[float], float]:
    """Least squares of the relative errors with no factor below zero; and the largest error."""
    design = np.column_stack([np.ones(len(ms)), sizes])
    used = list(range(design.shape[1]))
    while True:
        found = np.linalg.lstsq(design[:, used] / ms[:, None], np.ones(len(ms)), rcond=None)[0]
        if (found >= 0).all() or len(used) == 1:
            break
        used.pop(int(found.argmin()))
    factors = np.zeros(design.shape[1])
    factors[used] = found
    return factors.tolist(), float(np.abs(design @ factors / ms - 1).max())
