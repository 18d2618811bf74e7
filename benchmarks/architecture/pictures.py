"""The pictures of docs/architecture.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.architecture.pages import imports, layer_of
from benchmarks.architecture.tracing import Call
from eventful.bench.plots import FAINT, INK
from eventful.surgery.libraries import load
from tests import test_house as house

COLOURS = {
    "stream": "#4a4a4a",
    "engine": "#0067a5",
    "surgery": "#a45ea8",
    "rules": "#d1582a",
    "memory": "#2a8a57",
    "cost": "#c79a1b",
    "policies": "#7a8b2a",
    "config": "#7a8b2a",
    "tokens": "#3f97a8",
    "ops": "#7d6a5b",
}
_ROW = 0.19  # inches of one row of bars
_WIDE = 15.0  # inches
_LETTER = 0.056  # inches of one letter of a label


def draw_frame(calls: Sequence[Call], names: Sequence[str], title: str, path: Path) -> None:
    """One lane per package, the top layer first; one bar per call, in order from left to right."""
    plt: Any = load("matplotlib.pyplot")
    rows = {name: 1 for name in names}
    depth = []
    for call in calls:
        depth.append(sum(other.package == call.package for other in call.above))
        rows[call.package] = max(rows[call.package], depth[-1] + 1)
    top, tops = 0.0, {}
    for name in names:
        tops[name] = top
        top += rows[name] + 0.8
    figure, axes = plt.subplots(figsize=(_WIDE, top * _ROW + 0.9), layout="constrained")
    per_inch = len(calls) / (_WIDE - 1.2)
    for call, row in zip(calls, depth, strict=True):
        y = tops[call.package] + row
        width = max(call.end - call.start, 1)
        axes.barh(
            y + 0.5, width, left=call.start, height=0.86, color=COLOURS[call.package],
            edgecolor="white", linewidth=0.4, zorder=2,
        )  # fmt: skip
        if len(call.name) * _LETTER * per_inch < width:
            axes.text(
                call.start + 0.06 * per_inch, y + 0.52, call.name, va="center", ha="left",
                fontsize=6.6, color="white", zorder=3, clip_on=True,
            )  # fmt: skip
        _join(axes, call, tops, dict(zip(map(id, calls), depth, strict=True)))
    _finish(axes, names, rows, tops, len(calls), top)
    axes.set_title(title, loc="left")
    figure.savefig(path)
    plt.close(figure)


def _join(axes: Any, call: Call, tops: dict[str, float], depth: dict[int, int]) -> None:
    """A line from the caller's bar to a call in another lane; red where it goes up."""
    caller = call.caller
    if caller is None or caller.package == call.package:
        return
    above = house.FLOOR_OF[call.package] > house.FLOOR_OF[caller.package]
    start = tops[caller.package] + depth[id(caller)] + (0.07 if above else 0.93)
    end = tops[call.package] + depth[id(call)] + (0.93 if above else 0.07)
    style = {"color": "#c0182b", "linewidth": 1.3} if above else {"color": INK, "linewidth": 0.35}
    axes.plot([call.start + 0.4] * 2, [start, end], zorder=4 if above else 1, **style)
    if above and "<" not in call.name:
        beside, middle = call.end + 0.8, tops[call.package] + depth[id(call)] + 0.52
        axes.text(
            beside, middle, call.name, va="center", fontsize=6.6, color=style["color"], zorder=5
        )


def _finish(
    axes: Any, names: Sequence[str], rows: dict[str, int], tops: dict[str, float], calls: int,
    height: float,
) -> None:  # fmt: skip
    for name in names:
        axes.axhspan(tops[name] - 0.2, tops[name] + rows[name] + 0.2, color="#f4f4f4", zorder=0)
    axes.set_yticks([tops[name] + rows[name] / 2 for name in names], names)
    axes.set_ylim(height, -0.6)
    axes.set_xlim(-2, calls + 2)
    axes.set_xlabel("calls of eventful's own functions so far; a red line is a call upward")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def draw_packages(path: Path) -> None:
    """Who imports whom: a row and a column for each package, by layer."""
    plt: Any = load("matplotlib.pyplot")
    layers, found = layer_of(), imports()
    names = sorted(layers, key=lambda name: (-layers[name], name))
    figure, axes = plt.subplots(figsize=(9.2, 6.4), layout="constrained")
    for row, name in enumerate(names):
        for column, other in enumerate(names):
            if layers[other] > layers[name] or name == other:
                continue
            axes.add_patch(plt.Rectangle((column, row), 1, 1, color="#f0f0f0", zorder=0))
            count = found[name][other]
            if count:
                shade = min(0.35 + count / 40, 1)
                place = (column + 0.06, row + 0.06)
                cell = plt.Rectangle(place, 0.88, 0.88, color="#0067a5", alpha=shade, zorder=1)
                axes.add_patch(cell)
                axes.text(column + 0.5, row + 0.53, count, ha="center", va="center", color="white")
        axes.add_patch(plt.Rectangle((row, row), 1, 1, color="#4a4a4a", zorder=1))
    for line in range(1, len(names)):
        if layers[names[line]] != layers[names[line - 1]]:
            axes.axhline(line, color=FAINT, linewidth=0.8)
            axes.axvline(line, color=FAINT, linewidth=0.8)
    ticks = [place + 0.5 for place in range(len(names))]
    axes.set_yticks(ticks, [f"{name}   {layers[name] + 1}" for name in names])
    axes.set_xticks(ticks, names, rotation=45, ha="left", rotation_mode="anchor")
    axes.xaxis.tick_top()
    axes.set_xlim(0, len(names))
    axes.set_ylim(len(names), 0)
    axes.set_ylabel("imports, with its layer")
    axes.set_title("is imported: number of import statements", fontsize=9.5)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.savefig(path)
    plt.close(figure)
