"""Charts of a video of updates: the contact sheet (last figure) and the costs (first figure)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from eventful.cost.units import Unit, unit_of
from eventful.surgery.libraries import load
from eventful.video.overlay import mask_picture
from eventful.video.scene import UpdateStep

INK, FAINT, GRID, BLUE, AMBER = "#1f2430", "#8a8f9c", "#e6e8ee", "#2e6fb7", "#d98c00"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


def update_sheet(steps: Sequence[UpdateStep], path: Path, *, gate: str, prediction: str) -> None:
    """Write the contact sheet: a column per frame, which has four rows.

    The frame as it is, the prediction, the error, and the tokens that were updated.

    Args:
        prediction: caption of the second row.
    """
    pyplot = _pyplot()
    height, width = steps[0].view.frame.shape[-2:]
    across = 2.35
    down = across * height / width
    brightest = error_scale(steps)
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            4,
            len(steps),
            figsize=(across * len(steps) + 1.35, 4.13 * down + 0.35),
            squeeze=False,
            gridspec_kw={"wspace": 0.03, "hspace": 0.04},
        )
        for column, step in enumerate(steps):
            axes[0][column].set_title(_heading(step), fontsize=9)
            _picture(axes[0][column], step.view.frame)
            _picture(axes[1][column], step.prediction)
            grid = axes[2][column].imshow(
                step.view.error.numpy(),
                cmap="magma",
                vmin=0,
                vmax=brightest,
                extent=(0, width, height, 0),
                interpolation="nearest",
            )
            _picture(axes[3][column], mask_picture(step.view))
        names = ("frame", prediction, "error $\\|e\\|$", "update mask $m$")
        for row, name in enumerate(names):
            axes[row][0].set_ylabel(name, fontsize=10)
        for axis in axes.flatten():
            axis.set_xticks([])
            axis.set_yticks([])
            for spine in axis.spines.values():
                spine.set_visible(False)
        bar = figure.colorbar(grid, ax=list(axes.flatten()), fraction=0.012, pad=0.008, aspect=38)
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=7.5, length=2)
        bar.set_label(f"error, gate {gate}", fontsize=8)
        _save(pyplot, figure, path)


def operations_chart(steps: Sequence[UpdateStep], path: Path, *, title: str = "") -> None:
    """Write the operations of each frame, with the budget in force and the cost of dense."""
    pyplot = _pyplot()
    frames = [step.index for step in steps]
    unit = unit_of(max(step.dense_macs for step in steps))
    costs = [step.macs / unit.size for step in steps]
    dense = max(step.dense_macs for step in steps) / unit.size
    with pyplot.rc_context(STYLE):
        figure, axis = pyplot.subplots(figsize=(7.6, 3.1))
        edges = [frame - 0.5 for frame in (*frames, frames[-1] + 1)]
        axis.stairs(costs, edges, fill=True, color=BLUE, alpha=0.18, linewidth=0)
        axis.stairs(costs, edges, baseline=None, color=BLUE, linewidth=1.7)
        axis.axhline(dense, color=FAINT, linewidth=0.9, linestyle=(0, (1, 2)))
        axis.annotate(
            "dense", (edges[-1], dense), xytext=(0, 3), textcoords="offset points", ha="right",
            fontsize=8, color=FAINT,
        )  # fmt: skip
        _mark_flushes(axis, steps, unit)
        top = max(dense, *costs)  # with a large budget a rule may cost more than dense
        _mark_budgets(axis, steps, top)
        axis.set_xlabel("frame")
        axis.set_ylabel(unit.name)
        axis.set_ylim(0, top * 1.16)
        axis.margins(x=0.01)
        axis.grid(axis="y", color=GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        if title:
            axis.set_title(title, loc="left", fontsize=10.5, weight="bold")
        _save(pyplot, figure, path)


def error_scale(steps: Sequence[UpdateStep]) -> float:
    """The error shown lightest: a high quantile, so that no single token sets the scale."""
    largest = [float(s.view.error.flatten().quantile(0.995)) for s in steps if not s.flush]
    return max(largest, default=1.0) or 1.0


def spread(steps: Sequence[UpdateStep], columns: int) -> list[UpdateStep]:
    """Steps for the columns of a sheet, evenly from the first after the flush to the last."""
    steady = [step for step in steps if not step.flush] or list(steps)
    if len(steady) <= columns:
        return steady
    last = len(steady) - 1
    return [steady[round(i * last / (columns - 1))] for i in range(columns)]


def _heading(step: UpdateStep) -> str:
    share = "flush" if step.flush else f"{step.updated / step.tokens:.0%} updated"
    return f"frame {step.index}  ·  {share}"


def _picture(axis: Any, picture: Tensor) -> None:
    axis.imshow(picture.permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="lanczos")


def _mark_flushes(axis: Any, steps: Sequence[UpdateStep], unit: Unit) -> None:
    """Label each flush, unless it is too close to the last label."""
    free = steps[0].index
    for step in steps:
        if step.flush and step.index >= free:
            free = step.index + max(1, len(steps) // 12)
            axis.annotate(
                "flush", (step.index + 0.5, step.macs / unit.size), xytext=(4, -5),
                textcoords="offset points", fontsize=8, color=BLUE, va="top",
            )  # fmt: skip


def _mark_budgets(axis: Any, steps: Sequence[UpdateStep], top: float) -> None:
    """Where the budget changes: a line, and its value above the frames it holds for."""
    starts = [i for i, s in enumerate(steps) if i == 0 or s.budget != steps[i - 1].budget]
    for i, end in zip(starts, [*starts[1:], len(steps)], strict=True):
        if not steps[i].budget:
            continue
        if i:
            axis.axvline(steps[i].index - 0.5, color=AMBER, linewidth=0.9, alpha=0.7)
        middle = (steps[i].index + steps[end - 1].index) / 2
        axis.text(middle, top * 1.07, steps[i].budget, color=AMBER, fontsize=8.5, ha="center")


def _pyplot() -> Any:
    load("matplotlib").use("Agg")
    return load("matplotlib.pyplot")


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=170, bbox_inches="tight", facecolor="white")
    pyplot.close(figure)
