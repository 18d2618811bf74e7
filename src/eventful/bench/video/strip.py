"""The picture of a clip: stills, share updated, error and time along its frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from eventful.bench.video.rows import Series, VideoRow
from eventful.surgery.libraries import load
from eventful.video.charts import FAINT, GRID, STYLE

STILLS = 8
COLOURS = ("#2e6fb7", "#d98c00", "#4c9a5b", "#8d6a9f", "#b0473f")
SKIPS = {"skip": FAINT, "skip-carried": "#3f4450"}
DENSE = "dense"


def draw(rows: Sequence[VideoRow], frames: Sequence[Tensor], path: Path) -> None:
    """Write the picture of one clip.

    Args:
        rows: all of one clip.
        frames: uint8 (3, H, W).
    """
    load("matplotlib").use("Agg")
    pyplot: Any = load("matplotlib.pyplot")
    shown = _shown(rows)
    timed = any(row.by_frame.ms for row in rows)
    panels: list[tuple[str, Callable[[Series], list[float]]]] = [
        ("tokens updated", lambda series: series.updated),
        ("relative error", lambda series: series.error),
    ]
    if timed:
        panels.append(("ms a frame", lambda series: series.ms))
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            len(panels) + 1, 1, figsize=(9, 1.2 + 1.6 * len(panels)), layout="constrained",
            sharex=True, gridspec_kw={"height_ratios": [0.75] + [1.0] * len(panels)},
        )  # fmt: skip
        _stills(axes[0], frames)
        for axis, (label, values) in zip(axes[1:], panels, strict=True):
            for row, colour in shown:
                _line(axis, values(row.by_frame), row.contender, colour)
            axis.set_ylabel(label)
            axis.set_ylim(bottom=0)
            axis.grid(axis="y", color=GRID, linewidth=0.8)
            axis.set_axisbelow(True)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
        axes[-1].set_xlabel("frame")
        first = rows[0]
        axes[0].set_title(
            f"{first.clip}: {first.model}, {first.size}, {first.precision} on {first.device}",
            loc="left",
            fontsize=10,
        )
        names = [*axes[1].get_legend_handles_labels()]
        figure.legend(*names, loc="outside lower center", ncol=6, fontsize=8, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(str(path), dpi=130, facecolor="white")
        pyplot.close(figure)


def _shown(rows: Sequence[VideoRow]) -> list[tuple[VideoRow, str]]:
    """Streams in colours, frame skipping in greys, dense where it has times."""
    streams = [row for row in rows if row.config]
    made = [(row, COLOURS[i % len(COLOURS)]) for i, row in enumerate(streams)]
    made += [(row, SKIPS[row.contender]) for row in rows if row.contender in SKIPS]
    made += [(row, "#1f2430") for row in rows if row.contender == DENSE and row.by_frame.ms]
    return made


def _line(axis: Any, values: list[float], name: str, colour: str) -> None:
    skipping = name in SKIPS
    style = {"lw": 0.9, "ls": "--", "drawstyle": "steps-mid"} if skipping else {"lw": 1.5}
    if name == DENSE:
        style = {"lw": 0.9, "ls": ":"}
    axis.plot(range(len(values)), values, color=colour, label=name, **style)


def _stills(axis: Any, frames: Sequence[Tensor]) -> None:
    """Frames along the time axis, each at its place."""
    count = len(frames)
    width = count / STILLS
    axis.set_xlim(-0.5, count - 0.5)
    axis.set_ylim(0, 1)
    for place in range(STILLS):
        frame = frames[min(count - 1, round(place * width))]
        left = place * width - 0.5
        axis.imshow(
            frame.permute(1, 2, 0).numpy(), extent=(left, left + 0.97 * width, 0, 1), aspect="auto"
        )
    axis.axis("off")
