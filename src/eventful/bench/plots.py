"""Pictures of results: operations against time, and how time grows. From CSV rows alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eventful.bench.results import Record
from eventful.bench.tables import by_machine, machine, number
from eventful.surgery import libraries

COLOURS = {
    "fast": "#0067a5",
    "exact": "#d1582a",
    "paper": "#2a8a57",
    "tokenwise": "#a45ea8",
    "stgt": "#c79a1b",
}
INK, FAINT, DENSE, WARNING = "#222222", "#d9d9d9", "#4a4a4a", "#b3261e"
MARKS = "os^DvP*X<>"  # of models
DOTS = (0, (1, 2))
AXES = {
    "r": ("r", "tokens updated, r"),
    "tokens": ("tokens", "tokens per frame, N"),
    "batch": ("batch", "streams stepped together"),
    "depth": ("depth", "blocks"),
}
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": "#9a9a9a",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "figure.facecolor": "white",
    "savefig.dpi": 160,
}


def render(runs: Sequence[Record], swept: Sequence[Record], folder: Path) -> list[Path]:
    """Write every picture for which there are rows; returns the files, the comparison first."""
    matplotlib: Any = libraries.load("matplotlib")
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    with matplotlib.rc_context(STYLE):
        if whole := [record for record in runs if _whole(record)]:
            made.append(_save(_comparison(whole), folder / "operations-and-time.png"))
        for name, group in _sweeps(swept).items():
            made.append(_save(_growth(group), folder / f"growth-{name}.png"))
    return made


def _save(figure: Any, path: Path) -> Path:
    # No date or version inside, so that the same rows give the same file.
    figure.savefig(path, metadata={"Software": None})
    libraries.load("matplotlib.pyplot").close(figure)
    return path


def _comparison(records: Sequence[Record]) -> Any:
    """Times fewer operations against times faster, one point per row, a panel per machine."""
    groups = by_machine(records)
    models = sorted({record["model"] for record in records})
    marks = {model: MARKS[place % len(MARKS)] for place, model in enumerate(models)}
    points = [_point(record) for record in records]
    wide = (0.9, 1.6 * max([2.0, *(x for x, _ in points)]))
    values = [y for _, y in points]
    tall = (min(0.8, 0.8 * min(values)), 1.35 * max([2.0, *values]))
    columns = min(3, len(groups))
    rows = -(-len(groups) // columns)
    # Panels of a size that gives both axes the same scale, so that the diagonal is one.
    high = 4.4
    long = high * math.log(wide[1] / wide[0]) / math.log(tall[1] / tall[0])
    width = max(6.0, columns * (long + 0.9) + 0.1)
    height = 0.9 + rows * (high + 0.9)
    figure, grid = libraries.load("matplotlib.pyplot").subplots(
        rows, columns, figsize=(width, height), squeeze=False
    )
    for place, axes in enumerate(grid.flat):
        if place < len(groups):
            where = list(groups)[place]
            _compare(axes, groups[where], marks, wide, tall)
            axes.set_title(where, loc="left")
        else:
            axes.set_axis_off()
    _heading(figure, "Operations saved, and time saved", _keys(records, marks))
    figure.subplots_adjust(
        left=0.8 / width,
        right=(columns * (long + 0.9) - 0.1) / width,
        bottom=0.55 / height,
        top=1 - 1.2 / height,
        wspace=0.9 / long,
        hspace=0.9 / high,
    )
    return figure


def _whole(record: Record) -> bool:
    """Whether the row has both sides of the comparison."""
    return bool(number(record, "macs_ratio") and number(record, "speedup"))


def _point(record: Record) -> tuple[float, float]:
    """Times fewer operations, times faster."""
    return 1 / float(record["macs_ratio"]), float(record["speedup"])


def _compare(
    axes: Any,
    records: Sequence[Record],
    marks: dict[str, str],
    wide: tuple[float, float],
    tall: tuple[float, float],
) -> None:
    both = max(wide[0], tall[0]), min(wide[1], tall[1])
    axes.plot(both, both, color="#8a8a8a", linewidth=1, zorder=1)
    axes.axhspan(tall[0], 1, color=WARNING, alpha=0.06, linewidth=0, zorder=0)
    axes.axhline(1, color=WARNING, linewidth=0.8, alpha=0.6, zorder=1)
    for record in records:
        _draw_point(axes, record, marks[record["model"]])
    for scale in (axes.set_xscale, axes.set_yscale):
        scale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: _as_times(value))
        axis.set_minor_locator(libraries.load("matplotlib.ticker").NullLocator())
    axes.set(xlim=wide, ylim=tall)
    axes.set_xlabel("fewer operations than dense")
    axes.set_ylabel("faster than dense at its best")
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=3)
    axes.annotate(
        "slower than dense",
        (1, 1),
        (6, -4),
        textcoords="offset points",
        va="top",
        color=WARNING,
        fontsize=8.5,
    )
    axes.annotate(
        "every operation saved is time saved",
        (both[1] / 1.15, both[1] / 1.15),
        (-4, 4),
        textcoords="offset points",
        rotation=45,
        rotation_mode="anchor",
        ha="right",
        va="bottom",
        color="#6b6b6b",
        fontsize=8.5,
    )


def _draw_point(axes: Any, record: Record, marker: str) -> None:
    """One row, with its batch size where that is not 1."""
    x, y = _point(record)
    axes.plot(
        x,
        y,
        linestyle="",
        marker=marker,
        markersize=8.5,
        color=COLOURS.get(record["preset"], INK),
        markeredgecolor="white",
        markeredgewidth=0.9,
        zorder=3,
    )
    if record["batch"] != "1":
        axes.annotate(
            f"×{record['batch']}",
            (x, y),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            color="#555555",
            zorder=4,
        )


def _as_times(value: float) -> str:
    """Powers of two as text: 4x, 1x, 1/4."""
    return f"{value:g}x" if value >= 1 else f"1/{1 / value:g}"


def _keys(records: Sequence[Record], marks: dict[str, str]) -> list[dict[str, Any]]:
    """Colours of presets, and shapes of models."""
    presets = [name for name in COLOURS if any(r["preset"] == name for r in records)]
    return [
        {name: _mark("o", COLOURS[name]) for name in presets},
        {name: _mark(mark, "#777777") for name, mark in marks.items()},
    ]


def _mark(shape: str, colour: str) -> Any:
    line = libraries.load("matplotlib.lines").Line2D
    return line(
        [], [], linestyle="", marker=shape, color=colour, markeredgecolor="white", markersize=8.5
    )


def _heading(figure: Any, title: str, keys: Sequence[dict[str, Any]]) -> None:
    """A title, and a line below it for each key."""
    width, height = figure.get_figwidth(), figure.get_figheight()
    figure.text(
        0.12 / width,
        1 - 0.12 / height,
        title,
        ha="left",
        va="top",
        fontweight="bold",
        fontsize=11.5,
    )
    for line, key in enumerate(keys):
        figure.legend(
            key.values(),
            key.keys(),
            loc="upper left",
            bbox_to_anchor=(0.02 / width, 1 - (0.32 + 0.22 * line) / height),
            ncols=len(key),
            frameon=False,
            fontsize=8.8,
            handlelength=1.8,
            columnspacing=1.4,
        )


def _sweeps(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Rows of sweeps by machine, model and type, under a name fit for a file."""
    groups: dict[str, list[Record]] = {}
    for where, group in by_machine(records).items():
        for record in group:
            name = f"{where} {record['model']} {record['dtype']}"
            slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
            groups.setdefault(slug, []).append(record)
    return groups


def _growth(records: Sequence[Record]) -> Any:
    """A panel for each quantity that was varied."""
    panels = [over for over in AXES if any(record["over"] == over for record in records)]
    rows, columns = (len(panels) + 1) // 2, min(2, len(panels))
    figure, grid = libraries.load("matplotlib.pyplot").subplots(
        rows, columns, figsize=(4.4 * columns, 3.2 * rows + 0.7), squeeze=False
    )
    for place, axes in enumerate(grid.flat):
        if place < len(panels):
            over = panels[place]
            _panel(axes, over, [record for record in records if record["over"] == over])
        else:
            axes.set_axis_off()
    first = records[0]
    key: dict[str, Any] = {}
    for axes in grid.flat:
        key |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    line = libraries.load("matplotlib.lines").Line2D
    key["by operations alone"] = line([], [], color="#777777", linewidth=1.3, linestyle=DOTS)
    _heading(figure, f"{first['model']}, {first['dtype']}, {machine(first)}", [key])
    top = 1 - 0.67 / figure.get_figheight()
    figure.tight_layout(rect=(0, 0, 1, top), h_pad=1.6, w_pad=1.6)
    return figure


def _panel(axes: Any, over: str, records: Sequence[Record]) -> None:
    column, title = AXES[over]
    axes.plot(
        *_line(records, column, "dense_best_ms"),
        color=DENSE,
        linewidth=2,
        marker="o" if over != "r" else "",
        markersize=4,
        label="dense at its best",
    )
    for preset in [name for name in COLOURS if any(r["preset"] == name for r in records)]:
        own = [record for record in records if record["preset"] == preset]
        x, y = _line(own, column, "ms")
        axes.plot(
            x,
            y,
            color=COLOURS[preset],
            linewidth=2,
            marker="o",
            markersize=4.5,
            markeredgecolor="white",
            label=preset,
        )
        ideal = dict(_ideal(own, column))
        axes.plot(
            list(ideal),
            list(ideal.values()),
            color=COLOURS[preset],
            linewidth=1.1,
            linestyle=DOTS,
        )
    axes.set_xlabel(title)
    axes.set_ylabel("ms per frame" if over != "batch" else "ms per step of all streams")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=3)


def _line(records: Sequence[Record], column: str, name: str) -> tuple[list[float], list[float]]:
    """Points in order; where several rows share an x, as the dense time does, their first."""
    found: dict[float, float] = {}
    for record in records:
        x, y = number(record, column), number(record, name)
        if x is not None and y is not None:
            found.setdefault(x, y)
    ordered = sorted(found)
    return ordered, [found[x] for x in ordered]


def _ideal(records: Sequence[Record], column: str) -> Iterator[tuple[float, float]]:
    """The fastest dense time multiplied by the share of operations: the ideal saving."""
    for record in sorted(records, key=lambda record: float(record[column])):
        x, dense = number(record, column), number(record, "dense_best_ms")
        ratio = number(record, "macs_ratio")
        if x is not None and dense is not None and ratio is not None:
            yield x, dense * ratio
