"""The picture of a simulation: load, missing frames and latencies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from eventful.cluster.simulate.outcome import BIN_MS, Outcome
from eventful.surgery.libraries import load
from eventful.video.charts import GRID, STYLE

_LOAD, _DROPPED, _LOST, _DENSE = "#2e6fb7", "#d98c00", "#b0473f", "#3f4450"


def draw(outcome: Outcome, dense: Outcome, path: Path) -> None:
    """Write the picture, with the dense model on the same cluster beside it."""
    load("matplotlib").use("Agg")
    pyplot: Any = load("matplotlib.pyplot")
    fleet = outcome.fleet
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(3, 1, figsize=(8.6, 8.4), layout="constrained")
        _load(axes[0], outcome, dense)
        _missing(axes[1], outcome, dense)
        _latency(axes[2], outcome, dense)
        for axis in axes:
            axis.grid(color=GRID, linewidth=0.8)
            axis.set_axisbelow(True)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
        figure.suptitle(
            f"Simulated: {fleet.cameras:,} cameras, {fleet.fps:g} frames/s, {fleet.gpus} GPUs",
            x=0.01, ha="left", fontsize=10.5, weight="bold",
        )  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(str(path), dpi=140, facecolor="white")
        pyplot.close(figure)


def _minutes(outcome: Outcome) -> np.ndarray:
    """Whole minutes; the last one may be shorter and is left out if there are others."""
    per = outcome.fleet.in_ticks(60)
    return np.arange(max(outcome.fleet.ticks // per, 1))


def _load(axis: Any, outcome: Outcome, dense: Outcome) -> None:
    minutes = _minutes(outcome)
    for made, colour, label in ((outcome, _LOAD, "eventful"), (dense, _DENSE, "dense")):
        given = min(made.fleet.in_ticks(60), made.fleet.ticks) * made.fleet.tick_ms
        share = made.minutes[3, : len(minutes)] / (made.fleet.gpus * given)
        axis.plot(minutes, 100 * share, color=colour, label=label, drawstyle="steps-post")
    axis.set_ylim(0, 105)
    axis.set_ylabel("GPU time in use, %")
    axis.legend(frameon=False, fontsize=8.5, loc="lower right")
    axis.set_xlabel("minute")


def _missing(axis: Any, outcome: Outcome, dense: Outcome) -> None:
    minutes = _minutes(outcome)
    dropped, lost = outcome.minutes[1, : len(minutes)], outcome.minutes[2, : len(minutes)]
    axis.bar(minutes + 0.5, lost, color=_LOST, label="lost: no live worker")
    axis.bar(minutes + 0.5, dropped, bottom=lost, color=_DROPPED, label="dropped: newer frame")
    missing = dense.minutes[1:3, : len(minutes)].sum(axis=0)
    axis.plot(
        minutes, missing, color=_DENSE, drawstyle="steps-post", linewidth=1,
        label="dense, dropped and lost",
    )  # fmt: skip
    axis.set_yscale("symlog", linthresh=100)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("frames a minute")
    axis.set_xlabel("minute")
    axis.legend(frameon=False, fontsize=8.5, ncol=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _latency(axis: Any, outcome: Outcome, dense: Outcome) -> None:
    longest = 0.0
    for made, colour, label in ((outcome, _LOAD, "eventful"), (dense, _DENSE, "dense")):
        total = made.latency.sum()
        if total:
            shares = made.latency.cumsum() / total
            ms = (np.arange(len(shares)) + 1) * BIN_MS
            longest = max(longest, made.percentile(0.999) * 1.1)
            axis.plot(ms, 100 * shares, color=colour, label=label)
    axis.set_xlim(0, longest or 1)
    axis.set_ylim(0, 101)
    axis.set_xlabel("ms from capture to result")
    axis.set_ylabel("computed frames, %")
    axis.legend(frameon=False, fontsize=8.5, loc="lower right")
