"""What a stream's steps did in sum."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from eventful import ops
from eventful.errors import ConfigError
from eventful.rules.record import STALE, StepRecord

RECENT = 4096  # values that medians are taken of
_WAITING = 512  # records of a device's steps that are kept until somebody asks


@dataclass(frozen=True)
class Summary:
    """What the steps of a stream, or of a batch, did since it started.

    Attributes:
        steps: calls.
        frames: of all streams together.
        flushed: frames on which everything was recomputed.
        fallbacks: steps that ran dense because that was cheaper, or for the `reason` given.
        reason: why every frame ran dense, as of the last step that did; None elsewhere.
        tokens: share of the tokens updated, first frames included.
        operations, dense_operations: counted, and what the dense model would have needed; 0 where
            the rule is not counted.
        ms: median time of the last RECENT steps; dense_ms the lowest of a dense step, None if none
            was timed.
        estimate, worst_estimate: of the error, median of the last RECENT frames and largest of all;
            None where nothing estimates.
        stale: frames whose output was marked as stale.
        at_ceiling: steps in which more tokens wanted to pass than were let through.
        audits: comparisons with the dense model.
        audit_error, worst_audit_error: of the last 1024 of them, median and largest.
        audit_cosine, worst_audit_cosine: of tokens' outputs, median, and the worst token.
        audit_ms: that the comparisons took, all together.
    """

    steps: int = 0
    frames: int = 0
    flushed: int = 0
    fallbacks: int = 0
    reason: str | None = None
    tokens: float = 0.0
    operations: int = 0
    dense_operations: int = 0
    ms: float = 0.0
    dense_ms: float | None = None
    estimate: float | None = None
    worst_estimate: float | None = None
    stale: int = 0
    at_ceiling: int = 0
    audits: int = 0
    audit_error: float | None = None
    worst_audit_error: float | None = None
    audit_cosine: float | None = None
    worst_audit_cosine: float | None = None
    audit_ms: float = 0.0

    @property
    def operations_saved(self) -> float:
        """Share of the dense model's operations that was not needed."""
        return 1 - self.operations / self.dense_operations if self.dense_operations else 0.0

    @property
    def time_saved(self) -> float | None:
        """Share of the time of a dense step that a step does not take; None if none was timed.

        A dense step fills the memory, too: the model without a stream can be faster.
        """
        return None if not self.dense_ms else 1 - self.ms / self.dense_ms

    def __str__(self) -> str:
        if not self.steps:
            return "No frame yet."
        lines = [
            f"{_count(self.frames, 'frame')}: {self.tokens:.1%} of the tokens updated, "
            f"{self.operations_saved:.1%} of the operations saved",
            f"{_count(self.flushed, 'frame')} recomputed whole, "
            f"{_count(self.fallbacks, 'step')} dense"
            + (" because that was cheaper" if self.reason is None else ""),
        ]
        if self.reason is not None:
            lines.append(self.reason)
        saved = ""
        if self.time_saved is not None:
            more = "less" if self.time_saved >= 0 else "more"
            saved = f", {abs(self.time_saved):.1%} {more} than a step that computes everything"
        lines.append(f"{self.ms:.3g} ms a step{saved}")
        if saved:
            lines.append("(the model without a stream can be faster: `eventful run --compare`)")
        if self.estimate is not None:
            lines.append(
                f"estimated error {self.estimate:.3f}, at worst {self.worst_estimate:.3f}; "
                f"{_count(self.stale, 'frame')} stale"
            )
        if self.audits:
            lines.append(
                f"{_count(self.audits, 'comparison')} with dense: error {self.audit_error:.3f}, at "
                f"worst {self.worst_audit_error:.3f}, cosine {self.audit_cosine:.3f}, worst token "
                f"{self.worst_audit_cosine:.3f}; {self.audit_ms:.3g} ms in all"
            )
        if self.at_ceiling:
            lines.append(f"{_count(self.at_ceiling, 'step')} at the ceiling of the policy")
        return "\n".join(lines)

    __repr__ = __str__


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass
class Tally:
    """Adds up records. Those of a device are read when somebody asks: reading one waits for it.

    It holds sums, and for medians the last RECENT values, so a stream may run for ever.
    """

    _waiting: list[Callable[[], StepRecord]] = field(default_factory=list)
    _sums: Counter[str] = field(default_factory=Counter)
    _worst: float | None = None
    _reason: str | None = None
    _passes: int = 0  # steps that were not the first on their frames
    _repeated: int = 0  # frames of these
    _ms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _estimates: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, record: Callable[[], StepRecord], *, now: bool) -> None:
        """Note a step.

        Args:
            now: its record can be read without waiting.
        """
        self._waiting.append(record)
        if now or len(self._waiting) > _WAITING:
            self._read()

    def again(self, streams: int) -> None:
        """The last step was another pass over the same frames: its tokens and operations count.

        What the dense model would have needed for them counts once.
        """
        self._passes += 1
        self._repeated += streams

    def _read(self) -> None:
        waiting, self._waiting = self._waiting, []
        for make in waiting:
            self._take(make())

    def _take(self, record: StepRecord) -> None:
        streams = len(record.flushed)
        self._sums += Counter(
            steps=1, frames=streams, flushed=sum(record.flushed), fallbacks=record.fallback,
            at_ceiling=record.at_ceiling,
        )  # fmt: skip
        self._reason = record.reason or self._reason
        self._sums["tokens"] += record.fraction * streams  # type: ignore[assignment]
        with contextlib.suppress(ConfigError):  # a rule of the user's own that is not counted
            self._sums["operations"] += record.macs
            self._sums["dense_operations"] += record.dense_macs
        self._ms.append(record.ms)
        known = [0] * streams if all(record.flushed) else []
        if record.estimates is not None:
            known = [value for value in record.estimates.tolist() if value >= 0]
            self._worst = max([self._worst or 0.0, *(value / ops.UNIT for value in known)])
        shares = [value / ops.UNIT for value in known]
        self._estimates.extend(shares)
        self._sums["stale"] += sum(share > STALE for share in shares)

    def sum(self, dense_ms: float | None, **audits: Any) -> Summary:
        """All that was noted."""
        self._read()
        if not self._sums["steps"]:
            return Summary()
        sums = dict(self._sums)
        sums["steps"] -= self._passes
        every, sums["frames"] = sums["frames"], sums["frames"] - self._repeated
        tokens = sums.pop("tokens", 0) / max(sums["frames"], 1)
        # Of each pass, and every frame of a stream costs the same dense.
        dense = sums.pop("dense_operations", 0) * sums["frames"] // max(every, 1)
        return Summary(
            **sums, tokens=tokens, dense_operations=dense, ms=median(self._ms), dense_ms=dense_ms,
            estimate=None if self._worst is None else median(self._estimates),
            worst_estimate=self._worst, reason=self._reason, **audits,
        )  # fmt: skip
