"""The key numbers of a run, and how numbers are written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from eventful.pipeline.history import FrameRow, Totals


@dataclass(frozen=True)
class Numbers:
    """Of some frames; None where it was not measured.

    Attributes:
        saved: operations of the whole model divided by those that were done, over all frames.
        speed_up: median `dense_ms` divided by median `ms`, of frames on which both ran.
        ms: median of all frames; `dense_ms` of those where the whole model ran.
        share: of the tokens, how many were computed, over all frames.
        error: median; `error_high` is exceeded by 5 % of the frames.
        compared: frames on which the whole model ran too.
    """

    frames: int
    saved: float | None
    speed_up: float | None
    ms: float | None
    dense_ms: float | None
    share: float | None
    error: float | None
    error_high: float | None
    estimate: float | None
    stale: int
    flushed: int
    compared: int
    found: float | None

    def with_totals(self, totals: Totals | None) -> Numbers:
        """The same with sums over all frames, where the rows are only some of them."""
        if totals is None:
            return self
        return replace(
            self,
            frames=totals.frames,
            saved=totals.saved,
            share=totals.share,
            stale=totals.stale,
            flushed=totals.flushed,
        )

    @classmethod
    def of(cls, rows: Sequence[FrameRow]) -> Numbers:
        """The numbers of these frames, which may be none."""
        both = [
            (row.dense_ms, row.ms)
            for row in rows
            if row.dense_ms is not None and math.isfinite(row.dense_ms + row.ms)
        ]
        dense, eventful = (median(part) for part in (zip(*both, strict=True) if both else ((), ())))
        errors = known(row.error for row in rows)
        return cls(
            frames=len(rows),
            saved=_ratio(
                _total(r.dense_operations for r in rows), _total(r.operations for r in rows)
            ),
            speed_up=_ratio(dense, eventful),
            ms=median(row.ms for row in rows),
            dense_ms=median(row.dense_ms for row in rows),
            share=_ratio(_total(row.updated for row in rows), _total(row.tokens for row in rows)),
            error=median(errors),
            error_high=quantile(errors, 0.95),
            estimate=median(row.estimate for row in rows),
            stale=sum(row.stale for row in rows),
            flushed=sum(row.flushed for row in rows),
            compared=len(both),
            found=median(row.found for row in rows),
        )


def known(values: Iterable[float | None]) -> list[float]:
    """The values that are there and finite."""
    return [value for value in values if value is not None and math.isfinite(value)]


def median(values: Iterable[float | None]) -> float | None:
    """Of the known values; None if there are none."""
    there = known(values)
    return statistics.median(there) if there else None


def quantile(values: Iterable[float | None], share: float) -> float | None:
    """The smallest known value that at least this share of them does not exceed."""
    there = sorted(known(values))
    return there[max(0, math.ceil(share * len(there)) - 1)] if there else None


def _total(values: Iterable[float]) -> float:
    return sum(known(values))


def _ratio(above: float | None, below: float | None) -> float | None:
    if above is None or below is None or below <= 0:
        return None
    return above / below


def factor(value: float | None) -> str:
    """`6.4x`; a dash where it is not known."""
    if value is None:
        return "–"
    return f"{value:,.0f}x" if value >= 100 else f"{value:.1f}x" if value >= 10 else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """`3.1 %` from a share."""
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if value < 0.0995 else f"{100 * value:.0f} %"


def plain(value: float | None, unit: str = "") -> str:
    """Three digits, thousands apart, and the unit."""
    if value is None:
        return "–"
    if abs(value) >= 100:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.3g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.1e}"
    return f"{text} {unit}" if unit else text


def size(count: int) -> str:
    """Bytes in the unit that suits them."""
    value = float(count)
    for unit in ("bytes", "kB", "MB"):
        if value < 1000:
            return plain(value, unit)
        value /= 1000
    return plain(value, "GB")


def counted(count: int, noun: str) -> str:
    """`1 frame`, `2 frames`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
