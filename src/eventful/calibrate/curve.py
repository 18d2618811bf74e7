"""The curve of a calibration: error, and accuracy where known, against operations and time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eventful.calibrate.choose import Choice, Limits
from eventful.calibrate.rows import Row
from eventful.calibrate.settings import GLOBAL, PER_GATE, SKIPPING
from eventful.surgery.libraries import load
from eventful.video.charts import FAINT, GRID, STYLE

_COLOURS = {
    "FollowScene": "#2e6fb7",
    "TopFraction": "#d98c00",
    "NoiseThreshold": "#4c9a5b",
    PER_GATE: "#2e6fb7",
    GLOBAL: "#b0473f",
    SKIPPING: FAINT,
}
_OTHERS = ("#8d6a9f", "#4c9a5b", "#b0473f", "#3f4450")
_CHOSEN = "#c2255c"
# Where a label may stand, seen from its point: offset in points, and how it is aligned.
_PLACES = (
    ((6, 5), "left", "bottom"),
    ((6, -5), "left", "top"),
    ((-6, 5), "right", "bottom"),
    ((-6, -5), "right", "top"),
    ((0, 8), "center", "bottom"),
    ((0, -8), "center", "top"),
    ((9, 0), "left", "center"),
    ((-9, 0), "right", "center"),
    ((6, 16), "left", "bottom"),
    ((6, -16), "left", "top"),
    ((-6, 16), "right", "bottom"),
    ((-6, -16), "right", "top"),
)
_TICKS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300)
Value = Callable[[Row], float | None]


def draw(
    rows: Sequence[Row], choice: Choice | None, limits: Limits, title: str, path: Path
) -> None:
    """Write the picture: a column for operations and one for time, a row for each measure."""
    load("matplotlib").use("Agg")
    pyplot: Any = load("matplotlib.pyplot")
    costs: list[tuple[str, Value, float | None]] = [
        ("operations, % of dense", lambda row: row.operations, limits.operations)
    ]
    if any(row.time is not None for row in rows):
        most = None if limits.speed is None else 1 / limits.speed
        costs.append(("time, % of dense", lambda row: row.time, most))
    measures: list[tuple[str, Value, float | None]] = [
        ("error that 90 % of frames stay within", lambda row: row.error_p90, limits.error)
    ]
    if any(row.map50 is not None for row in rows):
        measures.append(("mAP50, %", _points, None))
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            len(measures), len(costs), layout="constrained", squeeze=False,
            figsize=(0.6 + 4.9 * len(costs), 0.9 + 3.7 * len(measures)),
        )  # fmt: skip
        for line, (measure, y, highest) in enumerate(measures):
            for column, (cost, x, most) in enumerate(costs):
                axis = axes[line][column]
                _panel(axis, rows, choice, x, y)
                if line == 0:
                    _from_zero(axis, highest)
                _limits(axis, most, highest)
                axis.set_xlabel(cost)
                axis.set_ylabel(measure if column == 0 else "")
        figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, weight="bold")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncol=4, fontsize=8.5, frameon=False
        )
        figure.canvas.draw()  # places of labels depend on the final layout
        for axis in axes.flatten():
            _place_labels(figure, axis)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(str(path), dpi=140, facecolor="white")
        pyplot.close(figure)


def _points(row: Row) -> float | None:
    return None if row.map50 is None else 100 * row.map50


def _panel(axis: Any, rows: Sequence[Row], choice: Choice | None, x: Value, y: Value) -> None:
    families: dict[str, list[Row]] = {}
    for row in rows:
        if row.setting is not None:
            families.setdefault(row.setting.family, []).append(row)
    for place, (family, members) in enumerate(families.items()):
        colour = _COLOURS.get(family, _OTHERS[place % len(_OTHERS)])
        skips = family == SKIPPING
        known = [(100 * (x(row) or 0.0), y(row) or 0.0, row) for row in members]
        known.sort(key=lambda point: point[:2])
        axis.plot(
            [point[0] for point in known], [point[1] for point in known], color=colour,
            linestyle="--" if skips else "-", linewidth=1.1 if skips else 1.4,
            marker="o", markersize=4 if skips else 5.5, label=family,
        )  # fmt: skip
        for across, up, row in known:
            assert row.setting is not None
            axis.annotate(row.setting.label, (across, up), fontsize=8, color=colour)
    if choice is not None and choice.met:
        axis.plot(
            [100 * (x(choice.row) or 0.0)], [y(choice.row) or 0.0], linestyle="none", marker="o",
            markersize=13, markerfacecolor="none", markeredgecolor=_CHOSEN, markeredgewidth=1.8,
            label="recommended" if choice.row.cost < 1 else "chosen; dense is cheaper",
        )  # fmt: skip
    axis.set_xscale("log")
    axis.margins(x=0.14, y=0.14)

    ticks = [tick for tick in _TICKS if _inside(axis, tick)]
    axis.set_xticks(ticks, [f"{tick}" for tick in ticks])
    axis.minorticks_off()
    axis.grid(color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _from_zero(axis: Any, limit: float | None) -> None:
    """Errors from 0, up to the limit unless that is far above all of them."""
    top = axis.get_ylim()[1]
    if limit is not None and limit < 3 * top:
        top = max(top, 1.08 * limit)
    axis.set_ylim(0, top)


def _inside(axis: Any, tick: float) -> bool:
    low, high = axis.get_xlim()
    return bool(low <= tick <= high)


def _limits(axis: Any, most: float | None, highest: float | None) -> None:
    """The limits the user gave, where they lie in the picture."""
    style = {"color": _CHOSEN, "linewidth": 0.9, "linestyle": (0, (1, 2)), "zorder": 1}
    if most is not None and _inside(axis, 100 * most):
        axis.axvline(100 * most, **style)
    low, high = axis.get_ylim()
    if highest is not None and low <= highest <= high:
        axis.axhline(highest, **style)
        axis.text(
            0.008, highest, "limit", transform=axis.get_yaxis_transform(), ha="left",
            va="bottom", fontsize=8, color=_CHOSEN,
        )  # fmt: skip


def _place_labels(figure: Any, axis: Any) -> None:
    """Move each label to the place around its point where it covers the least."""
    renderer = figure.canvas.get_renderer()
    scale = figure.dpi / 72
    points = [axis.transData.transform(label.xy) for label in axis.texts if hasattr(label, "xy")]
    taken = [
        (place[0] - 4 * scale, place[1] - 4 * scale, place[0] + 4 * scale, place[1] + 4 * scale)
        for place in points
    ]
    taken += [
        tuple(text.get_window_extent(renderer).extents)
        for text in axis.texts
        if not hasattr(text, "xy")
    ]
    lines = [_along(line) for line in axis.lines if line.get_linestyle() != "None"]
    crossed = [spot for line in lines for spot in line]
    frame = tuple(axis.get_window_extent(renderer).extents)
    for own, label in enumerate(text for text in axis.texts if hasattr(text, "xy")):
        best = None
        for rank, (offset, across, up) in enumerate(_PLACES):
            label.set(ha=across, va=up)
            label.xyann, label.anncoords = offset, "offset points"
            box = tuple(label.get_window_extent(renderer).extents)
            badness = (
                20 * sum(_overlap(box, other) for other in taken)
                + _outside(box, frame) * 20
                + 6 * sum(_holds(box, spot) for spot in crossed)
                + 40 * _nearer_others(box, points, own)
                + 2 * rank
            )
            if best is None or badness < best[0]:
                best = (badness, offset, across, up, box)
        assert best is not None
        label.set(ha=best[2], va=best[3])
        label.xyann = best[1]
        taken.append(best[4])


def _along(line: Any) -> list[tuple[float, float]]:
    """Places along a drawn line, in pixels."""
    spots = line.get_transform().transform(line.get_xydata())
    made = []
    for (x0, y0), (x1, y1) in itertools.pairwise(spots):
        steps = max(2, int(max(abs(x1 - x0), abs(y1 - y0)) / 4))
        made += [(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(steps + 1)]
    return made


def _overlap(a: Sequence[float], b: Sequence[float]) -> float:
    """Area that two boxes share."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return max(0.0, width) * max(0.0, height)


def _nearer_others(box: Sequence[float], points: Sequence[Any], own: int) -> int:
    """How many other points are nearer to a label than its own; points at one place are equal."""
    middle = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    away = [math.dist(middle, point) for point in points]
    return sum(distance < away[own] - 1 for distance in away)


def _outside(box: Sequence[float], frame: Sequence[float]) -> float:
    """How far a box leaves the frame, in pixels."""
    return (
        max(0.0, frame[0] - box[0])
        + max(0.0, box[2] - frame[2])
        + max(0.0, frame[1] - box[1])
        + max(0.0, box[3] - frame[3])
    )


def _holds(box: Sequence[float], spot: tuple[float, float]) -> bool:
    return box[0] <= spot[0] <= box[2] and box[1] <= spot[1] <= box[3]
