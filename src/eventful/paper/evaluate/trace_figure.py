"""Draws a trace: error and operations over time, a line per variant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventful.paper.evaluate.figure import COLOURS, FAINT, GRID, STYLE, pyplot_for_files, save
from eventful.paper.evaluate.report import Scale
from eventful.paper.evaluate.variants import DENSE

if TYPE_CHECKING:
    from eventful.paper.evaluate.trace import TraceReport

AMBER = "#d98c00"


def draw_trace(report: TraceReport, path: Path) -> list[Path]:
    """Write the figure: the error above, the operations below, both means over the videos."""
    pyplot = pyplot_for_files()
    with pyplot.rc_context(STYLE):
        figure, (above, below) = pyplot.subplots(2, 1, figsize=(7.6, 5.2), sharex=True)
        rows = [row for row in report.rows if row.preset != DENSE]
        for row, colour in zip(rows, COLOURS * len(rows), strict=False):
            frames, error, operations = _means(report, row.key)
            name = row.label if row.h is None else f"{row.label}, h = {row.h:g}"
            above.plot(frames, error, color=colour, linewidth=1.5, label=name)
            below.plot(frames, operations, color=colour, linewidth=1.5)
        _dense_line(below, report)
        _budgets(above, below, report)
        above.set_ylabel("relative error of the features")
        scale = Scale.of("vitdet", report.rows)
        below.set_ylabel(scale.name.split()[0])
        below.yaxis.set_major_formatter(lambda value, _: f"{value * scale.factor:g}")
        below.set_xlabel("frame")
        below.locator_params(axis="x", integer=True)
        for axis in (above, below):
            axis.set_ylim(bottom=0)
            axis.margins(x=0.01)
            axis.grid(axis="y", color=GRID, linewidth=0.8)
            axis.set_axisbelow(True)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
        figure.suptitle(report.experiment.title, x=0.01, ha="left", fontsize=11.5, weight="bold")
        figure.legend(
            *above.get_legend_handles_labels(), loc="upper center", bbox_to_anchor=(0.5, 0.02),
            ncols=min(4, len(rows)), frameon=False, fontsize=8.5,
        )  # fmt: skip
        figure.tight_layout(rect=(0, 0.0, 1, 0.99))
        return save(figure, [path])


def _means(report: TraceReport, key: str) -> tuple[list[int], list[float], list[float]]:
    """Frames, and the mean error and operations of each over the videos."""
    by_frame: dict[int, list[tuple[float, float]]] = {}
    for step in report.steps:
        if step["variant"] == key:
            by_frame.setdefault(step["frame"], []).append((step["error"], step["operations"]))
    frames = sorted(by_frame)
    error, operations = (
        [sum(pair[which] for pair in by_frame[f]) / len(by_frame[f]) for f in frames]
        for which in (0, 1)
    )
    return frames, error, operations


def _dense_line(axis: Any, report: TraceReport) -> None:
    dense = max((row.dense_operations or 0.0) for row in report.rows)
    axis.axhline(dense, color=FAINT, linewidth=0.9, linestyle=(0, (1, 2)))
    axis.annotate(
        "dense", (0, dense), xytext=(2, 3), textcoords="offset points", fontsize=8, color=FAINT
    )


def _budgets(above: Any, below: Any, report: TraceReport) -> None:
    """Where the budget changes: a line, and its value above the frames it holds for."""
    key = report.parts[0]["variant"]
    for part in (part for part in report.parts if part["variant"] == key and part["budget"]):
        if part["first"]:
            for axis in (above, below):
                axis.axvline(part["first"] - 0.5, color=AMBER, linewidth=0.9, alpha=0.7)
        above.annotate(
            part["budget"], ((part["first"] + part["last"]) / 2, 1.0),
            xycoords=("data", "axes fraction"), xytext=(0, 3), textcoords="offset points",
            ha="center", fontsize=8.5, color=AMBER,
        )  # fmt: skip
