"""The paper's figure: accuracy against operations, measured and published (Figures 7 to 9)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventful.paper.evaluate.variants import DENSE, SKIP
from eventful.surgery.libraries import load

if TYPE_CHECKING:
    from eventful.paper.evaluate.report import Report, Row

INK, FAINT, GRID = "#1f2430", "#8a8f9c", "#e6e8ee"
COLOURS = ("#d1495b", "#2e6fb7", "#3a9a6d", "#e0912f", "#7a5ca8", "#2a9aa8", "#a3623a", "#5f6b7a")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "savefig.dpi": 180,
}


def pyplot_for_files() -> Any:
    """Matplotlib without a window."""
    load("matplotlib").use("Agg")
    return load("matplotlib.pyplot")


def draw_groups(report: Report, path: Path) -> list[Path]:
    """Write small multiples: a panel for the videos of each camera, a line per label."""
    pyplot = pyplot_for_files()
    with pyplot.rc_context(STYLE):
        count = len(report.groups)
        figure, axes = pyplot.subplots(
            1, count, figsize=(0.8 + 2.7 * count, 3.3), squeeze=False, sharex=True
        )
        lines = list(dict.fromkeys(_line(row) for row in report.rows if row.preset != DENSE))
        for place, (axis, (name, rows)) in enumerate(
            zip(axes[0], report.groups.items(), strict=True)
        ):
            _panel(axis, rows, lines, report, numbers=False)
            axis.set_title(name, loc="left", fontsize=9.5)
            if place:
                axis.set_ylabel("")
        figure.suptitle(
            f"{report.experiment.title}, by camera", x=0.01, ha="left", fontsize=11.5, weight="bold"
        )
        _legend(figure, axes[0], published=False)
        figure.tight_layout(rect=(0, 0.0, 1, 0.99))
        return save(figure, [path])


def save(figure: Any, paths: Sequence[Path]) -> list[Path]:
    """Write a figure to each path, and close it."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, bbox_inches="tight", facecolor="white")
    load("matplotlib.pyplot").close(figure)
    return list(paths)


def draw_tradeoff(report: Report, path: Path) -> list[Path]:
    """Write the figure as PNG and PDF: a panel per frame size, a line per label."""
    pyplot = pyplot_for_files()
    with pyplot.rc_context(STYLE):
        sizes = list(dict.fromkeys(row.size for row in report.rows))
        figure, axes = pyplot.subplots(
            1, len(sizes), figsize=(1.2 + 4.6 * len(sizes), 3.9), squeeze=False
        )
        lines = list(dict.fromkeys(_line(row) for row in report.rows if row.preset != DENSE))
        for axis, size in zip(axes[0], sizes, strict=True):
            rows = [row for row in report.rows if row.size == size]
            _panel(axis, rows, lines, report)
            if len(sizes) > 1 or size is not None:
                axis.set_title(f"{size} px" if size else "own size", loc="left", fontsize=9.5)
        figure.suptitle(report.experiment.title, x=0.01, ha="left", fontsize=11.5, weight="bold")
        _legend(figure, axes[0], published=_published(report.rows))
        figure.tight_layout(rect=(0, 0.0, 1, 0.99))
        return save(figure, [path, path.with_suffix(".pdf")])


def _line(row: Row) -> str:
    if row.preset == SKIP:
        return "Frame skipping at equal cost"
    if row.tuned_r is None:
        return row.label
    label = row.label if "tuned" in row.label.lower() else f"{row.label}, tuned"
    return f"{label} at r = {row.tuned_r}"


def _panel(
    axis: Any, rows: Sequence[Row], lines: Sequence[str], report: Report, *, numbers: bool = True
) -> None:
    from eventful.paper.evaluate.report import METRICS, Scale

    metric = report.experiment.metric
    dense = [row for row in rows if row.preset == DENSE]
    for row, marker in zip(dense, ("*", *"pHd" * len(dense)), strict=False):
        _dense(axis, row, metric, marker)
    for index, name in enumerate(lines):
        own = [row for row in rows if row.preset != DENSE and _line(row) == name]
        shown = 0 if not numbers else len(own) if len(lines) < 3 else 1
        _curve(axis, own, name, metric, index, shown)
    scale = Scale.of(report.experiment.model, report.rows)
    axis.set_xlabel(scale.name)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value * scale.factor:g}")
    axis.set_ylabel(f"{METRICS[metric]} (%)")
    axis.grid(color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.set_xlim(left=0)
    axis.margins(y=0.12)
    axis.locator_params(axis="x", nbins=6)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _dense(axis: Any, row: Row, metric: str, marker: str) -> None:
    accuracy = getattr(row, metric)
    if accuracy is not None and row.operations is not None:
        axis.axhline(accuracy, color=FAINT, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
        axis.scatter(
            [row.operations], [accuracy], s=95, marker=marker, color=INK, zorder=4, label=row.label
        )
    if row.published_accuracy is not None and row.published_operations is not None:
        axis.scatter(
            [row.published_operations],
            [row.published_accuracy],
            s=80,
            marker=marker,
            facecolor="white",
            edgecolor=FAINT,
            zorder=3,
        )


def _curve(
    axis: Any, rows: Sequence[Row], name: str, metric: str, index: int, numbers: int
) -> None:
    """The variants of one label: measured points, and in a lighter colour the published ones.

    Args:
        numbers: how many points, from the cheapest on, have their r beside them.
    """
    if not rows:
        return
    skipping = rows[0].preset == SKIP
    colour = FAINT if skipping else COLOURS[index % len(COLOURS)]
    marker = "x" if skipping else MARKERS[index % len(MARKERS)]
    look = {"color": colour, "marker": marker}
    measured = sorted(
        (
            (row.operations, getattr(row, metric), row)
            for row in rows
            if row.operations is not None and getattr(row, metric) is not None
        ),
        key=lambda point: point[0],
    )
    if measured:
        x, y, _ = zip(*measured, strict=True)
        dashes = (0, (4, 2)) if skipping else "-"
        axis.plot(x, y, **look, markersize=5, lw=1.6, linestyle=dashes, zorder=3, label=name)
    for place, (cost, accuracy, row) in enumerate(measured):
        # With many lines only their ends have room for a number.
        if row.r is not None and not skipping and place < numbers:
            _beside(axis, str(row.r), (cost, accuracy), colour, above=index % 2 == 1)
    printed = sorted(
        (row.published_operations, row.published_accuracy)
        for row in rows
        if row.published_operations is not None and row.published_accuracy is not None
    )
    if printed:
        x, y = zip(*printed, strict=True)
        axis.plot(x, y, **look, alpha=0.45, markersize=4.5, mfc="white", lw=1.0, zorder=2)


def _beside(axis: Any, text: str, point: tuple[float, float], colour: str, *, above: bool) -> None:
    """A small number above or under a point."""
    axis.annotate(
        text,
        point,
        xytext=(0, 6 if above else -11),
        textcoords="offset points",
        ha="center",
        fontsize=6.8,
        color=colour,
    )


def _published(rows: Sequence[Row]) -> bool:
    return any(row.published_accuracy is not None for row in rows)


def _legend(figure: Any, axes: Sequence[Any], *, published: bool) -> None:
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if published:
        (found["as published"],) = axes[0].plot(
            [], [], color=FAINT, linewidth=1.0, marker="o", markersize=4.5, markerfacecolor="white"
        )
    if found:
        lines = -(-len(found) // (2 if len(axes) == 1 else 5))
        figure.legend(
            list(found.values()),
            list(found),
            loc="upper center",
            bbox_to_anchor=(0.5, 0.02),
            ncols=-(-len(found) // lines),  # as even as can be
            frameon=False,
            fontsize=8.5,
        )
