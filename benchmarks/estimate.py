"""How good the estimate of the error is: on stored measurements of w, c and the true error.

python benchmarks/estimate.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from eventful.bench.video.rows import rank_correlation
from eventful.ops.reference import scores
from eventful.rules.record import STALE

ROWS = Path(__file__).parent / "results" / "estimate" / "rows.json"
BAD, GOOD = 0.25, 0.1  # errors that should be marked as stale, and that should not


def quality() -> dict[str, float]:
    """Rank correlation with the true error; shares of bad and good frames marked as stale."""
    rows = json.loads(ROWS.read_text())["rows"]
    left, change, error = (np.array([row[key] for row in rows]) for key in ("w", "c", "error"))
    estimate = (
        scores.FACTOR
        * np.maximum(left, scores.LEAST) ** scores.BY_ERROR
        * np.maximum(change, scores.LEAST) ** scores.BY_CHANGE
    )
    return {
        "frames": len(rows),
        "rank": float(rank_correlation(list(estimate), list(error)) or 0.0),
        "caught": float((estimate[error > BAD] > STALE).mean()),
        "false": float((estimate[error < GOOD] > STALE).mean()),
    }


if __name__ == "__main__":
    for name, value in quality().items():
        print(f"{name}: {value:.3f}")
